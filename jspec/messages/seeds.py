"""64-bit seeds, and the 53-bit seeds derived from them."""

from __future__ import annotations

MAX_SEED = 2**64 - 1
# Drawn seeds are part of responses; JavaScript reads JSON integers exactly up to 53 bits.
DRAWN_BITS = 53


def choice_seed(seed: int, choice: int) -> int:
    """Return the seed of choice i: `seed` itself for 0, else DRAWN_BITS bits of hash(seed, i)."""
    return split_mix(seed, choice) >> 64 - DRAWN_BITS if choice else seed


def split_mix(seed: int, index: int) -> int:
    """Return the 64-bit output `index` of SplitMix64 from `seed` (Steele, Lea and Flood, 2014)."""
    x = (seed + index * 0x9E3779B97F4A7C15) & MAX_SEED
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MAX_SEED
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MAX_SEED
    return x ^ (x >> 31)
