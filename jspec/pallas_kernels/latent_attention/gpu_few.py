"""The products of latent attention for at most 16 tokens on an NVIDIA GPU (Triton).

    down -> queries and records -> absorb -> [attend] -> values -> [the output's product]

`down` multiplies by both low-rank projections, split along the inputs; each program of the next
product norms its queries itself, and one makes the records; `absorb` rotates and places the rest of
each query. Rounding is that of layers/latent_attention.py.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from jspec.pallas_kernels.kv_write.reference import turn
from jspec.spec.layers.attention import LatentAttentionSpec

MOST_TOKENS = 16  # rows of the smallest tensor core tile
DEEP = 64  # inputs of one iteration
DOWN = 32  # columns of a program of `down`
SHARES = 4  # of the inputs of `down`
QUERIES = 32  # columns of a program of the queries' product
ABSORBED = 64  # of the latent, of a program of `absorb`
VALUES = 32  # columns of a program of `values`
NAMES = ("q_a", "q_a_norm", "q", "kv_a", "kv_a_norm", "k_up", "v_up")


def serves(params: Mapping[str, Any], x: jax.Array, spec: LatentAttentionSpec) -> bool:
    """Return whether the kernels run these products: dense ones of x's dtype, of whole tiles."""
    if spec.q_rank is None or spec.growth is not None or not 1 <= x.shape[0] <= MOST_TOKENS:
        return False
    products = [params[name] for name in NAMES if not name.endswith("norm")]
    is_dense = all(
        part.keys() == {"kernel"}
        and isinstance(part["kernel"], jax.Array)
        and part["kernel"].dtype == x.dtype
        for part in products
    )
    size = params["q_a"]["kernel"].shape[0]
    deep = (size / SHARES, spec.q_rank, spec.nope_dim, spec.kv_rank)
    return (
        is_dense
        and not any(inputs % DEEP for inputs in deep)
        and params["q"]["kernel"].shape[1] % QUERIES == 0
        and spec.rope_dim % DOWN == spec.value_dim % VALUES == 0
        and spec.kv_rank & (spec.kv_rank - 1) == spec.rope_dim & (spec.rope_dim - 1) == 0
    )


def queries_and_records(
    params: Mapping[str, Any],
    x: Float[Array, "T E"],
    cos: Float[Array, "T half"],
    sin: Float[Array, "T half"],
    *,
    spec: LatentAttentionSpec,
    interpret: bool = False,
) -> tuple[Float[Array, "T H D"], Float[Array, "T D"]]:
    """Return (absorbed queries, records), as latent_attention/reference.py defines them."""
    shares = down(x, params["q_a"]["kernel"], params["kv_a"]["kernel"], interpret=interpret)
    q, records = up(shares, params, cos, sin, spec=spec, dtype=x.dtype, interpret=interpret)
    how: dict[str, Any] = {"spec": spec, "interpret": interpret}
    return absorb(q, params["k_up"]["kernel"], cos, sin, **how), records


