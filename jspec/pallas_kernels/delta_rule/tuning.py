"""Tuning parameters of the GPU kernels of the delta rule, and their defaults."""

from __future__ import annotations

from dataclasses import dataclass

FEW_NODES = 8  # most nodes that run one after the other, without tensor cores


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Parameters that affect speed only. strip: columns of V per program, a power of two."""

    strip: int = 32
    state_warps: int = 4
    input_warps: int = 4
    pair_warps: int = 4


def choose_tuning(*, rows: int, nodes: int) -> Tuning:
    """Return the fastest parameters of those tried on an H200, at the widths of Qwen3.5-9B."""
    if nodes == 1:
        return Tuning(strip=64 if rows >= 16 else 32, input_warps=2)
    if nodes <= FEW_NODES:
        return Tuning(state_warps=1, input_warps=1) if rows >= 8 else Tuning()
    how = {"strip": 64, "state_warps": 2, "input_warps": 8}
    return Tuning(**how, pair_warps=1 if rows >= 16 else 4) if rows >= 8 else Tuning()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTuning:
    """Parameters for speed, powers of two. strip: columns of V of a program. channels: of keys, in
    a part of its state."""

    strip: int = 32
    channels: int = 64
    solve_warps: int = 4
    state_warps: int = 4


def choose_chunks() -> ChunkTuning:
    """Return a tuning that no chip has compared with others yet."""
    return ChunkTuning()
