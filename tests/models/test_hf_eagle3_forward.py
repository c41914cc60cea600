"""jspec's EAGLE-3 head against two independent ones: numpy float64, and speculators' torch.

Every published layout and variant is written to disk under its own names, read by the loader, and
run over pages. Each case joins several variants that do not affect each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jspec.errors import CheckpointError
from jspec.models.heads.eagle3 import load_eagle3, save_eagle3
from jspec.models.heads.eagle3_config import load_eagle3_config
from jspec.models.heads.feature_head import FeatureHead
from jspec.models.heads.head_params import head_params
from jspec.models.layer import Params
from jspec.models.placement import abstract_params
from jspec.pallas_kernels.ops import Ops
from jspec.spec.head_spec import FeatureNorm, HeadSpec, eagle3_spec
from jspec.spec.layers.feed_forward import DenseSpec
from jspec.spec.model_spec import ModelSpec, uniform_decoder
from jspec.spec.rope import RopeConfig
from tests.models.eagle3_reference import Eagle3Reference
from tests.models.head_laws import PagedHead, check_head
from tests.support.golden_arrays import arrays_of

GOLDEN = Path(__file__).parents[1] / "golden" / "eagle3"
OF_SPECULATORS = ("plain", "norm_before_residual", "norm_before_fc", "fc_norm", "qwen3_layers")
OF_ITS_ROPE = ("llama3_rope", "yarn_rope")  # five steps; the last over the whole vocabulary
# The reference's setting for each golden head.
SETTINGS: dict[str, dict[str, Any]] = {
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"normed": "whole"},
    "fc_norm": {"normed": "each", "feeds_back_normed": True},
    "qwen3_layers": {"normed": "each", "norm_before_residual": True, "num_layers": 2},
}
SIZE = 16


def golden_target(size: int) -> ModelSpec:
    return uniform_decoder(
        vocab_size=96,
        hidden_size=size,
        intermediate_size=48,
        num_layers=8,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
    )


def golden_head(name: str) -> tuple[HeadSpec, Params, Any]:
    golden = arrays_of(GOLDEN / name / "outputs.npz")
    config = load_eagle3_config(
        GOLDEN / name, target=golden_target(golden["aux_hidden"].shape[1] // 3)
    )
    params = load_eagle3(GOLDEN / name, config, target_params={}, dtype=np.float32)
    return config, params, golden


@pytest.mark.slow_cases("norm_before_fc", "plain")
@pytest.mark.parametrize("name", [*OF_SPECULATORS, *OF_ITS_ROPE])
def test_every_chain_row_equals_speculators(name: str) -> None:
    """Step s of row t is the s-th draft forward after a prompt of t + 1 rows."""
    config, params, golden = golden_head(name)
    num_steps, num_rows = golden["logits"].shape[:2]
    paged = PagedHead(FeatureHead(config, Ops()), params, num_rows=num_rows + 1)
    tokens = golden["token_ids"]
    fused = paged.fuse(golden["aux_hidden"])

    def check(carried: Any, logits: Any, step: int, rows: Any) -> None:
        expected = golden["hidden"][step, rows]
        if config.feeds_back_normed:  # recorded in front of the norm
            scale = np.asarray(params["norm"]["scale"])
            mean = np.square(expected).mean(-1, keepdims=True)
            expected = expected / np.sqrt(mean + config.layer.rms_norm_eps) * scale
        np.testing.assert_allclose(carried, expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(logits, golden["logits"][step, rows], rtol=1e-5, atol=1e-5)

    for last in (0, 7, num_rows - num_steps):
        kv, carried, logits = paged.run(
            paged.empty(), tokens, fused, start=0, count=last + 1, is_prompt=True
        )
        check(carried, logits, 0, slice(last + 1))
        for step in range(1, num_steps):
            slot = last + step
            padded = np.zeros((num_rows, carried.shape[1]), np.float32)
            padded[0] = carried[-1]
            ids = np.zeros(num_rows, np.int32)
            ids[0] = tokens[slot]
            kv, carried, logits = paged.run(kv, ids, padded, start=slot, count=1, is_prompt=True)
            check(carried, logits, step, slice(last, last + 1))


@pytest.mark.parametrize("name", OF_SPECULATORS)
def test_the_numpy_reference_equals_speculators_too(name: str) -> None:
    config, _, golden = golden_head(name)
    head = Eagle3Reference(
        tensors=load_file(GOLDEN / name / "model.safetensors"),
        head_dim=16,
        eps=1e-6,
        theta=10000.0,
        **SETTINGS.get(name, {}),
    )
    carried = head.run(list(golden["token_ids"]), head.fuse(golden["aux_hidden"]))
    if not config.feeds_back_normed:
        np.testing.assert_allclose(carried, golden["hidden"][0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(head.logits(carried), golden["logits"][0], rtol=1e-5, atol=1e-5)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A published layout. layer: the name of its first layer; root: prefix of all tensors.

    changes: to its config; attention: to its attention; settings: for the reference.
    """

    layer: str = "midlayer."
    root: str = ""
    num_layers: int = 1
    mlp_bias: bool = False
    is_fused: bool = False
    changes: dict[str, Any] = field(default_factory=dict)
    attention: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> HeadSpec:
        spec = uniform_decoder(
            vocab_size=96,
            hidden_size=SIZE,
            intermediate_size=24,
            num_layers=1,
            num_heads=6,
            num_kv_heads=3,
            head_dim=8,
            rms_norm_eps=1e-6,
            rope=RopeConfig(theta=3000.0),
        )
        layer = replace(
            spec.one_layer,
            attention=replace(spec.one_layer.attention, **self.attention),
            ffn=DenseSpec(inner=24, bias=self.mlp_bias),
        )
        sizes: dict[str, Any] = {"draft_vocab_size": 24, "target_hidden_size": SIZE}
        sizes |= {"aux_layer_ids": (0, 2, 8), **self.changes}
        return eagle3_spec(layer=replace(spec, layers=(layer,) * self.num_layers), **sizes)


