"""EAGLE-1 heads: their configs, files, maps of frequent ids, and the laws of what they draft."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jspec.errors import CheckpointError, ConfigError
from jspec.models.files.stored.tensors import stored_tensors
from jspec.models.heads.eagle1 import check_eagle1, load_eagle1, load_eagle1_config
from jspec.models.heads.feature_head import FeatureHead
from jspec.models.heads.head_params import head_params
from jspec.models.heads.token_map import read_token_map
from jspec.models.layer import Params
from jspec.models.placement import abstract_params
from jspec.pallas_kernels.ops import Ops
from jspec.spec.head_spec import HeadSpec
from jspec.spec.model_spec import uniform_decoder
from tests.models.eagle3_reference import Eagle1Reference
from tests.models.head_laws import check_head

V, E = 40, 16
TARGET = uniform_decoder(
    vocab_size=V,
    hidden_size=E,
    intermediate_size=24,
    num_layers=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)
# like EAGLE's own LLaMA 3 head: no rope_theta of its target, bias false
HEAD = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": V,
    "hidden_size": E,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 3000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
HOT_IDS = np.array([1, 2, 5, 11, 12, 19, 30, 31, 38], np.int32)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A published layout. config: additions to HEAD; hot: it has a map of frequent ids.

    more: further tensors besides those of every head, listed here independently of jspec.
    """

    config: dict[str, Any] = field(default_factory=dict)
    root: str = ""
    is_hot: bool = False
    has_fc_bias: bool = True
    owns_embed: bool = True
    more: tuple[str, ...] = ()

    @property
    def names(self) -> set[str]:
        """Return all tensors of the file."""
        parts = [f"self_attn.{part}_proj.weight" for part in "qkvo"]
        parts += [f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
        found = {f"layers.0.{part}" for part in (*parts, "post_attention_layernorm.weight")}
        found |= {"fc.weight", *self.more}
        found |= {"fc.bias"} if self.has_fc_bias else set()
        return found | ({"embed_tokens.weight"} if self.owns_embed else set())


def biases(layer: int, *names: str) -> tuple[str, ...]:
    return tuple(f"layers.{layer}.{name}_proj.bias" for name in names)


QKV = tuple(f"self_attn.{part}" for part in "qkv")
SECOND = (
    *(f"layers.1.self_attn.{part}_proj.weight" for part in "qkvo"),
    *(f"layers.1.mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    *(f"layers.1.{part}_layernorm.weight" for part in ("input", "post_attention")),
)


LAYOUTS = {
    "vicuna": Layout(),
    "qwen2_of_two_layers_without_bias_or_embedding": Layout(
        config={
            "architectures": ["Qwen2ForCausalLMEagle"],
            "qkv_bias": True,
            "bias": False,
            "num_hidden_layers": 2,
        },
        root="model.",
        has_fc_bias=False,
        owns_embed=False,
        more=(*SECOND, *biases(0, *QKV), *biases(1, *QKV)),
    ),
    "hass_norms_with_frequent_ids": Layout(
        config={"architectures": ["LlamaForCausalLMEagle"], "add_para_norm": True},
        is_hot=True,
        more=("embedding_layernorm.weight", "hidden_states_layernorm.weight"),
    ),
    "with_every_bias": Layout(
        config={"attention_bias": True, "mlp_bias": True},
        more=biases(0, *QKV, "self_attn.o", "mlp.gate", "mlp.up", "mlp.down"),
    ),
}
SHARED = LAYOUTS["qwen2_of_two_layers_without_bias_or_embedding"]


def random_tensors(config: HeadSpec) -> dict[str, Any]:
    """Return the tensors of a head by their stored names."""
    rng = np.random.default_rng(7)

    def draw(path: Any, leaf: Any) -> Any:
        if "norm" in str(path):
            return rng.uniform(0.5, 1.5, leaf.shape).astype(leaf.dtype)
        # a head without norms must not grow from draft to draft, or rounding does too
        scale = leaf.shape[0] ** -0.5 if len(leaf.shape) > 1 else 0.3
        return (rng.standard_normal(leaf.shape) * scale).astype(leaf.dtype)

    table = head_params(config)
    params: Params = jax.tree_util.tree_map_with_path(
        draw, abstract_params(table, dtype=np.float32)
    )
    return stored_tensors(table, params, dtype=np.float32)


def target_params() -> Params:
    rng = np.random.default_rng(3)
    return {
        "embed": {"table": jnp.asarray(rng.standard_normal((V, E)), jnp.float32)},
        "lm_head": {"kernel": jnp.asarray(rng.standard_normal((E, V)), jnp.float32)},
    }


def written(path: Path, layout: Layout = LAYOUTS["vicuna"], **changes: Any) -> Path:
    """Write a head; replace, add or (None) remove tensors by name."""
    (path / "config.json").write_text(json.dumps(HEAD | layout.config))
    config = replace(
        load_eagle1_config(path, target=TARGET), fc_bias=layout.has_fc_bias, draft_vocab_size=V
    )
    tensors = random_tensors(config)
    if layout.owns_embed:
        table = np.random.default_rng(5).standard_normal((V, E))
        tensors["embed_tokens.weight"] = table.astype(np.float32)
    tensors |= changes
    kept = {layout.root + name: value for name, value in tensors.items() if value is not None}
    save_file(kept, path / "model.safetensors")
    return path


def load(path: Path, config: HeadSpec, **arguments: Any) -> Params:
    return load_eagle1(path, config, target_params=target_params(), dtype=np.float32, **arguments)


@pytest.mark.slow_cases("hass_norms")
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n == "with_every_bias")) for n in LAYOUTS],
)
def test_every_layout_drafts_as_the_numpy_reference(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    hot_ids = HOT_IDS if layout.is_hot else None
    config = load_eagle1_config(written(tmp_path, layout), target=TARGET)
    assert config.fc_bias == layout.has_fc_bias
    params = load(tmp_path, config, hot_ids=hot_ids)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name.removeprefix(layout.root): value for name, value in tensors.items()}
    assert set(tensors) == layout.names
    shared = target_params()
    tensors.setdefault("embed_tokens.weight", np.asarray(shared["embed"]["table"]))
    ids = np.arange(V) if hot_ids is None else hot_ids
    reference = Eagle1Reference(
        tensors=tensors,
        head_dim=8,
        eps=1e-6,
        theta=3000.0,
        num_layers=2 if set(SECOND) <= layout.names else 1,
        lm_head=np.asarray(shared["lm_head"]["kernel"]).T[ids],
        hot_ids=ids,
        norms_inputs="embedding_layernorm.weight" in layout.names,
    )
    np.testing.assert_array_equal(params["draft_ids"], ids)
    config = replace(config, draft_vocab_size=ids.size)
    check_head(FeatureHead(config, Ops()), params, reference, vocab_size=V, width=E)


