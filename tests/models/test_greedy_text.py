"""An engine's greedy text is that of transformers, over 220 ids and many windows of 8.

transformers wrote greedy.json without a cache; no choice is close to a tie.
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
# Windows with sinks, heads of two sizes, recurrent states, latents, a selection for two layers.
# Gated heads and shared experts are of the forward alone, which test_families.py compares; sinks
# are in tests/speculative/test_family_identity.py, sparse latents in test_latent_engine.py.
DISTINCT = ("mimo_v2", "qwen3_next")
LOOKUP: dict[str, Any] = {
    "speculative_algorithm": "NGRAM",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in DISTINCT else pytest.mark.exhaustive)
        for name in FAMILY_CHECKPOINTS
    ],
)
def test_speculative_text_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    """The prompt comes in several chunks."""
    path = checkpoint_of(name, tmp_path)
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
        **LOOKUP,
    )
    sampling = {"temperature": 0, "max_new_tokens": NUM_IDS, "ignore_eos": True}
    with engine:
        said = engine.generate(input_ids=golden["prompt"], sampling_params=sampling)
    assert said["output_ids"] == golden["ids"]
    if name in ("gpt_oss", "mimo_v2"):
        assert said["meta_info"]["acceptance_length"] > 1.5, "few drafts were accepted"
