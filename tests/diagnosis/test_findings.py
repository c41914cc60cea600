"""The rules that turn measurements into findings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jspec.cli.diagnosis.agreement import Agreement, gain
from jspec.cli.diagnosis.costs import MOST_REPEATS, REPEATS, Timing, repeated
from jspec.cli.diagnosis.findings import (
    Finding,
    Trial,
    best,
    fits,
    of_serving,
    undecided_fit,
    undecided_serving,
    undecided_trials,
    unfit,
    unlike_served,
)
from jspec.cli.diagnosis.readings import Reading, nearby_layers, usual_layers
from jspec.cli.diagnosis.records import Diagnosis, Pair, buckets_of, by_depth
from jspec.cli.diagnosis.tensors import coarse_levels, facts_of, suspicious
from jspec.cli.diagnosis.texts import Text, Verification
from jspec.cli.doctor import text_of
from jspec.engine.weights.loading import BUNDLED
from jspec.messages.request import Request, SamplingParams

ROWS, S = 400, 3


def agreement(share: float, *, confidence: float = 0.5, seed: int = 0) -> Agreement:
    """One text whose guesses hit at random."""
    hits = np.random.default_rng(seed).random((1, ROWS, S)) < share
    return Agreement(hits=hits, anchors=np.ones((1, ROWS), bool), confidence=confidence)


def reading(kind: str, *, shift: int = 0) -> Reading:
    head: object = None
    return Reading(
        kind=kind,
        fault="a fault",
        repair="a repair",
        head=head,  # type: ignore[arg-type]
        layer_ids=(),
        shift=shift,
    )


def text(num_accepted: np.ndarray) -> Text:
    """One text whose step at row t accepted num_accepted[t] drafts."""
    request = Request(request_id="r", prompt_ids=(1,), sampling=SamplingParams(), seed=0)
    steps = tuple(
        Verification(length=t + 1, num_accepted=int(n), num_emitted=int(n) + 1)
        for t, n in enumerate(num_accepted)
    )
    return Text(request=request, ids=(1,), finish=None, steps=steps)


def trial(before: float, after: float, kind: str = "norm") -> Trial:
    found, base = agreement(after, seed=1), agreement(before, seed=2)
    return Trial.of(reading(kind), found, base)


@pytest.mark.parametrize(
    ("before", "after", "is_believed"),
    [
        (0.1, 0.85, True),  # most of what was missing
        (0.75, 0.85, True),  # a tenth of it, to a good head
        (0.35, 0.45, False),  # a bad head stays one
        (0.8, 0.805, False),  # chance
        (0.8, 0.6, False),
    ],
)
def test_a_repair_is_believed_if_it_repairs(before: float, after: float, is_believed: bool) -> None:
    assert trial(before, after).is_believed is is_believed


def test_the_best_believed_repair_is_named() -> None:
    trials = [trial(0.35, 0.4, "layer_ids"), trial(0.1, 0.6, "norm"), trial(0.1, 0.9, "vocabulary")]
    found = best(trials)
    assert found is not None
    assert found.finding.kind == "vocabulary"
    assert best(trials[:1]) is None


def test_a_gain_counts_its_own_standard_error() -> None:
    gained, errors = gain(agreement(0.8, seed=1), agreement(0.5, seed=2))
    assert gained == pytest.approx(0.3, abs=0.05)
    assert errors > 8
    same = agreement(0.5)
    assert gain(same, same) == (0.0, 0.0)


def test_a_head_that_is_surer_than_right_does_not_fit() -> None:
    assert fits(agreement(0.8, confidence=0.9))
    assert fits(agreement(0.3, confidence=0.2))  # weak, and knows it
    assert fits(agreement(0.37, confidence=0.38))  # so was a healthy one for several tokens
    assert not fits(agreement(0.3, confidence=0.6))
    assert not fits(agreement(0.05, confidence=0.001))


def test_served_steps_are_held_against_the_teacher_forced_head() -> None:
    right, shifted = agreement(0.8, seed=1), agreement(0.4, seed=2)
    as_forced, as_shifted = text(right.num_accepted[0]), text(shifted.num_accepted[0])
    assert unlike_served(right, [as_forced]) == (0.0, ROWS)
    after = reading("anchor_row", shift=1)
    assert of_serving(right, [(after, shifted)], [as_forced]) is None
    found = of_serving(right, [(after, shifted)], [as_shifted])
    assert found is not None
    assert found.kind == "anchor_row"
    neither = text(agreement(0.2, seed=3).num_accepted[0])
    found = of_serving(right, [(after, shifted)], [neither])
    assert found is not None
    assert found.kind == "serving"


def test_layers_worth_trying() -> None:
    assert usual_layers(32) == (2, 16, 29)
    assert usual_layers(4) == ()
    assert nearby_layers((2, 5, 9), 9) == (1, 2, 3, 4, 5, 6, 8, 9)
    assert nearby_layers((), 9) == ()


def test_agreement_by_depth_and_length() -> None:
    assert by_depth([0, 1, 2, 2], 2) == [0.75, pytest.approx(2 / 3)]
    assert by_depth([], 2) == [0.0, 0.0]
    forced = agreement(0.5)
    buckets = buckets_of([text(forced.num_accepted[0])], forced)
    assert [(b.first, b.last) for b in buckets] == [(0, 63), (64, 255), (256, 1023)]
    assert sum(b.num_served for b in buckets) == sum(b.num_forced for b in buckets) == ROWS
    assert [b.served for b in buckets] == [b.forced for b in buckets]


def test_tensors_that_no_training_makes() -> None:
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(128, 8)).astype(np.float32)
    half = np.where(rng.random((128, 8)) < 0.5, 0, matrix)
    params = {"fc": {"kernel": matrix}, "layer": {"a": half}, "draft_ids": np.zeros(4, np.int32)}
    facts = facts_of(params)
    assert [fact.name for fact in facts] == ["fc.kernel", "layer.a"]
    (found,) = suspicious(facts)
    assert "layer.a [128, 8] is zero" in found
    assert suspicious(facts_of({"fc": np.round(matrix)})) == ()  # quantized, not pruned
    broken = facts_of({"fc": {"kernel": np.full((2, 2), np.nan, np.float32)}})
    assert suspicious(broken) == ("fc.kernel holds numbers that are not finite",)


def on_grid(x: np.ndarray, bits: int, *, group: int | None = None) -> np.ndarray:
    """Quantize x[inputs, outputs] symmetrically; one scale an output, or a group of inputs."""
    groups = x.T.reshape(x.shape[1], -1, group or x.shape[0])
    scale = np.abs(groups).max(axis=-1, keepdims=True) / (2 ** (bits - 1) - 1)
    rounded: np.ndarray = np.round(groups / scale) * scale
    return rounded.reshape(x.shape[1], -1).T


HEALTHY: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "float32": lambda x: x,
    "bfloat16": lambda x: x.astype(ml_dtypes.bfloat16),
    "fp8": lambda x: (x / np.abs(x).max() * 448).astype(ml_dtypes.float8_e4m3fn),
    "int8": lambda x: on_grid(x, 8),
    "int8, then bfloat16": lambda x: on_grid(x, 8).astype(ml_dtypes.bfloat16),
    "int4": lambda x: on_grid(x, 4),
    "int4 in groups": lambda x: on_grid(x, 4, group=32),
}


def whole(x: np.ndarray) -> np.ndarray:
    """Quantize to 4 bits with one scale for the whole tensor."""
    scale = np.abs(x).max() / 7
    rounded: np.ndarray = np.round(x / scale) * scale
    return rounded


TRAINED: dict[str, tuple[Callable[[np.ndarray], np.ndarray], int | None]] = {
    **{name: (change, None) for name, change in HEALTHY.items()},
    "4 bits, then 3": (lambda x: on_grid(on_grid(x, 4), 3), 7),
    "3 bits": (lambda x: on_grid(x, 3), 7),  # it looks like the one before
    "8 bits, then 4": (lambda x: on_grid(on_grid(x, 8), 4), None),  # as good as 4 bits once
    "4 bits, a scale a tensor": (whole, 6),  # most of 15 numbers are for its few large ones
}


@pytest.mark.parametrize("kind", TRAINED)
def test_how_coarse_trained_weights_are(kind: str) -> None:
    change, levels = TRAINED[kind]
    read = load_file(BUNDLED / "draft" / "model.safetensors")
    params = {
        name: {"kernel": change(x.astype(np.float32).T).astype(np.float32)}
        for name, x in read.items()
        if x.ndim == 2
    }
    assert coarse_levels(facts_of(params)) == levels


def test_weak_heads_are_told_apart_by_their_weights() -> None:
    weak = agreement(0.36, confidence=0.37)
    assert fits(weak)
    assert not fits(weak, is_coarse=True)
    assert fits(agreement(0.7, confidence=0.6), is_coarse=True)  # coarse, and good enough
    assert "7 different numbers" in unfit(weak, 7).what
    assert unfit(weak, 7).kind == unfit(weak, None).kind == "unfit"


def test_a_time_is_measured_again_until_its_spread_supports_it() -> None:
    quiet = iter([1.0, 1.01, 0.99, *[9.0] * 99])
    assert repeated(lambda: next(quiet)).count == REPEATS
    noisy = iter([1.0, 2.0, 1.2, *[1.1, 1.12, 1.09, 1.11] * 9])
    found = repeated(lambda: next(noisy))
    assert REPEATS < found.count < MOST_REPEATS
    assert found.seconds == pytest.approx(1.1, abs=0.03)
    wild = iter([1.0, 3.0] * 99)
    assert repeated(lambda: next(wild)).count == MOST_REPEATS
    draws = np.random.default_rng(0).normal(5, 1, (300, 15))
    medians = [Timing.of(row.tolist()) for row in draws]
    spread = np.std([each.seconds for each in medians])
    assert np.mean([each.error for each in medians]) == pytest.approx(spread, rel=0.2)


def test_what_the_tokens_are_too_few_for_is_undecided() -> None:
    close = Trial(reading=reading("norm"), agreement=0.8, gain=0.1, errors=3.0)
    assert not close.is_believed
    (line,) = undecided_trials([close, trial(0.1, 0.85), trial(0.8, 0.805)])
    assert line == (
        "a fault: read so, the head agrees in 0.100 more of the guesses, which is 3.0 standard "
        "errors; expected 4 to believe it"
    )
    assert "whether the head fits" in undecided_fit(agreement(0.44, confidence=0.9))[0]
    assert not undecided_fit(agreement(0.8, confidence=0.9))
    assert not undecided_fit(agreement(0.2, confidence=0.9))
    forced = agreement(0.6)
    for share, is_undecided in ((0.09, True), (0.3, False), (0.0, False)):
        served = forced.num_accepted[0] + (np.arange(ROWS) < share * ROWS)
        assert bool(undecided_serving(forced, [text(served)])) is is_undecided


def diagnosis(*, step: float, error: float = 0.0, **changes: object) -> Diagnosis:
    """A pair of two tokens a step; a plain step takes one second."""
    pair = Pair(
        algorithm="EAGLE3",
        shape="3/1/4",
        dtype="float32",
        head="head",
        aux_layer_ids=(),
        rope_theta=None,
        target_rope_theta=1e4,
        windows=(),
        draft_vocab_size=None,
    )
    values: dict[str, Any] = {
        "pair": pair,
        "num_texts": 1,
        "num_tokens": 100,
        "acceptance_length": 2.0,
        "acceptance_error": 0.0,
        "served_by_depth": [0.5],
        "step_seconds": step,
        "step_error": error,
        "plain_step_seconds": 1.0,
        "plain_step_error": 0.0,
        **dict.fromkeys(("forced_by_depth", "confidence", "unlike_served", "coverage")),
        "propose_seconds": None,
        **dict.fromkeys(("buckets", "templates", "tensors", "tried", "findings", "undecided"), ()),
    }
    return Diagnosis(**{**values, **changes})


def test_the_verdict_says_what_it_could_not_decide() -> None:
    assert text_of(diagnosis(step=1.0)).endswith(
        "nothing is wrong with the pair, and speculation pays"
    )
    assert "does not pay since a step costs 3.0 plain ones" in text_of(diagnosis(step=3.0))
    close = diagnosis(step=1.95, error=0.1)
    assert close.pays is None
    assert close.to_json()["pays"] is None
    said = text_of(close)
    assert "= 1.03 ± 0.11\nnot decided: whether speculation pays: 1.03 ± 0.11 includes 1" in said
    assert diagnosis(step=1.0, error=0.1).pays
    said = text_of(diagnosis(step=1.0, undecided=("whether it fits",)))
    assert "not decided: whether it fits\n  measure with more prompts" in said
    assert "nothing is wrong" not in said
    found = Finding(kind="norm", what="a", repair="b")
    said = text_of(diagnosis(step=1.0, undecided=("whether it fits",), findings=(found,)))
    assert said.index("not decided") < said.index("FOUND (norm): a\n  repair: b")
