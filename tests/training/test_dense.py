"""The forward that teaches, of every family: its windows, sinks and mixtures, against transformers.

tests/golden/make_families_golden.py wrote the checkpoints; 24 tokens, windows of 8.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.models.checkpoint import load_model_spec, load_target
from jspec.training.dense import causal_attend, forward, lm_logits
from tests.golden_arrays import arrays_of

GOLDEN = Path(__file__).parents[1] / "golden" / "families"
SLOW = ("qwen2", "qwen3", "qwen3_moe_mixed")  # gpt_oss has windows, sinks and a mixture


@pytest.mark.parametrize(
    "variant",
    [
        *("gpt_oss", "mistral", "qwen3_moe"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW),
    ],
)
def test_the_teacher_equals_transformers(variant: str) -> None:
    spec = load_model_spec(GOLDEN / variant)
    host = load_target(GOLDEN / variant, spec, dtype=np.float32)
    golden = arrays_of(GOLDEN / variant / "outputs.npz")
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
