"""Tile sizes of the fp8 product kernels, and checks that they fit a problem. No jax, no device."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jspec.pallas_kernels.gated_mlp.tuning import (
    ACCUMULATED,
    LANES,
    NUM_BLOCKS,
    SHARED_BYTES,
    Shared,
    fullest,
)

DEPTH = 128  # inputs of a row of a swizzled tile, and of a block of scales


@dataclass(frozen=True, slots=True)
class ProductTuning:
    """The static shape of gpu.py's kernel. Sizes are elements."""

    tile_m: int = LANES  # tokens, 64 per consumer
    tile_n: int = 32  # columns of the result
    tile_k: int = DEPTH
    num_stages: int = 4
    num_consumers: int = 1
    cluster: int = 1
    shared: Shared = Shared.TOKENS
    group: int = 16  # row tiles that are swept together
    num_blocks: int = NUM_BLOCKS

    @property
    def cluster_tiles(self) -> tuple[int, int]:
        return (self.cluster, 1) if self.shared is Shared.WEIGHTS else (1, self.cluster)

    def rows_loaded(self, m: int) -> int:
        """Return the tokens of a stage; a product's other rows are read from past the stage."""
        unit = 8 * (self.cluster if self.shared is Shared.TOKENS else 1)
        return min(self.tile_m, -(-m // unit) * unit)

    def ring_rows(self, m: int) -> int:
        loaded = self.rows_loaded(m)
        return self.num_stages * loaded + self.tile_m - loaded

    def shared_bytes(self, m: int, halves: int) -> int:
        ring = self.tile_k * (self.ring_rows(m) + self.num_stages * halves * self.tile_n)
        return ring + self.tile_m * self.tile_n * 2

    def problem(self, m: int, k: int, columns: int, *, halves: int, by_blocks: bool) -> str | None:
        """Return why this kernel cannot compute [m, k] @ [k, columns], or None. halves: 2 for a
        gated product. by_blocks: the weights have a scale per 128 x 128."""
        across = halves * self.tile_n * self.cluster_tiles[1]
        wide = halves * self.tile_n
        unit = 8 * (self.cluster if self.shared is Shared.WEIGHTS else 1)  # whole swizzled rows
        # With scales per block, a product's own sums and the running sums are both in registers.
        sums = LANES * wide * (2 if by_blocks else 1)
        size = self.shared_bytes(m, halves)
        checks = {
            f"M {m} is less than 1": m < 1,
            f"{across} columns do not divide {columns}": columns % across,
            f"tile_k {self.tile_k} does not divide K {k}": k % self.tile_k,
            f"tile_k {self.tile_k} is no multiple of {DEPTH}": self.tile_k % DEPTH,
            f"tile_n {self.tile_n} is no multiple of {unit}": self.tile_n % unit,
            f"tile_n {self.tile_n} is more than {DEPTH} in two blocks": (
                by_blocks and self.tile_n > DEPTH
            ),
            f"{wide} columns of a product are more than 256": wide > 256,
            f"{self.tile_m} rows are not {self.num_consumers} x {LANES}": (
                self.tile_m != self.num_consumers * LANES
            ),
            f"{sums} sums are more than {ACCUMULATED}": sums > ACCUMULATED,
            f"{size} bytes of shared memory, at most {SHARED_BYTES}": size > SHARED_BYTES,
        }
        return next((reason for reason, wrong in checks.items() if wrong), None)


MOST_FEW = 64  # most tokens with one strip of columns per multiprocessor
MOST_TOKENS = 512  # with a scale per channel; above, XLA's product (cublasLt) is as fast
MOST_STAGES = 24
LEAST_STAGES = {512: 6, 256: 4}  # of a tile_k, so that enough bytes are in flight


def choose(m: int, k: int, columns: int, *, halves: int, by_blocks: bool) -> ProductTuning | None:
    """Return the tuning for [m, k] @ [k, columns] column-major, None for XLA; see `problem`."""
    if m > MOST_TOKENS and not by_blocks:
        return None
    tuning = tiles_for(m, k, columns, halves=halves, by_blocks=by_blocks)
    problem = tuning.problem(m, k, columns, halves=halves, by_blocks=by_blocks)
    return tuning if problem is None else None


def tiles_for(m: int, k: int, columns: int, *, halves: int, by_blocks: bool) -> ProductTuning:
    """Return the tiles whose waves are fullest, with as many stages as fit."""
    few = m <= MOST_FEW
    tile_m = LANES if few else 2 * LANES
    is_small = by_blocks or (halves > 1 and m <= MOST_FEW)
    most = (DEPTH if is_small else 2 * DEPTH) // halves
    base = ProductTuning(
        tile_m=tile_m,
        num_consumers=tile_m // LANES,
        tile_n=fullest(
            -(-m // tile_m), columns // halves, widths=range(8, most + 1, 8), otherwise=8
        ),
    )
    if by_blocks and (MOST_FEW // 2 < m <= MOST_FEW or m > tile_m):
        paired = replace(base, cluster=2, shared=Shared.TOKENS if few else Shared.WEIGHTS)
        paired = deepest(replace(paired, tile_k=(2 if few else 1) * DEPTH), m, halves=halves)
        if paired.problem(m, k, columns, halves=halves, by_blocks=by_blocks) is None:
            return paired
    for tile_k in (4 * DEPTH, 2 * DEPTH) if few else ():
        deep = deepest(replace(base, tile_k=tile_k), m, halves=halves)
        if k % tile_k == 0 and deep.num_stages >= LEAST_STAGES[tile_k]:
            return deep
    return deepest(base, m, halves=halves)


def deepest(tuning: ProductTuning, m: int, *, halves: int) -> ProductTuning:
    fitting = (
        replace(tuning, num_stages=stages)
        for stages in range(MOST_STAGES, 1, -1)
        if replace(tuning, num_stages=stages).shared_bytes(m, halves) <= SHARED_BYTES
    )
    return next(fitting, replace(tuning, num_stages=2))
