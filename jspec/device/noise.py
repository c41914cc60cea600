"""Gumbel noise g(seed, position, token id) from a counter-based hash.

Sampling is `argmax_v(logits(v) + T * g(s, p, v))` (the Gumbel-max trick), by every program that
chooses the token at position p of a request with seed s, so the text is a function of (model,
prompt, seed). All three pass through MurmurHash3's 32-bit finaliser (Appleby, public domain).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

# Dividing by less could overflow float32; at this temperature only the maximum has any weight.
COLDEST = 1e-6


def mix32(x: jax.Array) -> jax.Array:
    """Return MurmurHash3's finaliser of x: a bijection in which every bit affects every bit."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> jnp.uint32(16))


def position_key(
    seed: UInt32[Array, "*b 2"], position: Int[Array, "*b"]
) -> tuple[UInt32[Array, "*b"], UInt32[Array, "*b"]]:
    """Return the 64 key bits of (seed, position); seed is (high word, low word). Given the
    position, low -> h0 -> k0 and high -> h1 -> k1 can be inverted: no two seeds share a key."""
    return key_of_words(seed[..., 0], seed[..., 1], position)


def key_of_words(
    high: UInt32[Array, "*b"], low: UInt32[Array, "*b"], position: Int[Array, "*b"]
) -> tuple[UInt32[Array, "*b"], UInt32[Array, "*b"]]:
    """Return `position_key` of a seed's two words, which are scalars in a kernel."""
    h0 = mix32(low ^ jnp.uint32(0x9E3779B9))
    h1 = mix32(high ^ h0)
    k0 = mix32(h0 ^ mix32(position.astype(jnp.uint32) + h1))
    return k0, mix32(k0 + h1)


def noise_bits(
    key: tuple[jax.Array, jax.Array], token_ids: Int[Array, "..."]
) -> UInt32[Array, "..."]:
    """Return 32 hash bits of (key, token id); key words and token ids broadcast."""
    return mix32(mix32(token_ids.astype(jnp.uint32) + key[1]) ^ key[0])


def gumbel_from_bits(bits: UInt32[Array, "*b"]) -> Float[Array, "*b"]:
    """Map 32 uniform bits to a finite standard Gumbel in float32, accurate down to odds of 1e-8: u
    = (bits + 1/2) / 2**32 is precise near 0, where the Gumbel is large."""
    u = (bits.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32)
    u = jnp.minimum(u, jnp.float32(1.0 - 2.0**-24))
    return -jnp.log(-jnp.log1p(-u))


def gumbel(
    seed: UInt32[Array, "*b 2"], position: Int[Array, "*b"], token_ids: Int[Array, "v"]
) -> Float[Array, "*b v"]:
    k0, k1 = position_key(seed, position)
    return gumbel_from_bits(noise_bits((k0[..., None], k1[..., None]), token_ids))
