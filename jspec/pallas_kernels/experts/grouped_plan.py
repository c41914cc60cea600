"""The static shape of the experts' Hopper kernel for many tokens, and where it is used.

Pure data and integer arithmetic: it knows no jax and no device.
"""

from __future__ import annotations

from dataclasses import dataclass

from jspec.pallas_kernels.gated_mlp.plan import LANES, NUM_BLOCKS, SHARED_BYTES

EIGHT = 8  # rows that a copy by TMA moves together
WIDEST = 256  # columns of the matrix instruction


@dataclass(frozen=True, slots=True)
class GroupedTuning:
    """Tiles of the two products. Sizes are elements.

    tile_m: rows of a block, 64 for each consumer warpgroup. gate_up_n: columns of the gated result
    (a tile has as many gate and as many up columns); down_n: of the second product's. most_stages:
    steps that a ring holds at most, each of tile_k inputs.
    """

    tile_m: int = LANES
    gate_up_n: int = 128
    down_n: int = 256
    tile_k: int = LANES
    most_stages: int = 8
    num_programs: int = NUM_BLOCKS

    @property
    def num_consumers(self) -> int:
        return self.tile_m // LANES

    def stages(self, columns: int, *, halves: int) -> int:
        """As many as shared memory holds beside two staged pieces of every row."""
        step = 2 * self.tile_k * (self.tile_m + halves * columns)
        staged = 2 * 2 * self.tile_m * min(columns & -columns, LANES)
        return min(self.most_stages, (SHARED_BYTES - staged) // step)

    def problem(self, size: int, inner: int) -> str | None:
        """Why these tiles cannot serve experts of E = size and I = inner, or None."""
        tiles = {
            "gate_up_n": (self.gate_up_n, 2, "I", inner),
            "down_n": (self.down_n, 1, "E", size),
        }
        if self.tile_m % LANES or self.tile_m < LANES:
            return f"tile_m is {self.tile_m}; expected a multiple of {LANES}"
        for what, length in (("E", size), ("I", inner)):
            if length % self.tile_k or self.tile_k % LANES:
                return f"tile_k {self.tile_k} does not divide {what} {length}"
        for name, (tile, halves, what, length) in tiles.items():
            if tile % 16 or not 16 <= halves * tile <= WIDEST:
                return f"{name} is {tile}; expected a multiple of 16 up to {WIDEST // halves}"
            if length % tile:
                return f"{name} {tile} does not divide {what} {length}"
            if self.stages(tile, halves=halves) < 2:
                return f"{name} {tile}: shared memory holds no ring of two steps"
        return None