LAYOUTS = {
    "eagle_of_a_wider_target": Layout(changes={"target_hidden_size": 40}),
    "sglang_fused": Layout(root="model.", is_fused=True, attention={"qkv_bias": True}),
    "speculators_names": Layout(
        layer="layers.0.",
        changes={"norm_before_residual": True, "aux_layer_ids": (0, 2, 4, 8)},
        settings={"norm_before_residual": True, "num_features": 4},
    ),
    "gpt_oss_style": Layout(
        changes={"feature_norm": FeatureNorm.WHOLE, "fc_bias": True, "logit_scale": 0.5},
        settings={"normed": "whole", "logit_scale": 0.5},
    ),
    "3.1_of_two_qwen3_layers": Layout(
        layer="layers.0.",
        num_layers=2,
        mlp_bias=True,
        changes={"feature_norm": FeatureNorm.EACH},
        attention={"qk_norm": True, "qkv_bias": True, "out_bias": True},
        settings={"normed": "each", "num_layers": 2},
    ),
    "last_hidden_and_full_vocabulary": Layout(
        layer="layers.0.",
        root="model.",
        changes={"aux_layer_ids": (), "draft_vocab_size": 96, "norm_before_head": False},
        settings={"num_features": 0, "norm_head": False},
    ),
}


def random_head(config: HeadSpec) -> Params:
    rng = np.random.default_rng(7)

    def draw(path: Any, leaf: Any) -> Any:
        if "norm" in str(path):
            return rng.uniform(0.5, 1.5, leaf.shape).astype(leaf.dtype)
        return (rng.standard_normal(leaf.shape) / 3).astype(leaf.dtype)

    params: Params = jax.tree_util.tree_map_with_path(
        draw, abstract_params(head_params(config), dtype=np.float32)
    )
    ids = rng.choice(96, config.draft_vocab_size, replace=False)
    params["draft_ids"] = np.sort(ids).astype(np.int32)
    return params