def down(
    x: Float[Array, "T E"],
    q_a: Float[Array, "E Q"],
    kv_a: Float[Array, "E D"],
    *,
    interpret: bool = False,
) -> Float[Array, "S T QD"]:
    """Return f32 shares of x @ q_a, then those of x @ kv_a."""
    num_tokens, columns = x.shape[0], q_a.shape[1] + kv_a.shape[1]
    shares: jax.Array = pl.pallas_call(
        _down,
        grid=(columns // DOWN, SHARES),
        out_shape=jax.ShapeDtypeStruct((SHARES, num_tokens, columns), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=4),
        interpret=interpret,
        name="latent_down",
    )(x, q_a, kv_a)
    return shares


def _down(x_ref: Any, q_a_ref: Any, kv_a_ref: Any, shares_ref: Any) -> None:
    tile, share = pl.program_id(0), pl.program_id(1)
    depth, num_q = x_ref.shape[1] // SHARES, q_a_ref.shape[1] // DOWN
    token, exists = _tokens(x_ref.shape[0])
    place = jnp.arange(DOWN, dtype=jnp.int32)

    def run(weights_ref: Any, first: Any) -> None:
        def inputs(at: jax.Array) -> jax.Array:
            where = x_ref.at[token[:, None], share * depth + at[None]]
            return plt.load(where, mask=exists[:, None], other=0.0)

        def weights(at: jax.Array) -> jax.Array:
            return plt.load(weights_ref.at[share * depth + at[:, None], first + place[None]])

        total = _product(inputs, weights, depth=depth, columns=DOWN)
        where = shares_ref.at[share, token[:, None], tile * DOWN + place[None]]
        plt.store(where, total, mask=exists[:, None])

    pl.when(tile < num_q)(lambda: run(q_a_ref, tile * DOWN))
    pl.when(tile >= num_q)(lambda: run(kv_a_ref, (tile - num_q) * DOWN))


def up(
    shares: Float[Array, "S T QD"],
    params: Mapping[str, Any],
    cos: Float[Array, "T half"],
    sin: Float[Array, "T half"],
    *,
    spec: LatentAttentionSpec,
    dtype: Any,
    interpret: bool = False,
) -> tuple[Float[Array, "T HD"], Float[Array, "T D"]]:
    """Return (the heads' queries, before RoPE; records), from the shares of `down`."""
    num_tokens, columns = shares.shape[1], params["q"]["kernel"].shape[1]
    out: tuple[jax.Array, jax.Array] = pl.pallas_call(
        functools.partial(_up, spec=spec),
        grid=(columns // QUERIES + 1,),
        out_shape=(
            jax.ShapeDtypeStruct((num_tokens, columns), dtype),
            jax.ShapeDtypeStruct((num_tokens, spec.kv_rank + spec.rope_dim), dtype),
        ),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=4),
        interpret=interpret,
        name="latent_up",
    )(
        shares,
        params["q_a_norm"]["scale"],
        params["q"]["kernel"],
        params["kv_a_norm"]["scale"],
        cos,
        sin,
    )
    return out


def _up(
    shares_ref: Any,
    q_scale_ref: Any,
    q_ref: Any,
    latent_scale_ref: Any,
    cos_ref: Any,
    sin_ref: Any,
    out_ref: Any,
    records_ref: Any,
    *,
    spec: LatentAttentionSpec,
) -> None:
    tile, dtype = pl.program_id(0), out_ref.dtype
    q_rank, rank, half = q_ref.shape[0], spec.kv_rank, spec.rope_dim // 2
    token, exists = _tokens(out_ref.shape[0])

    def summed(column: jax.Array) -> jax.Array:
        total: Any = 0.0
        for share in range(SHARES):
            where = shares_ref.at[tile * 0 + share, token[:, None], column[None]]
            total = total + plt.load(where, mask=exists[:, None], other=0.0)
        rounded: jax.Array = total.astype(dtype).astype(jnp.float32)
        return rounded

    @pl.when(tile < q_ref.shape[1] // QUERIES)
    def _queries() -> None:
        step = jnp.arange(DEEP, dtype=jnp.int32)
        place = tile * QUERIES + jnp.arange(QUERIES, dtype=jnp.int32)

        def add(i: jax.Array, squares: jax.Array) -> jax.Array:
            part = summed(i * DEEP + step)
            return squares + jnp.sum(part * part, axis=1)

        zeros = jnp.zeros(MOST_TOKENS, jnp.float32)
        squares = lax.fori_loop(0, q_rank // DEEP, add, zeros)
        factor = lax.rsqrt(squares / q_rank + spec.norm_eps)[:, None]

        def normed(at: jax.Array) -> jax.Array:
            scale = plt.load(q_scale_ref.at[at]).astype(jnp.float32)
            return (summed(at) * factor * scale[None]).astype(dtype)

        def weights(at: jax.Array) -> jax.Array:
            return plt.load(q_ref.at[at[:, None], place[None]])

        total = _product(normed, weights, depth=q_rank, columns=QUERIES)
        where = out_ref.at[token[:, None], place[None]]
        plt.store(where, total.astype(dtype), mask=exists[:, None])

    @pl.when(tile == q_ref.shape[1] // QUERIES)
    def _records() -> None:
        column = jnp.arange(rank, dtype=jnp.int32)
        latent = summed(q_rank + column)
        factor = lax.rsqrt(jnp.sum(latent * latent, axis=1) / rank + spec.norm_eps)
        scale = plt.load(latent_scale_ref.at[column]).astype(jnp.float32)
        normed = (latent * factor[:, None] * scale[None]).astype(dtype)
        plt.store(records_ref.at[token[:, None], column[None]], normed, mask=exists[:, None])
        first, second = _pair_of(half, is_interleaved=spec.interleaved)
        pair = [summed(q_rank + rank + at) for at in (first, second)]
        turned = turn(pair[0], pair[1], *_angles(cos_ref, sin_ref, token, exists))
        _store_halves(records_ref, token, exists, rank, turned, dtype)


def absorb(
    q: Float[Array, "T HD"],
    k_up: Float[Array, "rank HN"],
    cos: Float[Array, "T half"],
    sin: Float[Array, "T half"],
    *,
    spec: LatentAttentionSpec,
    interpret: bool = False,
) -> Float[Array, "T H D"]:
    """Return each head's query in the latent space, followed by its part that RoPE rotates."""
    num_tokens, num_heads = q.shape[0], q.shape[1] // spec.head_dim
    width = spec.kv_rank + spec.rope_dim
    out: jax.Array = pl.pallas_call(
        functools.partial(_absorb, spec=spec),
        grid=(num_heads, spec.kv_rank // ABSORBED),
        out_shape=jax.ShapeDtypeStruct((num_tokens, num_heads * width), q.dtype),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="latent_absorb",
    )(q, k_up.T, cos, sin)  # both are stored column-major, so nothing is copied
    return out.reshape(num_tokens, num_heads, width)


def _absorb(
    q_ref: Any, k_up_ref: Any, cos_ref: Any, sin_ref: Any, out_ref: Any, *, spec: Any
) -> None:
    head, tile, dtype = pl.program_id(0), pl.program_id(1), out_ref.dtype
    nope, rank, half = spec.nope_dim, spec.kv_rank, spec.rope_dim // 2
    token, exists = _tokens(q_ref.shape[0])
    place = tile * ABSORBED + jnp.arange(ABSORBED, dtype=jnp.int32)
    start, place_of_head = head * spec.head_dim, head * (rank + spec.rope_dim)

    def query(at: jax.Array) -> jax.Array:
        where = q_ref.at[token[:, None], start + at[None]]
        return plt.load(where, mask=exists[:, None], other=0.0)

    def weights(at: jax.Array) -> jax.Array:
        return plt.load(k_up_ref.at[head * nope + at[:, None], place[None]])

    total = _product(query, weights, depth=nope, columns=ABSORBED)
    where = out_ref.at[token[:, None], place_of_head + place[None]]
    plt.store(where, total.astype(dtype), mask=exists[:, None])

    @pl.when(tile == 0)
    def _() -> None:
        first, second = _pair_of(half, is_interleaved=spec.interleaved)
        pair = [query(nope + at).astype(jnp.float32) for at in (first, second)]
        turned = turn(pair[0], pair[1], *_angles(cos_ref, sin_ref, token, exists))
        _store_halves(out_ref, token, exists, place_of_head + rank, turned, dtype)


def values(
    mixed: Float[Array, "T H rank"],
    v_up: Float[Array, "rank HV"],
    *,
    interpret: bool = False,
) -> Float[Array, "T HV"]:
    num_tokens, num_heads, _ = mixed.shape
    out: jax.Array = pl.pallas_call(
        functools.partial(_values, num_heads=num_heads),
        grid=(v_up.shape[1] // VALUES,),
        out_shape=jax.ShapeDtypeStruct((num_tokens, v_up.shape[1]), mixed.dtype),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=4),
        interpret=interpret,
        name="latent_values",
    )(mixed.reshape(num_tokens, -1), v_up.T)
    return out


def _values(mixed_ref: Any, v_up_ref: Any, out_ref: Any, *, num_heads: int) -> None:
    tile, rank = pl.program_id(0), v_up_ref.shape[1]
    head = tile // (v_up_ref.shape[0] // num_heads // VALUES)
    token, exists = _tokens(out_ref.shape[0])
    place = tile * VALUES + jnp.arange(VALUES, dtype=jnp.int32)

    def latent(at: jax.Array) -> jax.Array:
        where = mixed_ref.at[token[:, None], head * rank + at[None]]
        return plt.load(where, mask=exists[:, None], other=0.0)

    def weights(at: jax.Array) -> jax.Array:
        return plt.load(v_up_ref.at[place[:, None], at[None]])

    total = _product(latent, weights, depth=rank, columns=VALUES, is_transposed=True)
    where = out_ref.at[token[:, None], place[None]]
    plt.store(where, total.astype(out_ref.dtype), mask=exists[:, None])


def _tokens(num_tokens: int) -> tuple[jax.Array, jax.Array]:
    token = jnp.arange(MOST_TOKENS, dtype=jnp.int32)
    return token, token < num_tokens


def _product(
    left: Any, right: Any, *, depth: int, columns: int, is_transposed: bool = False
) -> jax.Array:
    """Return f32 left @ right; both load their columns and rows at given inputs. is_transposed:
    right has them as columns."""
    step = jnp.arange(DEEP, dtype=jnp.int32)

    def add(i: jax.Array, total: jax.Array) -> jax.Array:
        at = i * DEEP + step
        return total + plt.dot(left(at), right(at), trans_b=is_transposed)

    zeros = jnp.zeros((MOST_TOKENS, columns), jnp.float32)
    whole: jax.Array = lax.fori_loop(0, depth // DEEP, add, zeros)
    return whole


def _pair_of(half: int, *, is_interleaved: bool) -> tuple[jax.Array, jax.Array]:
    """Return the columns that RoPE pairs: (0 2 4, 1 3 5) if interleaved, else (0 1 2, 3 4 5)."""
    index = jnp.arange(half, dtype=jnp.int32)
    return (2 * index, 2 * index + 1) if is_interleaved else (index, half + index)


def _angles(
    cos_ref: Any, sin_ref: Any, token: jax.Array, exists: jax.Array
) -> tuple[jax.Array, jax.Array]:
    column = jnp.arange(cos_ref.shape[1], dtype=jnp.int32)[None]
    cos, sin = (
        plt.load(ref.at[token[:, None], column], mask=exists[:, None], other=0.0)
        for ref in (cos_ref, sin_ref)
    )
    return cos, sin


def _store_halves(
    ref: Any,
    token: jax.Array,
    exists: jax.Array,
    start: Any,
    halves: tuple[jax.Array, jax.Array],
    dtype: Any,
) -> None:
    half = halves[0].shape[1]
    for i, part in enumerate(halves):
        column = start + i * half + jnp.arange(half, dtype=jnp.int32)
        plt.store(ref.at[token[:, None], column[None]], part.astype(dtype), mask=exists[:, None])
