"""Any sequence of shapes: the same text, and a drafter that loses nothing by plain steps.

The planner is an adversary: it changes S/K/N from step to step, with steps in flight, and skips
drafting for one step or for more than may be pending.
"""

from __future__ import annotations

from typing import Any

import pytest

from jspec.messages.plan import StepKind
from jspec.messages.request import SpecCounters
from tests.speculative.engines import Compiled, Served, serve
from tests.speculative.every_drafter import KINDS
from tests.speculative.law_engines import (
    OF_SHAPES,
    Setting,
    engine,
    laid_out,
    no_script,
    plain_texts,
    requests_of,
    scripted,
    with_script,
)
from tests.support.random_shapes import RandomShapes

OFF = (0, 1, 1)
# The first is of the fast suite, the one with rounds and shards of the slow one. The first six are
# chains: all of a chain's drafts are right where the drafter is; of a tree that is cut to N nodes
# the right path may be left out.
SETTINGS = (
    OF_SHAPES,
    Setting("eagle3", (3, 1, 4), 4, others=(OFF, (1, 1, 2))),
    Setting("multi_layer_not_chained", (3, 1, 4), 4, others=(OFF, (1, 1, 2))),
    Setting("standalone", (3, 1, 4), 4, others=(OFF, (1, 1, 2))),
    Setting("frozen_kv", (3, 1, 4), 4, others=(OFF, (1, 1, 2))),
    Setting("eagle1", (2, 1, 3), 16, rounds=3, shards=2, others=(OFF, (1, 1, 2))),
    Setting("eagle3", (3, 2, 11), 4, others=(OFF, (3, 1, 4), (3, 2, 5))),
    Setting("ngram", (3, 3, 10), 16, others=(OFF, (1, 1, 2), (3, 2, 5))),
)


def marks_of(setting: Setting) -> Any:
    in_ci = () if setting.rounds > 1 else (pytest.mark.exhaustive,)
    return () if setting is OF_SHAPES else (pytest.mark.slow, *in_ci)


EVERY_SETTING = [
    pytest.param(setting, id=setting.name, marks=marks_of(setting)) for setting in SETTINGS
]


def told_by_plans(compiled: Compiled, served: Served) -> SpecCounters:
    """Return the totals of the steps' own plans and results, if no output is cut."""
    spec, found = compiled.limits.draft_shape, [0] * (compiled.limits.draft_shape.num_steps + 1)
    num_proposed = 0
    for plan, result in served.steps:
        shape = plan.shape
        if plan.kind is not StepKind.DECODE or shape.is_plain:
            continue
        for of_round in result.rounds:
            for count in of_round.num_emitted.tolist():
                found[count - 1] += 1
                num_proposed += shape.num_draft_tokens - 1
    assert spec.num_steps + 1 == len(found)
    return SpecCounters(
        verify_ct=sum(found),
        num_accepted=sum(i * count for i, count in enumerate(found)),
        num_proposed=num_proposed,
        accept_histogram=tuple(found),
    )


@pytest.mark.parametrize("setting", EVERY_SETTING, scope="module")
def test_the_text_depends_on_no_shape(setting: Setting) -> None:
    """With one, no or two steps in flight."""
    depth = (2, 1, 0)[SETTINGS.index(setting) % 3]
    compiled = engine(setting)
    requests = requests_of(4, num_tokens=60, seed=44, temperature=1.0, top_p=0.9)
    expected = plain_texts(tuple(requests))
    shapes = RandomShapes(compiled.limits, seed=6 + depth)  # every shape in the first few steps
    scripted_engine = with_script(compiled, scripted(requests, expected))
    served = serve(scripted_engine, requests, overlap_depth=depth, num_slots=4, shapes=shapes)
    assert list(served.ids) == expected
    assert (served.num_leaked_pages, served.num_free_pages) == (0, compiled.limits.pool.num_pages)
    assert all(shapes.used.values()), shapes.used
    told, own = told_by_plans(compiled, served), served.counters
    # Steps that were in flight at a row's end are not counted.
    assert 0 < own.verify_ct <= told.verify_ct
    assert own.verify_ct == sum(own.accept_histogram)
    assert own.num_proposed <= told.num_proposed
    assert own.num_proposed == sum(counters.num_proposed for counters in served.per_request)
    if depth == 0 and setting.rounds == 1:  # no step runs on
        assert own.verify_ct == told.verify_ct
        assert own.num_proposed == told.num_proposed


@pytest.mark.parametrize("setting", EVERY_SETTING[:6], scope="module")
def test_a_drafter_that_is_always_right_still_is_whatever_it_missed(setting: Setting) -> None:
    """Its caches and state are those of a row that always drafted: every draft is accepted."""
    kind = KINDS[setting.kind]
    # An equal number of steps for any rounds per step: some shapes must last.
    requests = requests_of(4, num_tokens=80 * setting.rounds, seed=90)
    texts = plain_texts(tuple(requests), target=setting.kind)
    own = kind.always_right([r.prompt_ids + ids for r, ids in zip(requests, texts, strict=True)])
    target, own = laid_out(setting, kind.right_target(), own)
    compiled = with_script(engine(setting), no_script(), own=own, target=target)
    pending: set[int] = set()
    for seed, depth in ((3, 1), (4, 2)):
        shapes = RandomShapes(compiled.limits, seed=seed)
        served = serve(compiled, requests, overlap_depth=depth, shapes=shapes)
        assert list(served.ids) == texts
        pending |= {max(plan.pending) for plan, _ in served.steps if plan.pending}
        check_all_accepted(served)
    assert max(pending) <= compiled.limits.max_pending
    assert len(pending) > 1, pending  # as many as may wait, and fewer


def check_all_accepted(served: Served) -> None:
    """Check each row, in every verification before its last tokens."""
    ends = {
        admission.row: len(admission.fill_ids) + admission.request.sampling.wanted_tokens
        for plan, _ in served.steps
        for admission in plan.admissions
    }
    lengths = {
        admission.row: len(admission.fill_ids) + 1
        for plan, _ in served.steps
        for admission in plan.admissions
    }
    for plan, result in served.steps:
        if plan.kind is not StepKind.DECODE:
            continue
        most = plan.shape.max_emitted
        for of_round in result.rounds:
            for row, count in zip(plan.rows, of_round.num_emitted.tolist(), strict=True):
                if lengths[row] + most <= ends[row]:
                    assert count == most, (plan.step, plan.shape, row, lengths[row])
                lengths[row] += count