def test_what_is_the_targets_is_its_very_array(tmp_path: Path) -> None:
    config = load_eagle1_config(written(tmp_path, SHARED), target=TARGET)
    target = target_params()
    found = load_eagle1(tmp_path, config, target_params=target, dtype=np.float32)
    assert found["embed"]["table"] is target["embed"]["table"]
    assert found["lm_head"]["kernel"] is target["lm_head"]["kernel"]


def test_strays_of_known_exporters_are_ignored(tmp_path: Path) -> None:
    """A decoder's template stores a first norm that EAGLE does not have; SGLang skips lm_head."""
    strays: dict[str, Any] = {
        "layers.0.input_layernorm.weight": np.zeros(E, np.float32),
        "layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32),
        "lm_head.weight": np.zeros((V, E), np.float32),
    }
    config = load_eagle1_config(written(tmp_path, **strays), target=TARGET)
    found = load(tmp_path, config)
    np.testing.assert_array_equal(found["lm_head"]["kernel"], target_params()["lm_head"]["kernel"])


def test_a_bias_that_is_not_there_is_none(tmp_path: Path) -> None:
    """config.json lacks `bias`, whose default is true, but the file has no bias tensor."""
    absent: dict[str, Any] = {"fc.bias": None}
    config = load_eagle1_config(written(tmp_path, **absent), target=TARGET)
    assert not config.fc_bias
    assert "bias" not in load(tmp_path, config)["layers"][0]["fuse"]


