"""Stages of the recipe: budget, and one tiny run of all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jspec.errors import ConfigError
from recipes.bundled_pair import pair
from recipes.bundled_pair.pair_sizes import PairSizes


def test_a_budget_is_shared_among_the_timed_stages_of_a_call() -> None:
    assert pair.split_budget(100.0, pair.STAGES) == pytest.approx(
        {"target": 27.0, "samples": 7.0, "head": 66.0}
    )
    assert pair.split_budget(34.0, ("target", "samples", "report")) == pytest.approx(
        {"target": 27.0, "samples": 7.0}
    )
    assert pair.split_budget(100.0, ("target",)) == {"target": 100.0}
    assert pair.split_budget(100.0, ("corpus",)) == {}
    assert pair.split_budget(None, pair.STAGES) == {}


def test_a_stage_without_what_it_needs_says_which_one_to_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="stage 'corpus'"):
        pair.main(["--stage", "tokenizer", "--data", str(tmp_path), "--out", str(tmp_path)])
    job = pair.Job(data=tmp_path, out=tmp_path, sizes=PairSizes.tiny())
    with pytest.raises(ConfigError, match="stage 'samples'"):
        pair.read_samples(job)


@pytest.mark.slow
@pytest.mark.exhaustive  # the bundled pair is trained by hand; tests/test_train_draft.py is in CI
def test_the_whole_recipe_runs_and_measures_what_it_exported(tmp_path: Path) -> None:
    library = tmp_path / "python3.99"
    library.mkdir()
    for name in ("json", "queue", "email", "struct", "zlib", "sched"):
        lines = [
            f"def {name}_{verb}_{noun}(value):\n    return {verb}(value, {noun})\n"
            for verb in ("read", "write", "parse", "close", "flush")
            for noun in ("name", "header", "line", "field", "item", "table")
        ]
        (library / f"{name}.py").write_text("\n\n".join(lines))
    arguments = ["--stage", "all", "--data", str(tmp_path / "data"), "--out", str(tmp_path / "out")]
    pair.main([*arguments, "--size", "tiny", "--stdlib", str(library)])
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert set(report) == {"target", "samples", "head", "acceptance", "megabytes"}
    for row in report["acceptance"]["chain_3_shared_noise"].values():
        assert 1.0 <= row["mean_emitted"] <= 4.0