def written(path: Path, layout: Layout, params: Params) -> None:
    """Write the head under the names of `layout`, with fused products if it has them."""
    save_eagle3(path, layout.config, params, dtype=np.float32, include_embed=True)
    tensors = load_file(path / "model.safetensors")
    first = "midlayer." if layout.num_layers == 1 else "layers.0."
    tensors = {name.replace(first, layout.layer): value for name, value in tensors.items()}
    if layout.is_fused:
        for start, names in (("self_attn.", "q k v"), ("mlp.", "gate up")):
            parts = names.split()
            joined = "".join(parts) if start == "self_attn." else "_".join(parts)
            for kind in ("weight", "bias"):
                stored = [f"{layout.layer}{start}{part}_proj.{kind}" for part in parts]
                if stored[0] in tensors:
                    values = [tensors.pop(name) for name in stored]
                    tensors[f"{layout.layer}{start}{joined}_proj.{kind}"] = np.concatenate(values)
    save_file(
        {layout.root + name: value for name, value in tensors.items()}, path / "model.safetensors"
    )


# speculators' own files are compared with speculators above.
SLOW = {"speculators_names": [pytest.mark.slow]}


@pytest.mark.slow_cases("last_hidden", "sglang_fused", "gpt_oss_style]")
@pytest.mark.parametrize("name", [pytest.param(n, marks=SLOW.get(n, [])) for n in LAYOUTS])
def test_every_layout_drafts_as_the_numpy_reference(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    params = random_head(layout.config)
    written(tmp_path, layout, params)
    target = replace(golden_target(layout.config.target_hidden_size), vocab_size=96)
    config = load_eagle3_config(tmp_path, target=target)
    assert config == layout.config
    loaded = load_eagle3(tmp_path, config, target_params={}, dtype=np.float32)
    stored = load_file(tmp_path / "model.safetensors")
    reference = Eagle3Reference(
        tensors={name.removeprefix(layout.root): value for name, value in stored.items()},
        head_dim=8,
        eps=1e-6,
        theta=3000.0,
        layer=layout.layer,
        num_kv_heads=3,
        **layout.settings,
    )
    width = max(len(config.aux_layer_ids), 1) * config.target_hidden_size
    head = FeatureHead(config, Ops())
    check_head(head, loaded, reference, vocab_size=96, width=width)
    assert jnp.asarray(loaded["draft_ids"]).shape == (config.draft_vocab_size,)


def test_a_further_layers_input_norm_may_be_called_as_sglang_has_it(tmp_path: Path) -> None:
    layout = LAYOUTS["3.1_of_two_qwen3_layers"]
    written(tmp_path, layout, random_head(layout.config))

    def load() -> Params:
        return load_eagle3(tmp_path, layout.config, target_params={}, dtype=np.float32)

    expected, file = load(), tmp_path / "model.safetensors"
    old, new = "layers.1.input_layernorm.weight", "layers.1.hidden_norm.weight"
    tensors = load_file(file)
    save_file({new if name == old else name: x for name, x in tensors.items()}, file)
    jax.tree.map(np.testing.assert_array_equal, load(), expected)
    save_file(tensors | {new: tensors[old]}, file)  # the head does not read one of the two
    with pytest.raises(CheckpointError, match=rf"{new}"):
        load()


def test_a_head_that_feeds_back_its_norm_drafts_as_the_reference() -> None:
    """Only speculators has it, so the case is its own file; golden chains have forced tokens."""
    config, params, _ = golden_head("fc_norm")
    assert config.feeds_back_normed
    reference = Eagle3Reference(
        tensors=load_file(GOLDEN / "fc_norm" / "model.safetensors"),
        head_dim=16,
        eps=1e-6,
        theta=10000.0,
        **SETTINGS["fc_norm"],
    )
    width = 3 * config.target_hidden_size
    check_head(FeatureHead(config, Ops()), params, reference, vocab_size=96, width=width)
