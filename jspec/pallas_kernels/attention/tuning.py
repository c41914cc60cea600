"""Tuning parameters of the Hopper decode attention kernel and their defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Parameters that affect speed only."""

    block_tokens: int = 64  # keys of one iteration: 64 or 128
    stages: int = 2  # blocks in a consumer's ring
    consumers: int = 1  # warp groups; each takes every n-th block of a share, with its own ring
    # "self": a consumer refills its ring; "producer": one more warp group issues all copies.
    loader: Literal["self", "producer"] = "self"
    weights: Literal["registers", "shared"] = "registers"  # where P is stored for the P V product
    splits: int | None = None  # shares of a row's keys; None: `choose_splits`

    def __post_init__(self) -> None:
        if self.block_tokens not in (64, 128):
            raise ValueError(f"block_tokens is {self.block_tokens}; expected 64 or 128")
        if self.stages < 1 or self.consumers < 1:
            raise ValueError(f"stages {self.stages}, consumers {self.consumers}; expected >= 1")
        if self.splits is not None and self.splits < 1:
            raise ValueError(f"splits is {self.splits}; expected at least 1")


def choose_tuning(width: int, *, windowed: bool) -> Tuning:
    """Return blocks of 128 keys for heads of 64 without a window, else the defaults."""
    return Tuning(block_tokens=128) if width == 64 and not windowed else Tuning()


@dataclass(frozen=True, slots=True, kw_only=True)
class WideTuning:
    """Parameters of gpu_wide.py that affect speed only. programs: per multiprocessor."""

    block: int = 64  # keys of one iteration, a multiple of 32
    warps: int = 4
    stages: int = 2
    programs: int = 2


def choose_wide_tuning(value_dim: int, *, rows: int, is_latent: bool) -> WideTuning:
    """Return tiles that fit in registers: rows x value_dim sums. rows: of a tile, up to 64."""
    return WideTuning(
        block=32 if is_latent else 64,
        warps=8 if rows * value_dim > 8192 else 4,
        stages=3 if rows == 64 and not is_latent else 2,
        programs=1 if is_latent else 2,
    )
