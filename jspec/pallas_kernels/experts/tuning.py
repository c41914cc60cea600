"""Tile sizes of the experts' GPU kernels, and the conditions for using them (decision 39). No
device is needed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jspec.device.mxfp4 import MXFP4Weight
from jspec.pallas_kernels.experts.api import num_blocks
from jspec.pallas_kernels.gated_mlp.tuning import NUM_BLOCKS, SHARED_BYTES
from jspec.pallas_kernels.shapes import GPT_OSS_20B, QWEN3_30B_A3B

LEAST = 16  # least side of a tile, set by the tensor cores
PROGRAMS = 2 * NUM_BLOCKS  # programs that keep memory busy
MOST_ELEMENTS = 2**31 - 1  # per array of weights: the kernels use 32-bit indices
MOST_TOKENS = LEAST  # of gpu_few: an expert's tokens fit one tile's rows
RANKED_IN_PLACE = 256  # most experts that every program of a product ranks itself
RANKED_BY_PAIRS = 128  # most of these that it compares pair by pair
MOST_RANKED = 256  # most experts whose ranks are found by counting


@dataclass(frozen=True, slots=True)
class ExpertsTuning:
    """Tile sizes of the two products, in elements."""

    tile_m: int = LEAST  # pairs of a block
    gate_up_n: int = 64  # columns of the result, from as many gate and as many up columns
    gate_up_k: int = 64  # inputs per iteration
    down_n: int = 64
    down_k: int = 64
    num_warps: int = 4
    num_stages: int = 4
    down_stages: int = 0  # iterations in flight in gpu_few's `down`; 0: num_stages

    @property
    def shared_bytes(self) -> int:
        gate_up = self.gate_up_k * (self.tile_m + 2 * self.gate_up_n) * self.num_stages
        down = self.down_k * (self.tile_m + self.down_n) * (self.down_stages or self.num_stages)
        return 2 * max(gate_up, down)

    def problem(self, size: int, inner: int) -> str | None:
        """Return why experts of E = size and I = inner cannot use these tiles, or None."""
        tiles = {
            "gate_up_k": (self.gate_up_k, "E", size),
            "gate_up_n": (self.gate_up_n, "I", inner),
            "down_k": (self.down_k, "I", inner),
            "down_n": (self.down_n, "E", size),
        }
        for name, tile in (("tile_m", self.tile_m), *((n, t[0]) for n, t in tiles.items())):
            if tile < LEAST or tile & (tile - 1):
                return f"{name} is {tile}; expected a power of two from {LEAST}"
        for name, (tile, what, length) in tiles.items():
            if length % tile:
                return f"{name} {tile} does not divide {what} {length}"
        if self.shared_bytes > SHARED_BYTES:
            return f"{self.shared_bytes} bytes of shared memory are needed; {SHARED_BYTES} exist"
        return None


class Sizes(NamedTuple):
    num_experts: int
    size: int  # E
    inner: int  # I
    is_packed: bool = False  # mxfp4


def sizes_of(params: Mapping[str, Any]) -> Sizes:
    num_experts, inner, size = params["down"].shape
    return Sizes(num_experts, size, inner, isinstance(params["down"], MXFP4Weight))


def check_tiles(tuning: ExpertsTuning, params: Mapping[str, Any]) -> Sizes:
    """Return the experts' sizes. Raises ValueError if the tiles do not fit them."""
    _, size, inner, _ = sizes = sizes_of(params)
    if problem := tuning.problem(size, inner):
        raise ValueError(f"the experts' tiles do not serve E {size} and I {inner}: {problem}")
    return sizes


