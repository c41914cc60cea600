"""Tile sizes of the gated MLP kernels, and checks that they fit a problem. No jax, no device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

# Shared memory of a block on compute capability 9.0, minus the compiler's need for barriers,
# alignment and reductions.
SHARED_BYTES = 232_448 - 1_024
LANES = 64  # M of a wgmma instruction, and columns of a 128-byte swizzled tile
ACCUMULATED = 64 * 256  # float32 sums of one warp group, in half of its registers
NUM_BLOCKS = 132  # multiprocessors of an H100 or H200
FEWEST_LANES = 16  # N of the smallest Triton product on the tensor cores
LEAST_BUSY = 0.95  # the fraction of multiprocessors that few tokens must occupy
LEAST_FILLED = 0.7  # occupancy of the waves from which FewTuning is faster
TILE_COST = 32  # in columns: copying a tile's tokens and writing its results


def fullest(rows: int, width: int, *, widths: Iterable[int], otherwise: int) -> int:
    """Return which of `widths` gives tiles that leave a multiprocessor the fewest columns.

    rows: tiles down. width: of the result. otherwise: if none of `widths` divides it
    """

    def busy(n: int) -> int:
        return -(-rows * width // (n * NUM_BLOCKS)) * (n + TILE_COST)

    return min((n for n in widths if width % n == 0), key=busy, default=otherwise)


class Layout(Enum):
    """The memory order of the weights of a product K -> N: [K, N] (IN_OUT) or [N, K] (OUT_IN)."""

    IN_OUT = "in_out"
    OUT_IN = "out_in"


class Shared(Enum):
    """The operand that the blocks of a cluster share, read once by multicast."""

    WEIGHTS = "weights"  # blocks with different tokens
    TOKENS = "tokens"  # blocks with different weights


@dataclass(frozen=True, slots=True)
class GatedTuning:
    """The static shape of a gated product's kernel. Sizes are elements."""

    tile_m: int = 128
    tile_n: int = 128  # columns of the result, from as many gate and as many up columns
    tile_k: int = LANES
    num_stages: int = 4
    num_consumers: int = 2
    cluster: int = 2
    shared: Shared = Shared.WEIGHTS
    group: int = 16  # row tiles that are swept together
    piece: int = 32  # columns per step of the epilogue
    overlaps: bool = True  # the epilogue runs during the next tile's product, not before it
    early_start: bool = True  # load weights before the preceding kernel has ended
    early_release: bool = True  # let the next kernel start when the last tiles have started
    num_blocks: int = NUM_BLOCKS
    layout: Layout = Layout.IN_OUT  # OUT_IN allows tiles of 8 n columns, IN_OUT of 64 n

    @property
    def rows_per_consumer(self) -> int:
        return self.tile_m // self.num_consumers

    @property
    def cluster_tiles(self) -> tuple[int, int]:
        return (self.cluster, 1) if self.shared is Shared.WEIGHTS else (1, self.cluster)

    @property
    def shared_bytes(self) -> int:
        ring = self.num_stages * self.tile_k * (self.tile_m + 2 * self.tile_n) * 2
        return ring + 2 * self.tile_m * self.piece * 2

    def num_tiles(self, m: int, columns: int) -> int:
        return -(-m // self.tile_m) * (columns // (2 * self.tile_n))

    def fills_one_turn(self, columns: int) -> bool:
        """Return whether a row of tiles is one wave that fills nearly every multiprocessor."""
        return LEAST_BUSY * self.num_blocks <= columns // (2 * self.tile_n) <= self.num_blocks

    def problem(self, m: int, k: int, columns: int) -> str | None:
        """Return why this kernel cannot compute [m, k] @ [k, columns], or None."""
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
    """The static shape of gpu_few's kernel. Sizes are elements, powers of two."""

    tile_n: int  # columns of the result per program, from as many gate and up columns
    tile_k: int  # inputs of one iteration
    num_warps: int
    num_stages: int = 1  # iterations in flight, with tensor cores
    by_lanes: bool = False  # one token, without tensor cores
    num_lanes: int = FEWEST_LANES  # most tokens, with tensor cores

    @property
    def most_tokens(self) -> int:
        return 1 if self.by_lanes else self.num_lanes

    def fills_turns(self, columns: int) -> bool:
        """Return whether most multiprocessors, with one program each, are busy to the last wave."""
        tiles = columns // (2 * self.tile_n)
        turns = -(-tiles // NUM_BLOCKS)
        return tiles >= LEAST_FILLED * turns * NUM_BLOCKS

    def problem(self, m: int, k: int, columns: int) -> str | None:
        checks = {
            f"M {m} is not 1 to {self.most_tokens}": not 1 <= m <= self.most_tokens,
            f"{2 * self.tile_n} columns do not divide {columns}": columns % (2 * self.tile_n),
            f"tile_k {self.tile_k} does not divide K {k}": k % self.tile_k,
        }
        return next((reason for reason, wrong in checks.items() if wrong), None)
