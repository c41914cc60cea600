"""Every file under configs/ is one that `jspec serve --config` takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jspec.cli.flags import FlagParser, add_flags, parse_flags
from jspec.server.server_args import Settings

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))


def load(path: Path) -> Settings:
    parser = FlagParser(prog="test")
    add_flags(parser)
    return parse_flags(parser, ["--config", str(path)])[1]


def test_there_are_examples_for_each_kind_of_machine() -> None:
    assert {path.stem for path in CONFIGS} >= {
        "bundled-cpu",
        "bundled-tree",
        "llama-3.1-8b-eagle3-h200",
        "llama-3.1-8b-eagle3-v5e-4",
    }


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_loads_and_says_what_it_is_for(path: Path) -> None:
    settings = load(path)
    assert settings.engine
    assert settings.engine_args.speculative.num_steps > 0
    assert path.read_text(encoding="utf-8").startswith("# ")


def test_the_example_says_how_long_the_recorded_recipe_took() -> None:
    result = ROOT / "benchmarks" / "results" / "bundled_pair_training.json"
    seconds = json.loads(result.read_text(encoding="utf-8"))["stage_seconds"]
    text = (ROOT / "examples" / "train_bundled_pair.py").read_text(encoding="utf-8")
    assert f"{sum(seconds.values()) / 60:.1f} minutes" in " ".join(text.split())


def test_the_tree_is_a_tree_and_v5e_has_four_chips() -> None:
    by_name = {path.stem: load(path).engine_args for path in CONFIGS}
    tree = by_name["bundled-tree"].speculative
    assert (tree.num_steps, tree.topk, tree.num_draft_tokens) == (4, 4, 16)
    assert by_name["llama-3.1-8b-eagle3-v5e-4"].tp_size == 4
