"""A family with latents, delta nets and windows in an ordinary Engine, from its files on.

Its text is plain decoding's, by rescoring, also after a cached prefix.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jspec.cli.diagnosis.texts import make_texts
from jspec.engine.rescorer import Rescorer
from jspec.models import registry
from jspec.models.family import Family
from jspec.models.files.checkpoint import save_target
from jspec.serving.engine import Engine
from jspec.spec.model_spec import ModelSpec
from tests.speculative.family_targets import drawn
from tests.speculative.mixer_targets import MIXER_TARGETS
from tests.support.tiny_models import tiny_tokenizer

SPEC = dataclasses.replace(MIXER_TARGETS["all_kinds"], family="tiny_kinds")


def to_json(spec: ModelSpec) -> dict[str, Any]:
    return {"architectures": ["TinyKindsForCausalLM"], "vocab_size": spec.vocab_size}


FAMILY = Family(
    name="tiny_kinds",
    architectures=("TinyKindsForCausalLM",),
    read=lambda _: SPEC,
    to_json=to_json,
)


@pytest.mark.slow
def test_an_engine_serves_every_kind_of_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "FAMILIES", [*registry.FAMILIES, FAMILY])
    save_target(tmp_path, SPEC, drawn(SPEC), dtype=np.float32)
    tiny_tokenizer().save(str(tmp_path / "tokenizer.json"))
    with Engine(
        str(tmp_path),
        speculative_algorithm="NGRAM",
        max_running_requests=1,
        page_size=4,
        chunked_prefill_size=16,
        disable_logprobs=True,
        compilation_cache_dir="",
    ) as engine:
        prompt, cached = "one two one two one two one two one", []
        for _ in range(2):
            request = engine.requests(
                prompt=prompt,
                sampling_params={"temperature": 0, "max_new_tokens": 24, "ignore_eos": True},
            )[0]
            (text,) = make_texts(engine, [request])
            scores = Rescorer(engine.served, most_tokens=80).score(request, text.ids, first_chunk=5)
            assert scores.num_differences == 0
            cached.append(engine.stats.num_cached_tokens)
            prompt += " two two"
        assert cached == [0, 32]
