"""Vocabularies and kv heads that the shards of tensor parallelism do not divide."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jspec import Engine
from jspec.models.files.checkpoint import load_target, save_target
from jspec.models.placement import init_params
from jspec.models.registry import table_of
from jspec.spec.model_spec import ModelSpec
from tests.support.tiny_models import tiny_target_config

SIZE = 323
REQUEST: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True, "sampling_seed": 7}
SAMPLINGS = [
    {**REQUEST, "temperature": 0.0},
    {**REQUEST, "temperature": 1.0},
    {**REQUEST, "temperature": 1.0, "top_p": 0.9, "frequency_penalty": 0.5},
    {**REQUEST, "temperature": 3.0, "logit_bias": {str(SIZE - 1): 6.0}},
]


def saved(path: Path, *, is_tied: bool) -> ModelSpec:
    config = replace(tiny_target_config(), vocab_size=SIZE, tie_word_embeddings=is_tied)
    params = init_params(table_of(config), seed=3)
    save_target(path, config, params, dtype=np.float32)
    return config


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("shards", [2, 4])
def test_the_columns_of_no_token_are_zeros_at_the_end(
    tmp_path: Path, shards: int, is_tied: bool
) -> None:
    config = saved(tmp_path, is_tied=is_tied)
    one, many = (
        np.asarray(load_target(tmp_path, config, dtype=np.float32, shards=n)["lm_head"]["kernel"])
        for n in (1, shards)
    )
    assert many.shape == (32, 324)
    np.testing.assert_array_equal(many[:, :SIZE], one)
    assert not many[:, SIZE:].any()


@pytest.mark.slow
def test_texts_do_not_depend_on_the_shards(tmp_path: Path) -> None:
    """Four shards, which also repeat the two kv heads. Some texts end in the last id."""
    saved(tmp_path, is_tied=False)
    texts = []
    for shards in (1, 4):
        engine = Engine(
            model_path=str(tmp_path),
            skip_tokenizer_init=True,
            dtype="float32",
            tp_size=shards,
            speculative_algorithm="NONE",
            max_running_requests=4,
            context_length=64,
            compile_at_start="common",
            compilation_cache_dir="",
        )
        prompts = [[5, SIZE - 1, 9, 11 + i] for i in range(len(SAMPLINGS))]
        with engine:
            found = engine.generate(
                input_ids=prompts, sampling_params=SAMPLINGS, return_logprob=True
            )
        texts.append([each["output_ids"] for each in found])
    assert texts[0] == texts[1]
    assert any(SIZE - 1 in text for text in texts[0])
