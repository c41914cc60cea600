"""Every family but Llama, against transformers.

tests/golden/make_families_golden.py wrote the checkpoints; 24 tokens, windows of 8.
"""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jspec.layers.attention import Attend
from jspec.models.decoder import Decoder
from jspec.models.files.checkpoint import load_model_spec, load_target, save_target
from jspec.models.layer import Params
from jspec.models.registry import FAMILIES
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.bundles import OPS
from jspec.pallas_kernels.kv_write.api import Rotation
from jspec.pallas_kernels.kv_write.reference import rotate_and_split
from jspec.spec.layers.attention import AttentionSpec
from jspec.spec.model_spec import ModelSpec, cache_groups
from tests.models.random_params import assert_same
from tests.support.caches import accept_chain, empty_pools
from tests.support.golden_arrays import arrays_of

pytestmark = pytest.mark.law

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
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "deepseek_v2",
    "deepseek_v3",
    "kimi_k2",
    "glm4_moe_lite",
    "deepseek_v32",
    "glm_moe_dsa",
    "minimax_m2",
    "mistral4",
    "ministral3",
    "gemma4",
    "gemma4_moe",
    "gemma4_unified",
]
PAGE, FIRST_CHUNK, QUERIES = 4, 12, 4


@cache
def loaded(variant: str) -> tuple[ModelSpec, Params]:
    """Return the spec, and the params on the device."""
    spec = load_model_spec(GOLDEN / variant)
    params = load_target(GOLDEN / variant, spec, dtype=np.float32)
    return spec, jax.tree.map(jnp.asarray, params)


def attend_of(spec: AttentionSpec) -> Attend:
    """Return dense causal attention of one layer, with its window and sinks."""

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
    """Compare with the golden outputs; aux has the input of every layer."""
    golden = arrays_of(GOLDEN / variant / "outputs.npz")
    *inputs, last = golden["hidden_states"]  # the last one is after the final norm
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    for i, (mine, expected) in enumerate(
        zip(np.split(np.asarray(aux), len(inputs), axis=-1), inputs, strict=True)
    ):
        close(mine, expected, err_msg=f"the input of layer {i}")
    close(hidden, last)
    close(logits, golden["logits"])


def unread(cache: jax.Array) -> jax.Array:
    """Fill a cache with what no row has written: NaN, or accepted tokens of another row."""
    return jnp.full_like(cache, 1 if cache.dtype == jnp.int32 else jnp.nan)


@pytest.mark.slow_cases(
    *("qwen2-xla", "qwen3_5-xla", "glm4_moe_lite-xla", "deepseek_v2", "mistral-xla"),
    *("deepseek_v32-xla", "gpt_oss-reference"),
)
# In CI test_two_shards.py compares the first ones in chunks as well; the others differ from one of
# their family in sizes.
@pytest.mark.exhaustive_cases(
    *("qwen3_moe-xla", "step3p5-xla", "glm4_moe-xla", "minimax_m2-xla", "gemma4-xla"),
    *("qwen3_moe_mixed-xla", "qwen3_5_moe-xla", "kimi_k2-xla", "gemma4_unified-xla"),
    *("ministral3-xla", "mimo_v2-reference"),
)
@pytest.mark.parametrize(
    ("variant", "ops"),
    [
        *((name, "xla") for name in VARIANTS if "fused" not in name),
        ("gpt_oss", "reference"),
        ("mimo_v2", "reference"),
    ],
)
def test_chunks_over_pages_equal_transformers(variant: str, ops: str) -> None:
    """A chunk of the prompt, then a few tokens at a time, as in a verification."""
    spec, params = loaded(variant)
    token_ids = arrays_of(GOLDEN / variant / "outputs.npz")["token_ids"]
    assert max(layer.attention.window or 0 for layer in spec.layers) < FIRST_CHUNK
    decoder = Decoder(spec, OPS[ops], aux_layer_ids=tuple(range(spec.num_layers)))
    pools = empty_pools(
        cache_groups(spec, name="target"),
        num_pages=8,
        page_size=PAGE,
        shards=1,
        dtype=jnp.float32,
        ops=OPS[ops],
        num_nodes=QUERIES,
    )
    kv = jax.tree.map(unread, pools)
    slots = jnp.asarray([5], jnp.int32)
    step = jax.jit(decoder.forward, static_argnames="queries_per_row")
    starts = [0, *range(FIRST_CHUNK, len(token_ids), QUERIES)]
    found = []
    for start, stop in zip(starts, [*starts[1:], len(token_ids)], strict=True):
        rows = AttentionMetadata(
            page_table=jnp.asarray([[3, 1, 6, 2, 7, 5]], jnp.int32),
            prefix_lens=jnp.asarray([start], jnp.int32),
            cu_q_lens=jnp.asarray([0, stop - start], jnp.int32),
            q_positions=jnp.arange(start, stop, dtype=jnp.int32),
            slots=slots,
        )
        ids = jnp.asarray(token_ids[start:stop], jnp.int32)
        with jax.default_matmul_precision("highest"):
            hidden, aux, kv = step(
                params, ids, kv, rows, queries_per_row=QUERIES if start else None
            )
            found.append((decoder.logits(params, hidden), hidden, aux))
        if start:
            kv = accept_chain(kv, slots, stop - start, ops=OPS[ops])
    assert_equals_transformers(
        variant, *(np.concatenate(parts) for parts in zip(*found, strict=True))
    )