def test_the_rope_is_the_heads_own(tmp_path: Path) -> None:
    values = {key: value for key, value in HEAD.items() if key != "rope_theta"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    for theta, expected in ((None, 10000.0), (5e5, 5e5)):
        config = load_eagle1_config(tmp_path, target=TARGET, draft_rope_theta=theta)
        assert config.layer.one_layer.attention.rope.theta == expected


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"vocab_size": 41}, CheckpointError, "vocab_size is 41; expected the target's 40"),
        ({"hidden_size": 8}, CheckpointError, r"hidden_size\) is 8; expected the target's 16"),
        ({"draft_vocab_size": 9}, ConfigError, "draft_vocab_size is 9; .*algorithm EAGLE3"),
        ({"eagle_config": {"a": 1}}, ConfigError, "eagle_config is .*algorithm EAGLE3"),
        ({"speculators_model_type": "eagle3"}, ConfigError, "is 'eagle3'.*algorithm EAGLE3"),
        ({"speculators_model_type": "eagle"}, ConfigError, "speculators' layout is not read"),
        ({"architectures": ["GPT2LMHeadModel"]}, ConfigError, "architecture is 'GPT2LMHeadModel'"),
        ({"logit_scale": 0.5}, ConfigError, "logit_scale is 0.5; expected no such key"),
        ({"use_sliding_window": True}, ConfigError, "use_sliding_window is True; expected False"),
        ({"layer_types": ["sliding_attention"]}, ConfigError, "layer_types has .*sliding"),
        ({"num_key_value_heads": 3}, ConfigError, "num_attention_heads is .*expected a multiple"),
        ({"quantization_config": {"bits": 4}}, ConfigError, "quant_method None; expected .fp8."),
        ({"num_hidden_layers": 2}, CheckpointError, r"is 2, but the weights .* have 1: \[0\]"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    changes: dict[str, Any], kind: type[Exception], message: str, tmp_path: Path
) -> None:
    written(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(HEAD | changes))
    with pytest.raises(kind, match=message) as caught:
        load_eagle1_config(tmp_path, target=TARGET)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "fc.weight",
            np.zeros((E, 3 * E)),
            r"fc\.weight has shape \(16, 48\); expected \(16, 32\)",
        ),
        ("fc.weight", None, r"no tensor fc\.weight; expected shape \(16, 32\)"),
        ("norm.weight", np.zeros(E), r"unknown tensor norm\.weight of shape \(16,\)"),
        ("embed_tokens.weight", np.zeros((V, 8)), r"embed_tokens\.weight has shape \(40, 8\)"),
        ("layers.0.mlp.up_proj.weight", None, r"no tensor layers\.0\.mlp\.up_proj\.weight"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    name: str, value: Any, message: str, tmp_path: Path
) -> None:
    config = load_eagle1_config(written(tmp_path, **{name: value}), target=TARGET)
    with pytest.raises(CheckpointError, match=message):
        check_eagle1(tmp_path, config)


def test_another_targets_arrays_cannot_stand_in(tmp_path: Path) -> None:
    config = load_eagle1_config(written(tmp_path, SHARED), target=TARGET)
    wide = target_params() | {"lm_head": {"kernel": jnp.ones((E, V + 1))}}
    with pytest.raises(CheckpointError, match=r"kernel of shape \(16, 41\) cannot stand in"):
        load_eagle1(tmp_path, config, target_params=wide, dtype=np.float32)


def write_json(path: Path, ids: Any) -> None:
    path.write_text(json.dumps(np.asarray(ids).tolist()))


def write_safetensors(path: Path, ids: Any) -> None:
    save_file({"ids": np.asarray(ids)}, path)


WRITERS: dict[str, Callable[[Path, Any], None]] = {
    ".json": write_json,
    ".npy": lambda path, ids: np.save(path, np.asarray(ids)),
    ".safetensors": write_safetensors,
}


@pytest.mark.parametrize("suffix", WRITERS)
def test_a_map_of_frequent_ids_is_read_in_every_format(suffix: str, tmp_path: Path) -> None:
    """The ids may be in any order; they are sorted when they are read."""
    path = tmp_path / f"freq{suffix}"
    WRITERS[suffix](path, [300, 5, 17, 4])
    found = read_token_map(path, vocab_size=301)
    np.testing.assert_array_equal(found, np.array([4, 5, 17, 300], np.int32), strict=True)
    torch_map = Path(__file__).parents[1] / "golden" / "torch" / "map.pt"
    np.testing.assert_array_equal(read_token_map(torch_map, vocab_size=301), found)


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 40, 2], "has the id 40; expected ids from 0 to 39"),
        ([1, -1], "has the id -1; expected ids from 0 to 39"),
        ([7, 3, 7], "has the id 7 2 times; expected each once"),
        ([[1], [2]], "expected (integers of one axis|a list of ids)"),
        ([0.5, 1.0], "expected (integers of one axis|a list of ids)"),
        ([], "expected integers of one axis, at least one"),
    ],
)
def test_a_map_that_is_none_is_refused(suffix: str, ids: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / f"freq{suffix}"
    WRITERS[suffix](path, ids if ids else np.zeros(0, np.int64))
    with pytest.raises(CheckpointError, match=rf"freq\{suffix}: .*{message}"):
        read_token_map(path, vocab_size=V)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        (
            "freq.txt",
            b"1 2",
            r"ends in '\.txt'; expected one of \.json, \.npy, \.safetensors, \.pt",
        ),
        ("freq.json", b"{}", "holds dict; expected a list of ids"),
        ("freq.json", b"[", "is no JSON"),
        ("freq.npy", b"no array", "cannot be read"),
        ("freq.safetensors", b"no tensors", "cannot be read"),
        ("freq.pt", b"no archive", "cannot be read"),
    ],
)
def test_a_map_that_cannot_be_read_is_named(
    name: str, data: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        read_token_map(tmp_path / name, vocab_size=V)
