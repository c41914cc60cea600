"""Seeds of 64 bits, and those of 53 that follow from one."""

from __future__ import annotations

MAX_SEED = 2**64 - 1
# Seeds that nobody gave are told in answers, and JSON's readers in JavaScript are exact so far.
TOLD_BITS = 53


def choice_seed(seed: int, choice: int) -> int:
    """hash(seed, i), of TOLD_BITS: the seed of choice i; choice 0 keeps the request's own seed.

    SplitMix64's finaliser (Steele, Lea and Flood, 2014) over seed + i * its increment; its high
    bits.
    """
    if choice == 0:
        return seed
    mask = MAX_SEED
    x = (seed + choice * 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return (x ^ (x >> 31)) >> 64 - TOLD_BITS