def test_long_chunks_of_several_rows_choose_what_transformers_chose() -> None:
    """Several blocks of 64 tokens of a delta net, in a row and after one."""
    spec, params = loaded("qwen3_next")
    golden = json.loads((GOLDEN / "qwen3_next" / "greedy.json").read_text())
    text, first = [*golden["prompt"], *golden["ids"]], len(golden["prompt"])
    decoder, lens = Decoder(spec, OPS["xla"]), (70, len(text), 3)
    pools = empty_pools(
        decoder.cache_groups,
        num_pages=52,
        page_size=16,
        shards=1,
        dtype=jnp.float32,
        ops=OPS["xla"],
    )
    ids = [token for length in lens for token in text[:length]]
    rows = AttentionMetadata(
        page_table=jnp.arange(1, 52, dtype=jnp.int32).reshape(3, 17),
        prefix_lens=jnp.zeros(3, jnp.int32),
        cu_q_lens=jnp.asarray(np.cumsum([0, *lens]), jnp.int32),
        q_positions=jnp.concatenate([jnp.arange(length, dtype=jnp.int32) for length in lens]),
        slots=jnp.asarray([7, 3, 5], jnp.int32),
    )
    step = jax.jit(partial(decoder.forward, queries_per_row=None))
    with jax.default_matmul_precision("highest"):
        hidden, _, _ = step(params, jnp.asarray(ids, jnp.int32), jax.tree.map(unread, pools), rows)
        best = np.asarray(decoder.logits(params, hidden)).argmax(-1)
    ends = np.cumsum(lens)
    for end, length in zip(ends, lens, strict=True):
        said = best[end - length : end]
        assert said[first - 1 : -1].tolist() == text[first:length]


@pytest.mark.parametrize("variant", VARIANTS)
def test_save_then_load_is_exact(variant: str, tmp_path: Path) -> None:
    """Experts are stored one by one."""
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


def test_inside_of_a_model_that_reads_images_is_the_same_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its checkpoint is laid out as for published Qwen3.5 MoEs: fused experts, nested names."""
    config = json.loads((GOLDEN / "qwen3_5_moe" / "config.json").read_text())
    tensors = dict(load_file(GOLDEN / "qwen3_5_moe" / "model.safetensors"))
    for layer in range(2):
        place = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            np.stack([tensors.pop(f"{place}{e}.{part}_proj.weight") for e in range(6)])
            for part in ("gate", "up", "down")
        )
        tensors[f"{place}gate_up_proj"] = np.concatenate((gate, up), axis=1)
        tensors[f"{place}down_proj"] = down
    tensors = {name.replace("model.", "model.language_model."): x for name, x in tensors.items()}
    save_file(
        {**tensors, "model.visual.patch_embed.proj.bias": np.zeros(3, np.float32)},
        tmp_path / "model.safetensors",
    )
    architecture = {"architectures": ["Qwen3_5MoeForConditionalGeneration"]}
    whole = architecture | {"text_config": config, "vision_config": {"depth": 1}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    spec, params = loaded("qwen3_5_moe")
    assert load_model_spec(tmp_path) == spec
    with caplog.at_level("INFO", "jspec"):
        assert_same(load_target(tmp_path, spec, dtype=np.float32), params)
    assert "1 tensors of model.visual. are not read: only text is served" in caplog.text


def test_every_family_is_tested() -> None:
    elsewhere = {"llama", "mimo"}  # test_hf_llama.py, test_mtp_families.py
    served = {family.name for family in FAMILIES} - elsewhere
    assert {loaded(variant)[0].family for variant in VARIANTS} == served
