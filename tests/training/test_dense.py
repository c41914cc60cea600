"""The teacher's forward for every family, against transformers."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.models.files.checkpoint import load_model_spec, load_target
from jspec.training.dense import causal_attend, forward, lm_logits
from tests.models.family_checkpoints import checkpoint_of
from tests.support.golden_arrays import arrays_of

# gpt_oss has windows, sinks and an MoE; the others heads of two sizes, gates, a shared expert, and
# latents.
SLOW = ("gpt_oss", "step3p5", "deepseek_v3")
REPETITIONS = (
    *("mimo_v2", "glm4_moe", "glm4_moe_lite", "deepseek_v2", "kimi_k2", "minimax_m2"),
    *(
        "mistral",
        "ministral3",
        "mistral4",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "qwen3_moe_mixed",
        "mimo",
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant",
    [*SLOW, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in REPETITIONS)],
)
def test_the_teacher_equals_transformers(variant: str, tmp_path: Path) -> None:
    path = checkpoint_of(variant, tmp_path)
    spec = load_model_spec(path)
    host = load_target(path, spec, dtype=np.float32)
    golden = arrays_of(path / "outputs.npz")
    ids = np.stack([golden["token_ids"], np.roll(golden["token_ids"], 5)])
    params = jax.tree.map(jnp.asarray, host)
    with jax.default_matmul_precision("highest"):
        hidden, aux = forward(
            spec,
            params,
            jnp.asarray(ids, jnp.int32),
            dtype=jnp.float32,
            attend=causal_attend("xla"),
            aux_layer_ids=(0, spec.num_layers - 1),
        )
        logits = lm_logits(params, hidden)
    assert aux.shape == (2, len(golden["token_ids"]), 2 * spec.hidden_size)
    *inputs, last = golden["hidden_states"]
    expected = np.concatenate((inputs[0], inputs[-1]), axis=-1)
    np.testing.assert_allclose(aux[0], expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(hidden[0], last, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(logits[0], golden["logits"], rtol=1e-4, atol=1e-4)