def choose_experts(
    num_pairs: int, *, num_experts: int, size: int, inner: int, is_packed: bool = False
) -> ExpertsTuning | None:
    """Return tiles for num_pairs (token, expert) pairs, E = size and I = inner; None: use XLA, for
    sizes that no tile divides, 0 pairs, and packed weights."""
    if not num_pairs or size % LEAST or inner % LEAST or is_packed:
        return None
    if num_experts * size * 2 * inner > MOST_ELEMENTS:
        return None
    rows = -(-num_pairs // num_experts)
    tile_m = min(max(1 << (rows + rows // 4 - 1).bit_length(), LEAST), 64 if rows <= 64 else 128)
    blocks = num_blocks(num_pairs, num_experts, tile_m)
    tuning = ExpertsTuning(
        tile_m=tile_m,
        gate_up_n=_columns(inner, blocks, most=64),
        gate_up_k=_largest(size, most=64),
        down_n=_columns(size, blocks, most=128),
        down_k=_largest(inner, most=64),
        num_warps=8 if tile_m == 128 else 4,
        num_stages=3 if tile_m >= 64 else 4,  # so more programs fit
    )
    return tuning if tuning.problem(size, inner) is None else None


def choose_packed(
    num_pairs: int, *, num_experts: int, size: int, inner: int, is_packed: bool
) -> int | None:
    """Return the rows of a block for num_pairs of mxfp4 experts, which few experts exceed. None:
    unpack them first, which is faster for many pairs, or needed for other sizes."""
    if not is_packed or not 0 < num_pairs <= MOST_PACKED * num_experts or size % 64 or inner % 32:
        return None
    rows = num_pairs / num_experts
    return min(-(-math.ceil(rows + 2 * rows**0.5) // 8) * 8, MOST_PACKED)


MOST_PACKED = 64  # pairs of a packed expert on average, and rows of a block


def for_fp8(tuning: ExpertsTuning, sizes: Sizes, *, is_one: bool = False) -> ExpertsTuning:
    """Return tiles of fp8 experts: as many bytes a load as of 16 bits, and inputs of one block.
    is_one: for one token, which more warps convert (38 us of Qwen3-30B-A3B's became 32)."""
    return replace(
        tuning,
        num_warps=8 if is_one else tuning.num_warps,
        gate_up_k=_largest(sizes.size, most=FP8_INPUTS),
        down_k=_largest(sizes.inner, most=FP8_INPUTS),
    )


FP8_INPUTS = 128  # inputs an iteration
# Above this many pairs per expert on average, fp8 experts are unpacked to memory first.
MOST_FP8 = 128


# Tiles of gpu_few by (E, I); other sizes use the widest tiles up to 64, whose rows are lines of the
# L2 cache (128 bytes). No tiles were more than 3% faster at 4 to 16 tokens on an H200
# (experts_few_tiles_h200.json).
FEW = {
    QWEN3_30B_A3B.widths: ExpertsTuning(),  # 96 programs of 64 KiB, then 256 of 32
    GPT_OSS_20B.widths: ExpertsTuning(),  # 180 and 180
}
# Tiles for one token, where deeper rings are faster (experts_few_tiles_h200.json).
FEW_ONE_TOKEN = {QWEN3_30B_A3B.widths: ExpertsTuning(num_stages=6, down_stages=8)}


def choose_few(
    num_tokens: int, *, num_experts: int, size: int, inner: int, is_packed: bool = False
) -> ExpertsTuning | None:
    """Return tiles of gpu_few for num_tokens, E = size and I = inner; None if not supported."""
    if not 1 <= num_tokens <= MOST_TOKENS or num_experts > MOST_RANKED or is_packed:
        return None
    if size % LEAST or inner % LEAST or num_experts * size * 2 * inner > MOST_ELEMENTS:
        return None
    wide, deep = _largest(size, most=64), _largest(inner, most=64)
    widest = ExpertsTuning(gate_up_n=deep, gate_up_k=wide, down_n=wide, down_k=deep)
    found = FEW.get((size, inner), widest)
    return FEW_ONE_TOKEN.get((size, inner), found) if num_tokens == 1 else found


def _largest(length: int, *, most: int) -> int:
    return min(length & -length, most)


def _columns(length: int, blocks: int, *, most: int) -> int:
    """Return the widest tile that keeps memory busy, but at least 32 columns if that divides."""
    tile = _largest(length, most=most)
    while tile > 2 * LEAST and blocks * (length // tile) < PROGRAMS:
        tile //= 2
    return tile
