"""Which program computes a matrix product, with which tiles, and which block does which share.

Pure data and integer arithmetic: it knows no jax and no device. What was measured on a chip stands
in MEASURED, as data; a shape that nobody has measured stays with XLA.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

# Shared memory that one block may ask for on compute capability 9.0, less what the compiler keeps
# for itself: barriers, alignment, scratch of reductions.
SHARED_BYTES = 232_448 - 1_024
LANES = 64  # rows of a warpgroup's matrix instruction, and columns of a 128-byte swizzled tile
ACCUMULATED = 64 * 256  # float32 sums that one warpgroup holds in half of its registers
STAGED_TOKENS = 16  # tokens that an epilogue of Rows.WEIGHTS stages at a time
NUM_BLOCKS = 132  # multiprocessors of an H100 or H200


class Rows(Enum):
    """What fills the 64 rows of the matrix instruction.

    WEIGHTS: 64 weight columns are its rows and the tokens its columns, 8 to 256 of them: nothing
    is padded to 64 when there are few tokens. TOKENS: the usual way round.
    """

    WEIGHTS = "weights"
    TOKENS = "tokens"


class Layout(Enum):
    """How the weights of a product K -> N are stored.

    IN_OUT: [K, N], as layers/linear.py has them. OUT_IN: [N, K]. TILED: [N/tile_n, K/tile_k,
    tile_k, tile_n], each tile contiguous, so that one copy reads one run of memory.
    """

    IN_OUT = "in_out"
    OUT_IN = "out_in"
    TILED = "tiled"


@dataclass(frozen=True, slots=True)
class MatmulTuning:
    """The static shape of one product's program. Sizes are elements.

    tile_m: tokens of a tile; Rows.WEIGHTS takes all tokens in one tile (M rounded up to 8).
    num_splits: how many blocks share a tile's K; 0 deals the units of all tiles evenly over the
    blocks instead, wherever that cuts a tile. cluster: blocks that go together down M and share
    every weight tile by multicast, each with its own tokens; Rows.TOKENS only.
    """

    rows: Rows
    tile_m: int
    tile_n: int
    tile_k: int = 64
    num_stages: int = 4
    num_splits: int = 1
    num_consumers: int = 1
    num_blocks: int = NUM_BLOCKS
    cluster: int = 1
    layout: Layout = Layout.IN_OUT
    early_start: bool = False  # read weights before the programs ahead in the stream have ended

    @property
    def rows_per_consumer(self) -> int:
        """Instruction rows that one consumer warpgroup accumulates."""
        whole = self.tile_n if self.rows is Rows.WEIGHTS else self.tile_m
        return whole // self.num_consumers

    @property
    def num_buffers(self) -> int:
        """Staging buffers of an epilogue, alternated where it takes more than one step."""
        return 1 if self.rows is Rows.WEIGHTS and self.tile_m <= STAGED_TOKENS else 2

    @property
    def shared_bytes(self) -> int:
        """Shared memory of one block: the ring, and what an epilogue stages (float32 at most)."""
        ring = self.num_stages * self.tile_k * (self.tile_m + self.tile_n) * 2
        if self.rows is Rows.TOKENS:
            return ring + 2 * LANES * self.tile_m
        return ring + self.num_buffers * min(self.tile_m, STAGED_TOKENS) * self.tile_n * 4

    def problem(self, m: int, k: int, n: int) -> str | None:
        """Why this program cannot compute [m, k] @ [k, n], or None."""
        weights_first = self.rows is Rows.WEIGHTS
        whole = self.tile_n if weights_first else self.tile_m
        columns = self.tile_m if weights_first else self.tile_n
        checks = {
            f"tile_n {self.tile_n} does not divide N {n}": n % self.tile_n,
            f"tile_k {self.tile_k} does not divide K {k}": k % self.tile_k,
            f"tile_k {self.tile_k} is no multiple of {LANES}": self.tile_k % LANES,
            f"tile_n {self.tile_n} is no multiple of {LANES}": self.tile_n % LANES,
            f"{whole} rows do not part into {self.num_consumers} x {LANES}": whole
            % (self.num_consumers * LANES),
            f"{columns} columns are more than 256 or no multiple of 8": columns > 256
            or columns % 8,
            f"{self.rows_per_consumer} x {columns} sums are more than {ACCUMULATED}": (
                self.rows_per_consumer * columns > ACCUMULATED
            ),
            f"K / tile_k {k // self.tile_k} does not part into {self.num_splits} splits": (
                self.num_splits and (k // self.tile_k) % self.num_splits
            ),
            f"tile_m {self.tile_m} x cluster {self.cluster} does not take M {m}": (
                m > self.tile_m or self.cluster > 1
                if weights_first
                else m % (self.tile_m * self.cluster)
            ),
            f"{self.shared_bytes} bytes of shared memory, at most {SHARED_BYTES}": (
                self.shared_bytes > SHARED_BYTES
            ),
        }
        return next((reason for reason, wrong in checks.items() if wrong), None)


class Shared(Enum):
    """What the blocks of a cluster have in common, and read once for all of them."""

    WEIGHTS = "weights"  # they lie below one another, each with its own tokens
    TOKENS = "tokens"  # they lie side by side, each with its own weights


@dataclass(frozen=True, slots=True)
class GatedTuning:
    """The static shape of a gated product's program. Sizes are elements.

    tile_n: columns of the result; a tile has as many gate columns and as many up columns.
    group: row tiles that are swept together. piece: columns that an epilogue makes at a time.
    overlaps: results are made while the next tile is multiplied, and not before. layout: of the
    weights; OUT_IN takes tiles of any multiple of 8 columns, IN_OUT of 64.
    """

    tile_m: int = 128
    tile_n: int = 128
    tile_k: int = LANES
    num_stages: int = 4
    num_consumers: int = 2
    cluster: int = 2
    shared: Shared = Shared.WEIGHTS
    group: int = 16
    piece: int = 32
    overlaps: bool = True
    early_start: bool = True  # read weights before the programs ahead in the stream have ended
    early_release: bool = True  # let the next program start when the last tiles have begun
    num_blocks: int = NUM_BLOCKS
    layout: Layout = Layout.IN_OUT

    @property
    def rows_per_consumer(self) -> int:
        """Instruction rows that one consumer warpgroup accumulates."""
        return self.tile_m // self.num_consumers

    @property
    def cluster_tiles(self) -> tuple[int, int]:
        """Tiles of a cluster, down M and across the result."""
        return (self.cluster, 1) if self.shared is Shared.WEIGHTS else (1, self.cluster)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of one block: the ring, and two pieces of every row."""
        ring = self.num_stages * self.tile_k * (self.tile_m + 2 * self.tile_n) * 2
        return ring + 2 * self.tile_m * self.piece * 2

    def problem(self, m: int, k: int, columns: int) -> str | None:
        """Why this program cannot compute [m, k] @ [k, columns], or None."""
        across = 2 * self.tile_n * self.cluster_tiles[1]
        unit = LANES if self.layout is Layout.IN_OUT else 8
        checks = {
            f"M {m} is less than 1": m < 1,
            f"{across} columns do not divide {columns}": columns % across,
            f"tile_k {self.tile_k} does not divide K {k}": k % self.tile_k,
            f"tile_k {self.tile_k} is no multiple of {LANES}": self.tile_k % LANES,
            f"tile_n {self.tile_n} is no multiple of {unit}": self.tile_n % unit,
            f"weights are {self.layout.value}, not in_out or out_in": self.layout is Layout.TILED,
            f"{self.tile_m} rows do not part into {self.num_consumers} x {LANES}": self.tile_m
            % (self.num_consumers * LANES),
            f"a piece is {self.piece} columns, not 16, 32 or 64": self.piece not in (16, 32, 64),
            f"{self.tile_n} columns do not part into pieces of {self.piece}": self.tile_n
            % self.piece,
            f"{self.rows_per_consumer} x {2 * self.tile_n} sums are more than {ACCUMULATED}": (
                self.rows_per_consumer * 2 * self.tile_n > ACCUMULATED
            ),
            f"{self.shared_bytes} bytes of shared memory, at most {SHARED_BYTES}": (
                self.shared_bytes > SHARED_BYTES
            ),
        }
        return next((reason for reason, wrong in checks.items() if wrong), None)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Deals the units of a product to blocks. A unit is one tile's share of tile_k rows of K:
    unit = tile * k_tiles + k. Arguments may be ints or traced scalars, all non-negative.

    Even shares (num_splits 0), 3 tiles of 4 units over 5 blocks: block b computes units
    [b * 12 // 5, (b + 1) * 12 // 5), that is 0-1 | 2-3 | 4-6 | 7-8 | 9-11, and a tile's partial
    sums come from: tile 0 blocks 0, 1; tile 1 blocks 2, 3; tile 2 blocks 3, 4. Partial sums have
    slots, numbered from the tile's first block on, so two slots serve here.
    Splits (num_splits 2): runs of 2 units, run r by block r mod 5: 0-1, 10-11 | 2-3 | 4-5 | ...;
    run r is slot r mod 2 of tile r // 2.
    """

    num_tiles: int
    k_tiles: int
    num_blocks: int
    num_splits: int
    minimum: Callable[[Any, Any], Any] = field(default=min, compare=False)

    @property
    def _units(self) -> int:
        return self.num_tiles * self.k_tiles

    @property
    def _run(self) -> int:
        return self.k_tiles // self.num_splits

    def num_units(self, block: Any) -> Any:
        """How many units `block` computes."""
        if self.num_splits == 0:
            return self._start(block + 1) - self._start(block)
        runs = self.num_tiles * self.num_splits
        return self._run * ((runs - block + self.num_blocks - 1) // self.num_blocks)

    def unit(self, block: Any, step: Any) -> Any:
        """The unit that `block` computes at `step` of its num_units."""
        if self.num_splits == 0:
            return self._start(block) + step
        return (block + step // self._run * self.num_blocks) * self._run + step % self._run

    def run_length(self, block: Any, step: Any) -> Any:
        """How many units from `step` on belong to one tile and one slot, if a run starts there."""
        if self.num_splits > 0:
            return self._run
        left_of_tile = self.k_tiles - self.unit(block, step) % self.k_tiles
        return self.minimum(left_of_tile, self.num_units(block) - step)

    def slot(self, block: Any, unit: Any) -> Any:
        """Which of its tile's partial sums a run adds to."""
        if self.num_splits > 0:
            return unit % self.k_tiles // self._run
        return block - self._owner(unit // self.k_tiles * self.k_tiles)

    def slots_of_tiles(self) -> list[int]:
        """How many partial sums each tile has."""
        if self.num_splits > 0:
            return [self.num_splits] * self.num_tiles
        firsts = range(0, self._units, self.k_tiles)
        return [self._owner(u + self.k_tiles - 1) - self._owner(u) + 1 for u in firsts]

    def _start(self, block: Any) -> Any:
        return block * self._units // self.num_blocks

    def _owner(self, unit: Any) -> Any:
        """The last block that starts at or before `unit`."""
        return ((unit + 1) * self.num_blocks - 1) // self._units


def schedule_of(tuning: MatmulTuning, m: int, k: int, n: int) -> Schedule:
    """The schedule of [m, k] @ [k, n]; no more blocks than there are units. With clusters, its
    blocks are clusters and its tiles what a cluster computes."""
    num_tiles = (-(-m // (tuning.tile_m * tuning.cluster))) * (n // tuning.tile_n)
    k_tiles = k // tuning.tile_k
    work = num_tiles * (tuning.num_splits or k_tiles)
    num_blocks = min(tuning.num_blocks // tuning.cluster, work)
    return Schedule(num_tiles, k_tiles, num_blocks, tuning.num_splits)


# (M bucket, K, N) -> the fastest program seen on a chip, where one beat XLA's. Nothing has been
# measured yet. Fill it from benchmarks/matmul_gpu.py; the key's M is the largest M it serves.
MEASURED: Mapping[tuple[int, int, int], MatmulTuning] = {}

M_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def measured(
    m: int, k: int, n: int, table: Mapping[tuple[int, int, int], MatmulTuning] = MEASURED
) -> MatmulTuning | None:
    """The measured program of the smallest bucket that holds `m`, if it takes this shape."""
    bucket = next((size for size in M_BUCKETS if m <= size), None)
    if bucket is None:
        return None
    tuning = table.get((bucket, k, n))
    return None if tuning is None or tuning.problem(m, k, n) else tuning


def stream_candidates(m: int, k: int, n: int) -> tuple[MatmulTuning, ...]:
    """Programs worth timing for M <= 16, the likeliest first. Each reads every weight once."""
    tile_m = -(-m // 8) * 8
    shapes = (  # tile_n, tile_k, stages, splits, consumers, blocks
        (128, 128, 6, 0, 1, NUM_BLOCKS),
        (64, 128, 10, 0, 1, NUM_BLOCKS),
        (128, 64, 10, 0, 1, NUM_BLOCKS),
        (64, 64, 16, 0, 1, NUM_BLOCKS),
        (128, 128, 6, 0, 2, NUM_BLOCKS),
        (64, 256, 6, 0, 1, NUM_BLOCKS),
        (256, 64, 6, 0, 2, NUM_BLOCKS),
        (64, 128, 5, 0, 1, 2 * NUM_BLOCKS),
        (64, 128, 10, 2, 1, NUM_BLOCKS),
        (128, 128, 6, 4, 1, NUM_BLOCKS),
        (64, 128, 10, 1, 1, NUM_BLOCKS),
    )
    tunings = (
        MatmulTuning(Rows.WEIGHTS, tile_m, tn, tk, stages, splits, consumers, blocks)
        for tn, tk, stages, splits, consumers, blocks in shapes
    )
    return tuple(tuning for tuning in tunings if tuning.problem(m, k, n) is None)


def tile_candidates(m: int, k: int, n: int) -> tuple[MatmulTuning, ...]:
    """Programs worth timing for M = 64 to 1,024, the likeliest first."""
    found = []
    if m <= 256:
        tile_m = -(-m // 8) * 8
        for tn, stages, splits, consumers in (
            (128, 6, 0, 2),
            (128, 8, 0, 2),
            (128, 4, 0, 2),
            (256, 4, 0, 2),
            (256, 5, 0, 2),
            (64, 6, 0, 1),
            (128, 4, 2, 2),
            (128, 6, 1, 2),
        ):
            found.append(MatmulTuning(Rows.WEIGHTS, tile_m, tn, 64, stages, splits, consumers))
    for tm, tn, stages, splits, consumers, cluster in (
        (128, 256, 4, 1, 2, 1),
        (128, 256, 4, 1, 2, 2),
        (128, 128, 6, 1, 2, 1),
        (256, 128, 4, 1, 2, 1),
        (128, 192, 4, 1, 2, 1),
        (256, 128, 4, 1, 2, 2),
        (128, 128, 6, 1, 2, 2),
        (128, 128, 6, 2, 2, 1),
        (128, 256, 4, 2, 2, 1),
        (64, 256, 4, 1, 1, 1),
        (64, 256, 4, 4, 1, 1),
        (64, 128, 8, 2, 1, 1),
    ):
        found.append(
            MatmulTuning(
                Rows.TOKENS, tm, tn, 64, stages, splits, consumers, NUM_BLOCKS, cluster=cluster
            )
        )
    return tuple(tuning for tuning in found if tuning.problem(m, k, n) is None)
