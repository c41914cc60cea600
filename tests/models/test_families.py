"""Every family beside Llama: the arithmetic of transformers.

tests/golden/make_families_golden.py wrote the checkpoints; 24 tokens, windows of 8.
"""

from __future__ import annotations

import dataclasses
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jspec.layers.attention import Attend
from jspec.models.decoder import Decoder, Params
from jspec.models.files.checkpoint import load_model_spec, load_target, save_target
from jspec.models.registry import FAMILIES
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.bundles import OPS
from jspec.pallas_kernels.kv_write.api import Rotation
from jspec.pallas_kernels.kv_write.reference import rotate_and_split
from jspec.spec.model_spec import (
    AttentionSpec,
    ModelSpec,
    cache_groups,
)
from tests.models.dense_forward import dense_forward
from tests.models.random_params import assert_same
from tests.support.caches import empty_pools
from tests.support.golden_arrays import arrays_of

GOLDEN = Path(__file__).parents[1] / "golden" / "families"
VARIANTS = [
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_moe_fused",
    "qwen3_moe_mixed",
    "mistral",
    "gpt_oss",
    "step3p5",
    "glm4_moe",
    "mimo_v2",
]
SLOW, LATER = pytest.mark.slow, ("step3p5", "glm4_moe", "mimo_v2")
PAGE, FIRST_CHUNK, QUERIES = 4, 12, 4


@cache
def loaded(variant: str) -> tuple[ModelSpec, Params]:
    """The spec, and the params on the device."""
    spec = load_model_spec(GOLDEN / variant)
    params = load_target(GOLDEN / variant, spec, dtype=np.float32)
    return spec, jax.tree.map(jnp.asarray, params)


def attend_of(spec: AttentionSpec) -> Attend:
    """Dense causal attention of one layer: its window a mask, its sinks one more column."""

    def attend(heads: jax.Array, rotation: Rotation, sinks: jax.Array | None) -> jax.Array:
        assert (sinks is not None) == spec.sinks
        q, k, v = rotate_and_split(heads, rotation)
        length = q.shape[1]
        after = np.arange(length)[:, None] - np.arange(length)[None, :]
        visible = (after >= 0) & (after < (spec.window or length))
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        scores = jnp.einsum("bthd,bshd->bhts", q, k) * spec.head_dim**-0.5
        scores = jnp.where(visible, scores, -jnp.inf)
        if sinks is not None:
            column = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
            scores = jnp.concatenate((scores, column), axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)[..., :length]
        return jnp.einsum("bhts,bshd->bthd", weights, v)

    return attend


def assert_equals_transformers(variant: str, logits: Any, hidden: Any, aux: Any) -> None:
    """aux holds the input of every layer, first to last."""
    golden = arrays_of(GOLDEN / variant / "outputs.npz")
    *inputs, last = golden["hidden_states"]  # the last one is after the final norm
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    for i, (mine, expected) in enumerate(
        zip(np.split(np.asarray(aux), len(inputs), axis=-1), inputs, strict=True)
    ):
        close(mine, expected, err_msg=f"the input of layer {i}")
    close(hidden, last)
    close(logits, golden["logits"])


@pytest.mark.parametrize("variant", [*VARIANTS[:-1], pytest.param(VARIANTS[-1], marks=SLOW)])
def test_the_dense_forward_equals_transformers(variant: str) -> None:
    spec, params = loaded(variant)
    token_ids = arrays_of(GOLDEN / variant / "outputs.npz")["token_ids"]
    outputs = dense_forward(
        spec,
        params,
        token_ids,
        aux_layer_ids=tuple(range(spec.num_layers)),
        attend_of=attend_of,
    )
    assert_equals_transformers(variant, *outputs)


@SLOW
def test_step_writes_what_transformers_writes() -> None:
    """200 ids, each the best one after all before it, far beyond the windows."""
    spec, params = loaded("step3p5")
    ids = arrays_of(GOLDEN / "step3p5" / "outputs.npz")["greedy"]
    logits, _, _ = dense_forward(spec, params, ids[:-1], aux_layer_ids=(), attend_of=attend_of)
    assert np.asarray(logits).argmax(axis=-1).tolist() == ids[1:].tolist()
    assert len(ids) == 201


def attend_to_all(spec: AttentionSpec) -> Attend:
    return attend_of(dataclasses.replace(spec, window=None))


