"""The benchmark of chosen shapes, on tiny models: its target counts and its dial is obeyed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.adaptive_card import CountingEngine, expected_length, seconds_of, start
from benchmarks.workloads import WORKLOADS

TINY = WORKLOADS["tiny"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CountingEngine]:
    found = start(TINY, tmp_path_factory.mktemp("configs"), "chain", batches=[2])
    yield found
    found.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0])
def test_the_dial_says_what_is_accepted(engine: CountingEngine, acceptance: float) -> None:
    """`seconds_of` itself checks every text."""
    spec = engine.limits.spec
    engine.switched.use(spec)
    before = engine.stats.counters
    for _ in range(4):
        seconds_of(engine, TINY, 2, acceptance, TINY.long_run)
    after = engine.stats.counters
    emitted = after.full_num_emitted - before.full_num_emitted
    verified = after.full_verify_ct - before.full_verify_ct
    tolerance = 0.0 if acceptance in (0.0, 1.0) else 0.4
    wanted = expected_length(acceptance, spec.num_steps)
    assert emitted / verified == pytest.approx(wanted, abs=tolerance)
