"""The chunk of a vocabulary that a program of the sampling kernels reads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SampleTuning:
    chunk: int = 2048  # logits per program, a power of two
    num_warps: int = 4  # of 32 threads


def choose_tuning(num_rows: int) -> SampleTuning:
    """Use smaller chunks for few rows, so that every multiprocessor has a program."""
    return SampleTuning(chunk=1024) if num_rows <= 4 else SampleTuning()
