"""An engine's greedy text is transformers', over 220 ids and many windows of 8.

The engine reads the checkpoint as any other; transformers wrote greedy.json beside it without a
cache, at no choice near a tie (tests/golden/make_families_golden.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import jspec
from jspec.models.files.checkpoint import load_model_spec
from tests.models.family_checkpoints import FAMILY_CHECKPOINTS, checkpoint_of

NUM_IDS = 220
LOOKUP = {
    "speculative_algorithm": "NGRAM",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}


def check(name: str, folder: Path, **arguments: Any) -> dict[str, Any]:
    """The prompt comes in several chunks. Returns what the engine says of its text."""
    path = checkpoint_of(name, folder)
    golden = json.loads((path / "greedy.json").read_text())
    assert len(golden["ids"]) == NUM_IDS
    for layer in load_model_spec(path).layers:
        assert layer.attention.window in (None, 8)
    engine = jspec.Engine(
        str(path),
        dtype="float32",
        skip_tokenizer_init=True,
        max_running_requests=1,
        chunked_prefill_size=16,
        disable_logprobs=True,
        compilation_cache_dir="",
        **arguments,
    )
    sampling = {"temperature": 0, "max_new_tokens": NUM_IDS, "ignore_eos": True}
    with engine:
        said = engine.generate(input_ids=golden["prompt"], sampling_params=sampling)
    assert said["output_ids"] == golden["ids"]
    info: dict[str, Any] = said["meta_info"]
    return info


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILY_CHECKPOINTS)
def test_plain_text_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_oss", "mimo_v2"])
def test_speculation_writes_it_too(name: str, tmp_path: Path) -> None:
    info = check(name, tmp_path, **LOOKUP)
    assert info["acceptance_length"] > 1.5, "few drafts were accepted"
