"""Gemma 4's assistants against transformers, and in an engine beside their target.

tests/golden/make_assistants_golden.py wrote the checkpoints and the logits of greedy chains.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jspec
from jspec.config.drafting import Algorithm
from jspec.errors import JspecError
from jspec.files.json_files import read_fields
from jspec.models.decoder import Decoder
from jspec.models.files.checkpoint import load_model_spec, load_target
from jspec.models.files.stored.param_reads import on_host
from jspec.models.heads.assistant import (
    Assistant,
    check_assistant,
    load_assistant,
    load_assistant_config,
)
from jspec.models.registry import draft_algorithm
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.bundles import OPS
from jspec.spec.assistant_spec import AssistantSpec
from tests.support.caches import empty_pools
from tests.support.golden_arrays import arrays_of

GOLDEN = Path(__file__).parents[1] / "golden"
TARGET, FOLDERS = GOLDEN / "families" / "gemma4", GOLDEN / "assistants"
VARIANTS = ("gemma4", "gemma4_ordered")
PAGE = 4


def loaded_from(path: Path, spec: AssistantSpec, target_params: Any) -> Any:
    return load_assistant(
        path,
        spec,
        target_params=target_params,
        dtype=np.float32,
        place=on_host,
        shards=1,
        formats=(),
    )


def loaded(variant: str) -> tuple[Decoder, Assistant, Any, Any]:
    spec = load_model_spec(TARGET)
    decoder = Decoder(spec, OPS["xla"])
    params = load_target(TARGET, spec, dtype=np.float32)
    own = load_assistant_config(FOLDERS / variant, target=spec)
    draft = loaded_from(FOLDERS / variant, own, params)
    on_device = jax.tree.map(jnp.asarray, (params, draft))
    return decoder, Assistant(own, OPS["xla"]), *on_device


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_greedy_chain_is_that_of_transformers(variant: str) -> None:
    decoder, model, params, draft = loaded(variant)
    golden = arrays_of(FOLDERS / variant / "outputs.npz")
    ids = jnp.asarray(arrays_of(TARGET / "outputs.npz")["token_ids"], jnp.int32)
    pools = empty_pools(
        decoder.cache_groups,
        num_pages=7,
        page_size=PAGE,
        shards=1,
        dtype=jnp.float32,
        ops=OPS["xla"],
    )
    table = jnp.asarray([[3, 1, 6, 2, 4, 5]], jnp.int32)
    run = jax.jit(decoder.forward, static_argnames="queries_per_row")
    step = jax.jit(model.forward)
    for length, expected in zip(golden["lengths"].tolist(), golden["logits"], strict=True):
        positions = jnp.arange(length, dtype=jnp.int32)
        rows = AttentionMetadata(
            page_table=table,
            prefix_lens=jnp.zeros(1, jnp.int32),
            cu_q_lens=jnp.asarray([0, length], jnp.int32),
            q_positions=positions,
        )
        with jax.default_matmul_precision("highest"):
            hidden, _, kv = run(params, ids[:length], pools, rows, queries_per_row=None)
            token, given = ids[length][None], hidden[-1:]
            last = AttentionMetadata(
                page_table=table,
                prefix_lens=jnp.asarray([length - 1], jnp.int32),
                cu_q_lens=jnp.asarray([0, 1], jnp.int32),
                q_positions=jnp.asarray([length], jnp.int32),
            )
            for level in expected:
                out, given = step(draft, token, given, kv, last)
                logits = np.asarray(model.logits(draft, out)[0])
                scored = np.isfinite(logits)
                np.testing.assert_allclose(logits[scored], level[scored], rtol=1e-4, atol=1e-4)
                assert (level[~scored] == level.min()).all()
                assert scored.sum() == (16 if model.spec.num_groups else 48)
                token = jnp.asarray([logits.argmax()], jnp.int32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "shape", "algorithm", "shards"),
    [
        ("gemma4_ordered", (3, 1, 4), "NEXTN", 2),
        pytest.param("gemma4", (3, 3, 10), "FROZEN_KV_MTP", 1, marks=pytest.mark.exhaustive),
    ],
)
def test_an_engine_says_what_transformers_said(
    variant: str, shape: tuple[int, int, int], algorithm: str, shards: int
) -> None:
    golden = json.loads((TARGET / "greedy.json").read_text())
    steps, topk, nodes = shape
    engine = jspec.Engine(
        str(TARGET),
        dtype="float32",
        tp_size=shards,
        skip_tokenizer_init=True,
        max_running_requests=1,
        chunked_prefill_size=16,
        disable_logprobs=True,
        compilation_cache_dir="",
        speculative_algorithm=algorithm,
        speculative_draft_model_path=str(FOLDERS / variant),
        speculative_num_steps=steps,
        speculative_eagle_topk=topk,
        speculative_num_draft_tokens=nodes,
    )
    sampling = {"temperature": 0, "max_new_tokens": 120, "ignore_eos": True}
    with engine:
        assert engine.served.models.drafter.algorithm == Algorithm.FROZEN_KV_MTP
        said = engine.generate(input_ids=golden["prompt"], sampling_params=sampling)
    assert said["output_ids"] == golden["ids"][:120]


def changed(path: Path, changes: dict[str, Any], text: dict[str, Any]) -> Path:
    shutil.copytree(FOLDERS / "gemma4_ordered", path)
    config = json.loads((path / "config.json").read_text()) | changes
    config["text_config"] |= text
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("changes", "text", "message"),
    [
        ({"backbone_hidden_size": 32}, {}, r"are \(48, 32\); expected the target's \(48, 24\)"),
        ({}, {"vocab_size": 40}, r"are \(40, 24\); expected the target's"),
        ({}, {"enable_moe_block": True}, "enable_moe_block is True; expected False"),
        ({}, {"num_kv_shared_layers": 2}, "num_kv_shared_layers is 2; expected 0 or 3"),
        (
            {},
            {"sliding_window": 9},
            r"head_dim and window of a layer are \(8, 9\); expected \(8, 8\)",
        ),
        (
            {},
            {"per_layer_config": {}},
            r"are \(8, None\); expected \(12, None\), those of the targ",
        ),
        (
            {"num_centroids": 7},
            {},
            "num_centroids is 7 and centroid_intermediate_top_k 2; expected",
        ),
    ],
)
def test_what_does_not_fit_the_target_is_refused(
    changes: dict[str, Any], text: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = changed(tmp_path / "draft", changes, text)
    with pytest.raises(JspecError, match=message):
        load_assistant_config(path, target=load_model_spec(TARGET))


def test_a_file_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = changed(tmp_path / "draft", {}, {})
    target = load_model_spec(TARGET)
    spec = load_assistant_config(path, target=target)
    check_assistant(path, spec)
    assert draft_algorithm(read_fields(path / "config.json")) == "FROZEN_KV_MTP"
    stored = load_file(path / "model.safetensors")
    order = "masked_embedding.token_ordering"
    save_file({name: x for name, x in stored.items() if name != order}, path / "model.safetensors")
    with pytest.raises(JspecError, match=f"{order} is absent; expected shape"):
        check_assistant(path, spec)
    save_file(stored | {order: stored[order] * 0}, path / "model.safetensors")
    with pytest.raises(JspecError, match="is no order of the 48 tokens; expected each once"):
        loaded_from(path, spec, {"embed": {}})
