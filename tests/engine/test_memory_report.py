"""An engine whose programs' scratch does not fit is refused at the start, with the memory's
users."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jspec.device.state import EngineState, empty_rows
from jspec.engine.memory import memory_report
from jspec.engine.memory.device_memory import no_pool_error
from jspec.engine.memory.memory_report import (
    bytes_each,
    check_scratch_fits,
    held_bytes,
    scratch_bytes,
)
from jspec.engine.steps.step_def import ProgramKey
from jspec.errors import ConfigError
from jspec.messages.plan import StepKind
from jspec.messages.step_options import ALL, PLAIN
from tests.engine.test_device_memory import Card

GIB = 1 << 30
PREFILL = ProgramKey(StepKind.PREFILL, 8192, ALL)
DECODE = ProgramKey(StepKind.DECODE, 256, PLAIN)
HELD = {
    "the target's weights": 16 * GIB,
    "the draft's weights": GIB,
    "KV pools": 50 * GIB,
    "other state": 0,
}


@pytest.fixture(autouse=True)
def nothing_to_collect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the collection of other tests' objects, which would take a second each time."""
    monkeypatch.setattr(memory_report.gc, "collect", lambda: 0)


def check(scratch: dict[ProgramKey, int], *, free: int, **held: int) -> None:
    cards = [Card(80 * GIB, 10 * GIB), Card(80 * GIB, 80 * GIB - free)]
    check_scratch_fits(cards, scratch, held={**HELD, **held}, fraction=0.85)


def test_what_fits_is_not_spoken_of() -> None:
    check({PREFILL: 3 * GIB, DECODE: GIB}, free=3 * GIB)
    check({}, free=0)
    check_scratch_fits([Card(None, platform="cpu")], {PREFILL: 1 << 60}, held=HELD, fraction=0.85)


def test_the_largest_scratch_is_named_with_all_that_is_there_and_what_would_fit() -> None:
    with pytest.raises(ConfigError) as caught:
        check({PREFILL: 6 * GIB, DECODE: GIB}, free=2 * GIB)
    assert str(caught.value) == (
        "the step prefill T=8192 all takes 6.0 GiB of scratch on each device, and 2.0 GiB of the "
        "80.0 GiB that jax may use are free after the target's weights (16.0 GiB), the draft's "
        "weights (1.0 GiB), KV pools (50.0 GiB); expected mem_fraction_static of at most 0.80 (or "
        "fewer max_total_tokens), chunked_prefill_size below 8192, tp_size above 2, or a larger "
        "XLA_CLIENT_MEM_FRACTION"
    )
    check({PREFILL: 6 * GIB}, free=2 * GIB + 4 * GIB)  # the rest after the smaller fraction


def test_no_share_of_pools_is_advised_that_they_do_not_have() -> None:
    with pytest.raises(ConfigError, match="max_running_requests below 256") as caught:
        check({PREFILL: GIB, DECODE: 6 * GIB}, free=2 * GIB, **{"KV pools": GIB})
    assert "mem_fraction_static" not in str(caught.value)


def test_memory_that_is_only_to_be_collected_counts_as_free() -> None:
    @dataclass
    class Collected:
        platform: str = "gpu"
        asked: int = 0

        def memory_stats(self) -> dict[str, int]:
            self.asked += 1
            return {"bytes_limit": 10, "bytes_in_use": 8 if self.asked == 1 else 2}

    check_scratch_fits([Collected()], {DECODE: 5}, held={}, fraction=0.85)


def test_a_compiled_program_says_its_scratch() -> None:
    def step(x: jax.Array) -> jax.Array:
        return jnp.sort(jnp.outer(x, x).reshape(-1))[:3]

    compiled: Any = jax.jit(step).lower(jnp.zeros(64)).compile()
    silent = SimpleNamespace(memory_analysis=lambda: None)
    found = scratch_bytes({DECODE: compiled, PREFILL: silent})
    assert set(found) == {DECODE}
    assert found[DECODE] >= 64 * 64 * 4


def test_shared_weights_are_the_targets() -> None:
    shared, own = jnp.zeros((4, 8)), jnp.zeros(16)
    params = {"target": {"a": shared}, "draft": {"a": shared, "c": own}}
    found = held_bytes(params, shares=("a",))
    assert found == {"the target's weights": 128, "the draft's weights": 64}
    assert bytes_each(()) == 0


def test_snapshots_of_states_are_a_part_of_their_own() -> None:
    rows = empty_rows(2, pages_per_row=1, vocab_size=8)
    pool, snapshots = jnp.zeros(6), ({"state": jnp.zeros(10)},) * 2
    state = EngineState(kv=(pool,), draft_kv=(), draft={}, rows=rows, snapshots=snapshots)
    found = held_bytes({"target": {}, "draft": {}}, state, shares=())
    assert found["KV pools"] == 24
    assert found["snapshots of recurrent states"] == 80


def test_without_room_for_a_pool_the_weights_are_told_apart() -> None:
    def said(draft: int) -> str:
        card = Card(24 * GIB, 21 * GIB)
        error = no_pool_error(
            [card], 0.85, num_bytes=GIB, target_bytes=17 * GIB, draft_bytes=draft * GIB
        )
        return str(error)

    assert (
        "that is 20.4 GiB of the 24.0 GiB that jax may use on a device, the target's weights take "
        "17.0 GiB, the draft's 3.0 GiB, the rest 1.0 GiB, and the smallest pool 1.0 GiB; expected "
        "mem_fraction_static of at least 0.92, speculative_algorithm NONE (no draft), tp_size of "
        "about 2, "
    ) in said(3)
    assert "speculative_algorithm" not in said(1)
    assert "draft" not in said(0)
