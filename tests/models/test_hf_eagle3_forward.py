"""jspec's EAGLE-3 head against two independent ones: numpy float64, and speculators' torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jspec.core.config import RopeConfig
from jspec.core.model_spec import Eagle3Config, uniform_decoder
from jspec.layers.attention import causal_attention
from jspec.layers.embedding import embed
from jspec.models.decoder import LayerSettings, Params
from jspec.models.eagle3 import Eagle3Head, eagle3_params, run_head_layer
from jspec.models.eagle3_config import load_eagle3_config
from jspec.models.hf_eagle3 import load_eagle3, save_eagle3
from jspec.models.placement import abstract_params
from jspec.pallas_kernels.ops import Ops
from tests.models.eagle3_reference import Eagle3Reference

GOLDEN = Path(__file__).parents[1] / "golden" / "eagle3"
TARGET = uniform_decoder(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_layers=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
)
Run = Callable[[Any, Any], tuple[jax.Array, jax.Array]]


def dense_head(config: Eagle3Config, params: Params) -> Run:
    """(tokens[B, T], hidden[B, T, E]) -> (h2, logits) of every row, positions 0..T-1."""

    @jax.jit
    def run(params: Params, tokens: jax.Array, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        h2 = run_head_layer(
            params["layer"],
            embed(params["embed"], tokens),
            hidden,
            jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape),
            causal_attention,
            config=config,
            settings=LayerSettings(Ops()),
        )
        return h2, Eagle3Head(config, Ops()).logits(params, h2)

    def call(tokens: Any, hidden: Any) -> tuple[jax.Array, jax.Array]:
        with jax.default_matmul_precision("highest"):
            h2, logits = run(params, jnp.asarray(tokens), jnp.asarray(hidden, jnp.float32))
        return h2, logits

    return call


def reference(path: Path, config: Eagle3Config, *, layer: str) -> Eagle3Reference:
    return Eagle3Reference(
        tensors=load_file(path / "model.safetensors"),
        layer=layer,
        head_dim=config.layer.one_layer.attention.head_dim,
        eps=config.layer.rms_norm_eps,
        theta=config.layer.one_layer.attention.rope.theta,
        norm_before_residual=config.norm_before_residual,
    )


def random_head(*, norm_before_residual: bool) -> tuple[Eagle3Config, Params]:
    layer = uniform_decoder(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=40,
        num_layers=1,
        num_heads=6,
        num_kv_heads=3,
        head_dim=8,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=3000.0),
    )
    config = Eagle3Config(
        layer=layer,
        draft_vocab_size=24,
        target_hidden_size=32,
        aux_layer_ids=(0, 2, 4, 8),
        norm_before_residual=norm_before_residual,
    )
    rng = np.random.default_rng(7)
    params: Params = jax.tree.map(
        lambda leaf: (rng.standard_normal(leaf.shape) / 5).astype(leaf.dtype),
        abstract_params(eagle3_params(config), dtype=np.float32),
    )
    params["draft_ids"] = np.sort(rng.choice(96, 24, replace=False)).astype(np.int32)
    for scale in (params["norm"], *(params["layer"][n] for n in ("input_norm", "hidden_norm"))):
        scale["scale"] = rng.uniform(0.5, 1.5, 32).astype(np.float32)
    return config, params


@pytest.mark.parametrize("variant", ["plain", "norm_before_residual"])
def test_every_chain_row_equals_speculators(variant: str) -> None:
    config = load_eagle3_config(GOLDEN / variant, target=TARGET)
    params = load_eagle3(GOLDEN / variant, config, target_params={}, dtype=np.float32)
    golden = np.load(GOLDEN / variant / "outputs.npz")
    num_steps, num_rows = golden["logits"].shape[:2]
    run = dense_head(config, params)
    # chain b: the true features of rows 0..b, then the head's own output, one row a step
    chains = np.arange(num_rows - num_steps + 1)
    tokens = np.tile(golden["token_ids"], (len(chains), 1))
    features = np.asarray(golden["aux_hidden"] @ params["fc"]["kernel"])
    hidden = np.tile(features, (len(chains), 1, 1))
    for step in range(num_steps):
        h2, logits = (np.asarray(out)[chains, chains + step] for out in run(tokens, hidden))
        np.testing.assert_allclose(h2, golden["hidden"][step, chains], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(logits, golden["logits"][step, chains], rtol=1e-5, atol=1e-5)
        if step + 1 < num_steps:
            hidden[chains, chains + step + 1] = h2


@pytest.mark.parametrize("variant", ["plain", "norm_before_residual"])
def test_the_numpy_reference_equals_speculators_too(variant: str) -> None:
    config = load_eagle3_config(GOLDEN / variant, target=TARGET)
    golden = np.load(GOLDEN / variant / "outputs.npz")
    head = reference(GOLDEN / variant, config, layer="layers.0.")
    h2 = head.run(list(golden["token_ids"]), head.fuse(golden["aux_hidden"]))
    np.testing.assert_allclose(h2, golden["hidden"][0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(head.logits(h2), golden["logits"][0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm_before_residual", [False, True])
@pytest.mark.parametrize("layer", ["midlayer.", "layers.0."])
def test_prefill_and_chain_equal_the_numpy_reference(
    layer: str, norm_before_residual: bool, tmp_path: Path
) -> None:
    config, params = random_head(norm_before_residual=norm_before_residual)
    save_eagle3(tmp_path, config, params, dtype=np.float32, include_embed=True)
    stored = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("midlayer.", layer): value for name, value in stored.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    loaded = load_eagle3(tmp_path, config, target_params={}, dtype=np.float32)
    run = dense_head(config, loaded)
    expected = reference(tmp_path, config, layer=layer)

    rng = np.random.default_rng(1)
    num_rows, num_steps = 12, 4
    prompt = [int(token) for token in rng.integers(0, 96, num_rows)]
    aux_hidden = rng.standard_normal((num_rows, 4 * 32))
    drafts, chosen_from = expected.chain(prompt, aux_hidden, num_steps=num_steps)

    # the rows behind the chain are padding that causal attention never shows to it
    tokens = np.zeros((1, num_rows + num_steps), np.int32)
    hidden = np.zeros((1, num_rows + num_steps, 32), np.float32)
    tokens[0, :num_rows] = prompt
    hidden[0, :num_rows] = aux_hidden @ loaded["fc"]["kernel"]
    h2, logits = run(tokens, hidden)
    np.testing.assert_allclose(
        h2[0, :num_rows], expected.run(prompt, expected.fuse(aux_hidden)), rtol=1e-5, atol=1e-5
    )
    for step in range(num_steps):
        row = num_rows - 1 + step
        np.testing.assert_allclose(logits[0, row], chosen_from[step], rtol=1e-5, atol=1e-5)
        draft_id = int(loaded["draft_ids"][int(jnp.argmax(logits[0, row]))])
        assert draft_id == drafts[step]
        tokens[0, row + 1], hidden[0, row + 1] = draft_id, h2[0, row]
        h2, logits = run(tokens, hidden)
