"""The chunk of a vocabulary that a program of the sampling kernels reads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SampleTuning:
    """chunk: logits per program, a power of two. num_warps: per program, of 32 threads."""

    chunk: int = 2048
    num_warps: int = 4


def choose_tuning(num_rows: int) -> SampleTuning:
    """Use smaller chunks for few rows, so that every multiprocessor has a program."""
    return SampleTuning(chunk=1024) if num_rows <= 4 else SampleTuning()