@pytest.mark.parametrize(
    "variant",
    ["qwen2", "mistral", "gpt_oss", *(pytest.param(x, marks=SLOW) for x in ("step3p5", "mimo_v2"))],
)
def test_the_texts_are_longer_than_the_windows(variant: str) -> None:
    """So that a window left out is seen, from the ninth token on."""
    spec, params = loaded(variant)
    golden = arrays_of(GOLDEN / variant / "outputs.npz")
    ids = golden["token_ids"]
    logits, _, _ = dense_forward(spec, params, ids, aux_layer_ids=(), attend_of=attend_to_all)
    apart = np.abs(np.asarray(logits) - golden["logits"]).max(axis=-1)
    assert apart[:8].max() < 1e-4
    assert apart[8:].min() > 1e-3


@pytest.mark.slow_cases(
    "glm4_moe-xla",
    "qwen2-reference]",
    "qwen2-xla",
    "qwen3-reference]",
    "qwen3_moe-reference]",
    "qwen3_moe-xla",
    "qwen3_moe_mixed-reference]",
    "qwen3_moe_mixed-xla",
)
@pytest.mark.parametrize(
    ("variant", "ops"),
    [
        pytest.param(name, ops, marks=SLOW if ops == "reference" and name in LATER else ())
        for name in VARIANTS
        for ops in ("reference", "xla")
        if "fused" not in name
    ],
)
def test_chunks_over_pages_equal_transformers(variant: str, ops: str) -> None:
    """A prompt's chunk, then a few tokens at a time, as a verification has them."""
    spec, params = loaded(variant)
    token_ids = arrays_of(GOLDEN / variant / "outputs.npz")["token_ids"]
    decoder = Decoder(spec, OPS[ops], aux_layer_ids=tuple(range(spec.num_layers)))
    pools = empty_pools(
        cache_groups(spec, name="target"),
        num_pages=8,
        page_size=PAGE,
        shards=1,
        dtype=jnp.float32,
        ops=OPS[ops],
    )
    kv = tuple(jnp.full_like(pages, jnp.nan) for pages in pools)  # none of it may be read
    step = jax.jit(decoder.forward, static_argnames="queries_per_row")
    starts = [0, *range(FIRST_CHUNK, len(token_ids), QUERIES)]
    found = []
    for start, stop in zip(starts, [*starts[1:], len(token_ids)], strict=True):
        rows = AttentionMetadata(
            page_table=jnp.asarray([[3, 1, 6, 2, 7, 5]], jnp.int32),
            prefix_lens=jnp.asarray([start], jnp.int32),
            cu_q_lens=jnp.asarray([0, stop - start], jnp.int32),
            q_positions=jnp.arange(start, stop, dtype=jnp.int32),
        )
        ids = jnp.asarray(token_ids[start:stop], jnp.int32)
        with jax.default_matmul_precision("highest"):
            hidden, aux, kv = step(
                params, ids, kv, rows, queries_per_row=QUERIES if start else None
            )
            found.append((decoder.logits(params, hidden), hidden, aux))
    assert_equals_transformers(
        variant, *(np.concatenate(parts) for parts in zip(*found, strict=True))
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_save_then_load_is_exact(variant: str, tmp_path: Path) -> None:
    """And load then save keeps every tensor, but that experts are stored one by one."""
    spec, params = loaded(variant)
    save_target(tmp_path, spec, params, dtype=np.float32)
    assert load_model_spec(tmp_path) == spec
    host = jax.tree.map(np.asarray, params)
    assert_same(load_target(tmp_path, spec, dtype=np.float32), host)
    found = load_file(tmp_path / "model.safetensors")
    stored = load_file(GOLDEN / variant.removesuffix("_fused") / "model.safetensors")
    assert found.keys() == stored.keys()
    for name, value in stored.items():
        np.testing.assert_array_equal(found[name], value, strict=True)


def test_fused_experts_are_the_same_model() -> None:
    (spec, params), (fused_spec, fused) = (loaded(f"qwen3_moe{end}") for end in ("", "_fused"))
    assert fused_spec == spec
    assert_same(fused, params)


def test_every_family_is_tested() -> None:
    elsewhere = {"llama", "mimo"}  # test_hf_llama.py, test_mtp_families.py
    served = {family.name for family in FAMILIES} - elsewhere
    assert {loaded(variant)[0].family for variant in VARIANTS} == served
