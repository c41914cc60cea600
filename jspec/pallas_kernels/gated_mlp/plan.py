"""The static shape of a gated product's program: its tiles, and whether they fit a problem.

Pure data and integer arithmetic: it knows no jax and no device.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

# Shared memory that one block may ask for on compute capability 9.0, less what the compiler keeps
# for itself: barriers, alignment, scratch of reductions.
SHARED_BYTES = 232_448 - 1_024
LANES = 64  # rows of a warpgroup's matrix instruction, and columns of a 128-byte swizzled tile
ACCUMULATED = 64 * 256  # float32 sums that one warpgroup holds in half of its registers
NUM_BLOCKS = 132  # multiprocessors of an H100 or H200
FEWEST_LANES = 16  # columns of the least product of Triton's on the tensor cores
LEAST_BUSY = 0.95  # of them, so that few tokens are worth a program of our own
LEAST_FILLED = 0.7  # of the turns that tiles of a few tokens' program take: 0.73 pays, 0.69 not


class Layout(Enum):
    """How the weights of a product K -> N are stored.

    IN_OUT: [K, N], as layers/linear.py has them. OUT_IN: [N, K].
    """

    IN_OUT = "in_out"
    OUT_IN = "out_in"


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

    def fills_one_turn(self, columns: int) -> bool:
        """Whether one row of tiles gives nearly every multiprocessor one tile, and none two."""
        return LEAST_BUSY * self.num_blocks <= columns // (2 * self.tile_n) <= self.num_blocks

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
class FewTuning:
    """The static shape of few_gpu's program for a few tokens. Sizes are elements, powers of two.

    tile_n: columns of the result that one program makes, from as many gate and up columns; tile_k:
    inputs of one round. num_stages: rounds on their way, where the tensor cores multiply, for at
    most num_lanes tokens; by_lanes: they do not, for one token.
    """

    tile_n: int
    tile_k: int
    num_warps: int
    num_stages: int = 1
    by_lanes: bool = False
    num_lanes: int = FEWEST_LANES

    @property
    def most_tokens(self) -> int:
        return 1 if self.by_lanes else self.num_lanes

    def fills_turns(self, columns: int) -> bool:
        """Whether most multiprocessors, one program each at a time, are busy to the end."""
        tiles = columns // (2 * self.tile_n)
        turns = -(-tiles // NUM_BLOCKS)
        return tiles >= LEAST_FILLED * turns * NUM_BLOCKS

    def problem(self, m: int, k: int, columns: int) -> str | None:
        """Why this program cannot compute [m, k] @ [k, columns], or None."""
        checks = {
            f"M {m} is not 1 to {self.most_tokens}": not 1 <= m <= self.most_tokens,
            f"{2 * self.tile_n} columns do not divide {columns}": columns % (2 * self.tile_n),
            f"tile_k {self.tile_k} does not divide K {k}": k % self.tile_k,
        }
        return next((reason for reason, wrong in checks.items() if wrong), None)
