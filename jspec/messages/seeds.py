"""64-bit seeds, and the 53-bit seeds derived from them."""

from __future__ import annotations

MAX_SEED = 2**64 - 1
# Drawn seeds are part of responses; JavaScript reads JSON integers exactly up to 53 bits.
TOLD_BITS = 53


def choice_seed(seed: int, choice: int) -> int:
    """Return hash(seed, i) with TOLD_BITS bits, the seed of choice i; choice 0 keeps `seed`.

    The high bits of SplitMix64's finaliser (Steele, Lea and Flood, 2014) over seed + i * its
    increment.
    """
    if choice == 0:
        return seed
    mask = MAX_SEED
    x = (seed + choice * 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return (x ^ (x >> 31)) >> 64 - TOLD_BITS
