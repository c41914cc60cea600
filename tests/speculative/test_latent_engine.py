"""DeepSeek-V3 and V3.2 with their own layer for multi-token prediction in an ordinary Engine.

Its text is the one that plain decoding would give, by rescoring: after a cached prefix, and after
the weights of both were replaced in place.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from jspec.cli.diagnosis.texts import make_texts
from jspec.engine.rescorer import Rescorer
from jspec.serving.engine import Engine
from tests.speculative.mtp_checkpoints import CONFIGS, write_checkpoint

NEW_TOKENS = 24


def check_texts(engine: Engine, rescorer: Rescorer, prompt: str) -> list[int]:
    """Two turns of a text; return its last ids. The second finds the first one's pages."""
    ids: list[int] = []
    for _ in range(2):
        request = engine.requests(
            prompt=prompt,
            sampling_params={"temperature": 1, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
        )[0]
        (text,) = make_texts(engine, [request])
        ids = list(text.ids)
        assert rescorer.score(request, ids, first_chunk=5).num_differences == 0
        prompt += " two two"
    return ids


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["deepseek_v32", pytest.param("deepseek_v3", marks=pytest.mark.exhaustive)]
)
def test_an_engine_serves_a_target_with_latents_and_its_own_layer(
    family: str, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    write_checkpoint(first, CONFIGS[family])
    write_checkpoint(second, CONFIGS[family], seed=30)
    with Engine(
        str(first),
        speculative_algorithm="NEXTN",
        dtype="float32",
        max_running_requests=1,
        page_size=4,
        chunked_prefill_size=16,
        disable_logprobs=True,
        compilation_cache_dir="",
        random_seed=1,
    ) as engine:
        prompt = "one two one two one two one two one"
        rescorer = Rescorer(engine.served, most_tokens=80)
        before = check_texts(engine, rescorer, prompt)
        cached = engine.stats.num_cached_tokens
        assert cached >= 28
        engine.update_weights_from_disk(str(second))
        assert check_texts(engine, rescorer, prompt) != before
        assert engine.stats.num_cached_tokens == 2 * cached  # nothing of the old weights' pages
