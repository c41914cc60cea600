"""Block sizes of packed prefill and their defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jax.typing import DTypeLike

from jspec.pallas_kernels.attention.gpu_plan import NUM_SMS
from jspec.spec.cache_entry import FP8

LANES = 128  # of a TPU's vector
STEP_BYTES = 2 * 1024 * 1024  # K and V that a TPU's block of queries reads at once


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Parameters of the Hopper kernel that affect speed only."""

    block_tokens: int = 128  # keys of one iteration: 64 or 128
    stages: int = 3  # blocks in the ring
    consumers: int = 2  # warp groups that compute 64 rows each
    takes_turns: bool = True  # two consumers alternate between products and softmax
    programs: int = NUM_SMS  # persistent programs

    def __post_init__(self) -> None:
        if self.block_tokens not in (64, 128):
            raise ValueError(f"block_tokens is {self.block_tokens}; expected 64 or 128")
        if self.stages < 1 or self.consumers not in (1, 2, 3):
            raise ValueError(
                f"stages {self.stages}, consumers {self.consumers}; expected >= 1 and 1 to 3"
            )
        if self.programs < 1:
            raise ValueError(f"programs is {self.programs}; expected at least 1")


def choose_tuning(pool_dtype: DTypeLike) -> Tuning:
    """Return the Hopper kernel's tuning. FP8: fewer stages, for the buffers of converted blocks."""
    return Tuning(stages=2) if jnp.dtype(pool_dtype) == FP8 else Tuning()


@dataclass(frozen=True, kw_only=True)
class BlockSizes:
    """The size of a TPU kernel's block: M of a product (queries x group), and keys."""

    rows: int = 1024  # a multiple of 128
    keys: int = 512  # a multiple of 128
    tile: int = 512  # rows that are masked or skipped together

    @classmethod
    def for_heads(cls, num_kv: int, head_bytes: int = 256) -> BlockSizes:
        """Return sizes for which all kv heads of a block fit VMEM at once. head_bytes: of a key of
        one head."""
        rows = min(max(4096 // num_kv // LANES, 1) * LANES, 1024)
        keys = STEP_BYTES // (2 * num_kv * head_bytes) // LANES * LANES
        keys = min(max(1 << keys.bit_length() - 1, LANES), 512)
        return cls(rows=rows, keys=keys, tile=1024 if num_kv == 1 else 512)

    def block_queries(self, num_queries: int, group: int) -> int:
        """Return queries per block: a multiple of 128 rows, at most `rows`, no more than needed.

        A tile's where only tiles divide the queries: on a v6e XLA takes 90 us to pad 1,920 queries
        and to cut the result, by its own figures, and the whole kernel 67.

        In:  1,024 rows, 512 queries, group 4    Out: 256; 16 queries: 32; 640 queries: 128
        """
        unit = LANES // math.gcd(LANES, group)
        most = max(self.rows // (unit * group), 1) * unit
        queries = min(most, -(-num_queries // unit) * unit)
        tile = self.tile_queries(queries, group)
        return tile if num_queries % queries and num_queries % tile == 0 else queries

    def tile_queries(self, queries: int, group: int) -> int:
        """Return the queries of a tile: a divisor of a block's `queries`, in whole lanes of rows.

        In:  256 queries, group 4    Out: 128 (512 rows); group 7, 128 queries: 128 (896 rows)
        """
        unit = LANES // math.gcd(LANES, group)
        most = max(self.tile // (unit * group), 1)
        return unit * max(n for n in range(1, most + 1) if queries // unit % n == 0)

    def block_keys(self, page_size: int) -> int:
        """Return keys per block: whole pages, at most `keys` but at least one page."""
        return max(self.keys // page_size, 1) * page_size
