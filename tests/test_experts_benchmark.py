"""The benchmark of a mixture's experts, on a CPU at sizes of nothing: the kernels interpreted."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from benchmarks import experts_gpu
from benchmarks.experts_gpu import ALONE, MODELS, PLANNED, XLA, Case, cases, compiled, measure


def test_the_plan_and_its_changes_come_after_xla() -> None:
    found = cases(["qwen3-30b-a3b", "gpt-oss-20b"], [1, 2048])
    assert [case.name for case in found[:6]] == [XLA, PLANNED, ALONE] * 2
    assert len({case.key for case in found}) == len(found)
    for case in found:
        model = MODELS[case.model]
        assert case.tuning is None or case.tuning.problem(model.size, model.inner) is None
    assert {"128 columns", "rounds of 128"} <= {case.name for case in found}


def test_the_floor_is_what_the_tokens_touch() -> None:
    """One token: 8 of 128 experts of 9.4 MB; 2,048 tokens of gpt-oss: all, and the arithmetic."""
    seconds, touched = experts_gpu.floor_seconds(Case("qwen3-30b-a3b", 1, XLA))
    assert touched == 8 * 3 * 2048 * 768 * 2
    assert seconds == pytest.approx(16.8e-6, rel=0.01)
    seconds, touched = experts_gpu.floor_seconds(Case("gpt-oss-20b", 2048, XLA))
    assert touched == 32 * 3 * 2880 * 2880 * 2
    assert seconds == pytest.approx(2048 * 4 * 6 * 2880 * 2880 / 790e12)


@pytest.mark.slow
def test_every_kind_of_case_runs_and_one_that_fails_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = [case for case in cases(["tiny"], [1]) if case.name in (XLA, PLANNED, ALONE)]
    rows = [{"key": case.key} | measure(case, partial(compiled, case), samples=1) for case in found]
    assert [row.get("error") for row in rows] == [None] * 3
    assert all(row["microseconds"] > 0 for row in rows)
    plan = found[1].tuning
    assert plan is not None
    odd = Case("tiny", 1, "odd", replace(plan, down_n=128))
    rows.append({"key": odd.key} | measure(odd, partial(compiled, odd)))
    assert "down_n 128 does not divide E 32" in rows[-1]["error"]
    best = experts_gpu.summary(rows)
    assert set(best["tiny 1"]) == {"floor", XLA, PLANNED, ALONE, "best", "best_name"}
    experts_gpu.report(rows, best)
    printed = capsys.readouterr().out
    assert "tiny 1 | odd: ValueError" in printed
    assert "BEST tiny 1: planned" in printed
