"""Faults in the bundled pair: nine are named, two are reported as unfit.

`faulty_pairs` makes ten of them; the eleventh, an anchor row off by one, is in the engine. Heads
that no rule was tuned on stand for healthy ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jspec.cli.diagnosis.costs import Timing
from jspec.cli.diagnosis.doctor import chain_arguments
from jspec.cli.diagnosis.examination import Examination
from jspec.cli.diagnosis.prompts import EXAMPLES, examples
from jspec.cli.diagnosis.texts import make_texts
from jspec.engine.weights.loading import BUNDLED
from jspec.serving.engine import Engine
from jspec.speculative.drafter import Emitted
from jspec.speculative.drafters.ranked import EagleDrafter
from tests.diagnosis.faulty_pairs import FAULTS, healthy, tensors

pytestmark = pytest.mark.slow
SMALL = {"max_running_requests": 2, "chunked_prefill_size": 32, "disable_logprobs": True}
CHEAP = (tensors,)  # found without another reading of the head


def kinds(
    arguments: dict[str, Any], *, num_texts: int = len(EXAMPLES), num_tokens: int = 128
) -> list[str]:
    """Return the kinds of findings of an examination."""
    with Engine(**chain_arguments({**SMALL, **arguments})) as engine:
        requests = [
            prompt.request(engine, max_new_tokens=num_tokens, sampling_seed=i)
            for i, prompt in enumerate(examples()[:num_texts])
        ]
        examination = Examination(engine, make_texts(engine, requests), say=print)
        examination.run(EXAMPLES[:num_texts])
        second = Timing(1, 0, 1)
        found = examination.diagnosis(step=second, propose_seconds=None, plain_step=second)
    print(found.forced_by_depth, found.confidence, found.findings, found.tried)
    return [each.kind for each in found.findings]


def each_fault() -> Iterator[Any]:
    """CI runs only the cheap ones: each takes half a minute of two idle cores."""
    for make in FAULTS:
        marks: Any = () if make in CHEAP else pytest.mark.exhaustive
        yield pytest.param(make, id=make.__name__, marks=marks)


@pytest.mark.parametrize("make", list(each_fault()))
def test_a_fault_is_named(make: Callable[[Path], dict[str, Any]], tmp_path: Path) -> None:
    few: dict[str, Any] = {"num_texts": 3, "num_tokens": 64} if make in CHEAP else {}
    assert kinds(make(tmp_path), **few) == [FAULTS[make]]


@pytest.mark.exhaustive
def test_an_anchor_row_off_by_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    original = EagleDrafter.advance

    def off_by_one(self: Any, params: Any, caches: Any, state: Any, emitted: Emitted) -> Any:
        """Give each row the feature of the row before it."""
        features = jax.tree.map(lambda x: jnp.roll(x, 1, axis=0), emitted.features)
        return original(
            self, params, caches, state, dataclasses.replace(emitted, features=features)
        )

    monkeypatch.setattr(EagleDrafter, "advance", off_by_one)
    # The program store's key does not include this patch.
    assert kinds({"compilation_cache_dir": ""}) == ["anchor_row"]


UNSEEN: dict[str, dict[str, Any]] = {
    "the bundled pair": {},
    "EAGLE-1": {
        "speculative_algorithm": "EAGLE",
        "speculative_draft_model_path": str(BUNDLED / "draft_eagle1"),
    },
    "MTP": {
        "speculative_algorithm": "EAGLE",
        "enable_multi_layer_eagle": True,
        "speculative_draft_model_path": str(BUNDLED / "draft_mtp"),
    },
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("arguments", UNSEEN.values(), ids=UNSEEN)
def test_a_healthy_pair_is_no_finding(arguments: dict[str, Any], tmp_path: Path) -> None:
    assert kinds({**healthy(tmp_path), **arguments}) == []
