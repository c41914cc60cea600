"""The static shape of the experts' GPU kernels, and where they are used: integers, no device.

A decode or verification step is bound by reading the weights of the experts that it touches, which
wants at least two programs a multiprocessor, each with some 64 KiB on their way: reckoned, and then
timed on an H200 (decision 39; benchmarks/experts_gpu.py).

Seen in programs compiled for an H200 (jax 0.12): XLA makes of its grouped product a dense one, of
[R, X * E], a copy of x that is 0 but for each row's expert, and [X * E, N]. So one token reads the
weights of all experts, and 2,048 tokens of Qwen3-30B-A3B do 128 times the arithmetic, with 8.6 GB
beside the arguments. Hence the kernels serve prompts, too, in larger blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from jspec.pallas_kernels.experts.blocks import num_blocks
from jspec.pallas_kernels.experts.packed import GROUP
from jspec.pallas_kernels.gated_mlp.plan import NUM_BLOCKS, SHARED_BYTES

LEAST = 16  # of every side of a tile: the tensor cores' own
PROGRAMS = 2 * NUM_BLOCKS  # that keep the memory busy
MOST_ELEMENTS = 2**31 - 1  # of one array of weights: the kernels count in 32 bits
MOST_TOKENS = LEAST  # that few_gpu serves: an expert's tokens fit one tile's rows
RANKED_IN_PLACE = 128  # experts, up to which every program of a product may rank them itself
MOST_RANKED = 256  # experts whose ranks are found by counting


@dataclass(frozen=True, slots=True)
class ExpertsTuning:
    """Tiles of the two products. Sizes are elements.

    tile_m: pairs of a block. gate_up_n: columns of the gated result (a tile has as many gate and
    as many up columns); down_n: of the second product's. gate_up_k, down_k: inputs of one round.
    down_stages: rounds on their way in few_gpu's second product, 0: num_stages, as in the first.
    """

    tile_m: int = LEAST
    gate_up_n: int = 64
    gate_up_k: int = 64
    down_n: int = 64
    down_k: int = 64
    num_warps: int = 4
    num_stages: int = 4
    down_stages: int = 0

    @property
    def shared_bytes(self) -> int:
        """Shared memory that the larger of the two products may take, at 2 bytes an element."""
        gate_up = self.gate_up_k * (self.tile_m + 2 * self.gate_up_n) * self.num_stages
        down = self.down_k * (self.tile_m + self.down_n) * (self.down_stages or self.num_stages)
        return 2 * max(gate_up, down)

    def problem(self, size: int, inner: int, *, is_packed: bool = False) -> str | None:
        """Why these tiles cannot serve experts of E = size and I = inner, or None.

        is_packed: rounds are of whole groups (packed.py), and the last may be shorter.
        """
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
            if is_packed and name.endswith("_k"):
                if tile % GROUP:
                    return f"{name} is {tile}; expected whole groups of {GROUP}"
            elif length % tile:
                return f"{name} {tile} does not divide {what} {length}"
        if self.shared_bytes > SHARED_BYTES and not is_packed:
            return f"{self.shared_bytes} bytes of shared memory are needed; {SHARED_BYTES} exist"
        return None


def choose_experts(
    num_pairs: int, *, num_experts: int, size: int, inner: int, is_packed: bool = False
) -> ExpertsTuning | None:
    """Tiles for so many (token, expert) pairs, E = size and I = inner; None: XLA's products.

    None for sizes that no tile divides, without pairs, and for packed weights that meet so many
    tokens that they are better unpacked first. A block holds the rows of most experts, up to 64: a
    second one would take the same weights from the L2 cache, which costs more than idle rows. From
    65 rows on average it holds 128.
    """
    if not num_pairs or size % LEAST or inner % LEAST:
        return None
    if num_experts * size * 2 * inner > MOST_ELEMENTS:
        return None
    rows = -(-num_pairs // num_experts)
    if is_packed and rows > MOST_PACKED:
        return None
    longest = MOST_PACKED_BLOCK if is_packed else 64 if rows <= 64 else 128
    tile_m = min(max(1 << (rows + rows // 4 - 1).bit_length(), LEAST), longest)
    blocks = num_blocks(num_pairs, num_experts, tile_m)
    tuning = ExpertsTuning(
        tile_m=tile_m,
        gate_up_n=_columns(inner, blocks, most=64),
        gate_up_k=_largest(size, most=64),
        down_n=_columns(size, blocks, most=128),
        down_k=_largest(inner, most=64),
        num_warps=8 if tile_m == 128 else 4,
        num_stages=3 if tile_m >= 64 else 4,  # more programs fit: 424 us for 439 (gpt-oss, 256)
    )
    if is_packed:
        warps = 2 if tile_m == LEAST else 4
        tuning = replace(tuning, num_warps=warps, **PACKED)
    return tuning if tuning.problem(size, inner, is_packed=is_packed) is None else None


# Packed weights are multiplied as they are while an expert has no more pairs than this; for more
# they are unpacked to memory first, which costs a prompt's step less. The tiles for a few tokens
# are the best of those timed on an H200 at gpt-oss-20b's widths (packed_experts_gpu.json). At more
# tokens blocks of 32 are the longest whose sums stay in registers: at 256 they take 547 us there,
# blocks of 64 1,490 and unpacking first 1,531; at 512 they take 952, with eight warps, and 1,577.
MOST_PACKED, MOST_PACKED_BLOCK = 64, 32
FEW_PACKED = {"gate_up_k": 256, "down_k": 256, "num_stages": 2, "down_stages": 0}
FEW_PACKED_COLUMNS = 32
PACKED = {"gate_up_k": 128, "down_k": 128, "num_stages": 4}

# What few_gpu uses at E and I; other sizes get the widest tiles up to 64. Of the tiles timed on an
# H200 (few_tiles_gpu.json) none is faster by more than 3% at 4 to 16 tokens, and 32 columns of gate
# and up are the worst there: a row of 64 is 128 bytes, one line of the L2 cache.
FEW = {
    (2048, 768): ExpertsTuning(),  # Qwen3-30B-A3B: 96 programs of 64 KiB, then 256 of 32
    (2880, 2880): ExpertsTuning(),  # gpt-oss: 180 and 180
}
# The same for one token alone, where deeper rings are faster by 5% (few_tiles_gpu.json, one run on
# an H200); at 4 to 16 tokens they are slower.
FEW_ONE_TOKEN = {(2048, 768): ExpertsTuning(num_stages=6, down_stages=8)}


def choose_few(
    num_tokens: int, *, num_experts: int, size: int, inner: int, is_packed: bool = False
) -> ExpertsTuning | None:
    """Tiles of few_gpu for so many tokens, E = size and I = inner; None where it does not serve."""
    if not 1 <= num_tokens <= MOST_TOKENS or num_experts > MOST_RANKED:
        return None
    if size % LEAST or inner % LEAST or num_experts * size * 2 * inner > MOST_ELEMENTS:
        return None
    wide, deep = _largest(size, most=64), _largest(inner, most=64)
    widest = ExpertsTuning(gate_up_n=deep, gate_up_k=wide, down_n=wide, down_k=deep)
    if is_packed:
        deep, wide = min(deep, FEW_PACKED_COLUMNS), min(wide, FEW_PACKED_COLUMNS)
        return replace(widest, gate_up_n=deep, down_n=wide, **FEW_PACKED)
    found = FEW.get((size, inner), widest)
    return FEW_ONE_TOKEN.get((size, inner), found) if num_tokens == 1 else found


def _largest(length: int, *, most: int) -> int:
    """The largest power of two, up to `most`, that divides `length`."""
    return min(length & -length, most)


def _columns(length: int, blocks: int, *, most: int) -> int:
    """As wide as keeps the memory busy, but not below 32 where that divides."""
    tile = _largest(length, most=most)
    while tile > 2 * LEAST and blocks * (length // tile) < PROGRAMS:
        tile //= 2
    return tile
