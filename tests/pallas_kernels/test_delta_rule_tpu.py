"""The TPU kernel of delta nets, interpreted, against the definition in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from jspec.pallas_kernels.delta_rule import tpu
from jspec.pallas_kernels.ops import Ops
from tests.layers.mixer_rows import Rows
from tests.layers.test_mixers import mixed_of


@dataclass(frozen=True, slots=True)
class DeltaOps(Ops):
    """XLA, but for the kernel under test."""

    name = "delta"

    def delta_rule(self, *given: Any, queries_per_row: int | None) -> Any:
        if queries_per_row is None:
            return Ops.delta_rule(self, *given, queries_per_row=None)
        return tpu.run_rows(*given, nodes=queries_per_row, interpret=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["delta_net", "delta_net_short"])
def test_any_history_gives_the_definition(name: str) -> None:
    """NaN in padding, in rows without a request and in unwritten memory changes no result."""
    rows = Rows(mixed_of(name), seed=2, page_size=4, ops=DeltaOps())
    rows.chunk((6, 1, 9))
    rows.verify(7, topk=2)
    rows.verify(3, topk=1)
    rows.restart(1)
    rows.chunk((0, 5, 3))
    rows.verify(7, topk=2, dead=[1])
    rows.verify(1, topk=1)
