"""Layers for multi-token prediction in files: permitted extra tensors, and config.json's
settings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from benchmarks.workloads import MIMO_V2_FLASH_JSON
from jspec.errors import CheckpointError, ConfigError
from jspec.files.json_files import Fields
from jspec.models.heads.feature_head import FeatureHead
from jspec.models.heads.head_params import HeadNames, head_params
from jspec.models.heads.mtp import check_mtp, load_mtp, load_mtp_config
from jspec.models.params import ParamTable
from jspec.models.registry import DRAFTS, family_named, table_of
from jspec.pallas_kernels.ops import Ops
from jspec.spec.head_spec import HeadSpec
from jspec.spec.model_spec import ModelSpec
from tests.models.head_laws import PagedHead
from tests.models.random_params import random_params
from tests.speculative.mtp_checkpoints import CONFIGS

MASKS_FIRST = "mask_first_embedding"
WIDTH, HEADS, KV_HEADS, HEAD = 32, 4, 2, 8
LENT = {  # shared with the target
    "embed": {"table": np.zeros((320, WIDTH), np.float32)},
    "lm_head": {"kernel": np.zeros((WIDTH, 320), np.float32)},
}
ALONE: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLMNextN"],
    "vocab_size": 320,
    "hidden_size": WIDTH,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "rms_norm_eps": 1e-5,
    "num_nextn_predict_layers": 1,
    # other settings of the published config
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "topk_method": "noaux_tc",
}
QWEN = ALONE | {"architectures": ["Qwen3NextForCausalLMMTP"], "attn_output_gate": True}
LATENT = CONFIGS["deepseek_v3"] | {"architectures": ALONE["architectures"], "num_hidden_layers": 1}
LAYOUTS = {"nextn": ALONE, "nextn_latent": LATENT, "qwen": QWEN, **CONFIGS}
FIRST = {  # prefix of the first layer's names
    "nextn": "model.layers.0.",
    "nextn_latent": "model.layers.0.",
    "qwen": "mtp.layers.0.",
    "mimo": "model.mtp_layers.0.",
    "mimo_v2": "model.mtp.layers.0.",
    "step3p5": "model.layers.2.",
    "glm4_moe": "model.layers.2.",
    "qwen3_next": "mtp.layers.0.",
    "qwen3_5": "mtp.layers.0.",
    "deepseek_v3": "model.layers.2.",
    "deepseek_v32": "model.layers.2.",
    "glm_moe_dsa": "model.layers.2.",
}


def target_of(layout: str) -> ModelSpec:
    """Return its own target, or one of any family for layers with a separate checkpoint."""
    name = layout if layout in CONFIGS else "mimo"
    return family_named(name).read(Fields(Path("config.json"), CONFIGS[name]))


def stored(table: ParamTable) -> dict[str, Any]:
    """Return zeros under the first names of each weight."""
    shapes: dict[str, tuple[int, ...]] = {}
    for spec in table:
        for part in spec.layouts[0] if spec.layouts else ():
            shapes |= part.tensors
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


def written(path: Path, layout: str, *, with_target: bool = False, **changes: Any) -> Path:
    """Write all layers of the layout's config, with the target's tensors if `with_target`.

    changes: to its config.json, after the tensors were made.
    """
    path.mkdir()
    config, target = LAYOUTS[layout], target_of(layout)
    mtp = DRAFTS.get(config["architectures"][0]) or family_named(target.family).mtp
    assert mtp is not None
    layers = mtp.read(Fields(path / "config.json", config), target)
    tensors = stored(table_of(target)) if with_target else {}
    tensors |= stored(head_params(layers, mtp.names(target)))
    save_file(tensors, path / "model.safetensors")
    if "text_config" in config:
        changes = {"text_config": config["text_config"] | changes}
    (path / "config.json").write_text(json.dumps(config | changes))
    return path


def change(path: Path, **shapes: tuple[int, ...] | None) -> None:
    """Replace tensors of the file by others of these shapes; None removes one."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name, shape in shapes.items():
        tensors.pop(name, None)
        if shape is not None:
            tensors[name] = np.zeros(shape, np.float32)
    save_file(tensors, file)


def read(path: Path, layout: str, *, num_layers: int = 1) -> tuple[HeadSpec, HeadNames]:
    """Read a draft like an engine, before its target."""
    config, names = load_mtp_config(path, target=target_of(layout), num_layers=num_layers)
    check_mtp(path, config, names)
    return config, names


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("with_target", [False, True])
def test_what_is_published_is_taken(layout: str, with_target: bool, tmp_path: Path) -> None:
    """Copies of the target's tensors are among the layers, and fewer layers are used than
    stored."""
    has_target = with_target and layout in CONFIGS
    path = written(tmp_path / "draft", layout, with_target=has_target)
    own = {} if layout == "step3p5" else {f"{FIRST[layout]}shared_head.head.weight": (320, WIDTH)}
    change(path, **{f"{FIRST[layout]}embed_tokens.weight": (320, WIDTH)}, **own)
    change(path, **{"model.embed_tokens.weight": (320, WIDTH), "lm_head.weight": (320, WIDTH)})
    read(path, layout)


@pytest.mark.parametrize(
    ("layout", "name", "shape"),
    [
        ("nextn", "model.layers.0.self_attn.q_proj.bias", (WIDTH,)),
        ("nextn", "model.layers.0.self_attn.q_norm.weight", (HEAD,)),
        ("nextn", "model.layers.0.eh_proj.bias", (WIDTH,)),
        ("nextn", "model.layers.1.input_layernorm.weight", (WIDTH,)),
        ("nextn", "model.layers.1.embed_tokens.weight", (320, WIDTH)),
        ("qwen", "mtp.fc.bias", (WIDTH,)),
        ("qwen", "mtp.layers.0.mlp.gate.weight", (8, WIDTH)),
        ("qwen", "mtp.layers.1.input_layernorm.weight", (WIDTH,)),
        ("mimo", "model.mtp_layers.0.self_attn.q_norm.weight", (HEAD,)),
        ("mimo", "model.mtp_layers.1.input_layernorm.weight", (WIDTH,)),
        ("mimo_v2", "model.mtp.layers.1.self_attn.q_proj.bias", (48,)),
        ("mimo_v2", "model.mtp.layers.0.self_attn.q_norm.weight", (12,)),
        ("mimo_v2", "model.mtp.layers.2.self_attn.q_norm.weight", (12,)),
        ("mimo_v2", "model.mtp.layers.3.input_layernorm.weight", (WIDTH,)),
        ("step3p5", "model.layers.2.self_attn.q_proj.bias", (WIDTH,)),
        ("step3p5", "model.layers.5.input_layernorm.weight", (WIDTH,)),
        ("step3p5", "model.layers.2.shared_head.norm.weight", (WIDTH,)),  # a second one
        ("glm4_moe", "model.layers.2.eh_proj.bias", (WIDTH,)),
        ("glm4_moe", "model.layers.3.input_layernorm.weight", (WIDTH,)),
    ],
)
def test_a_tensor_that_nobody_reads_is_refused(
    layout: str, name: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    """The layers are alone, or in their target's file."""
    path = written(tmp_path / "draft", layout, with_target=layout in CONFIGS)
    change(path, **{name: shape})
    with pytest.raises(CheckpointError, match=rf"draft: unknown tensor {name} of shape"):
        read(path, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_beside_a_target_its_other_tensors_are_not_looked_at(layout: str, tmp_path: Path) -> None:
    """Alone they are refused: no other reader checks them."""
    alone = written(tmp_path / "alone", layout)
    change(alone, foo=(3,))
    with pytest.raises(CheckpointError, match="alone: unknown tensor foo"):
        read(alone, layout)
    if layout in CONFIGS:
        both = written(tmp_path / "both", layout, with_target=True)
        change(both, foo=(3,))
        read(both, layout)


def test_sinks_that_the_config_does_not_have(tmp_path: Path) -> None:
    path = written(tmp_path / "draft", "mimo_v2", add_swa_attention_sink_bias=False)
    with pytest.raises(CheckpointError, match=r"unknown tensor .*0.self_attn.attention_sink"):
        read(path, "mimo_v2")


def test_a_further_layer_is_whole_or_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "draft", "mimo_v2")
    read(path, "mimo_v2", num_layers=2)
    change(path, **{"model.mtp.layers.2.eh_proj.weight": None})
    with pytest.raises(CheckpointError, match=r"no tensor model.mtp.layers.2.eh_proj.weight"):
        read(path, "mimo_v2", num_layers=2)


def test_published_layers_say_no_number_and_may_be_fewer(tmp_path: Path) -> None:
    """MiMo-V2-Flash's config.json has no number of layers, and the number stored is unknown."""
    assert "num_nextn_predict_layers" not in MIMO_V2_FLASH_JSON
    path = written(tmp_path / "draft", "mimo_v2")
    last = {name for name in load_file(path / "model.safetensors") if "layers.2." in name}
    change(path, **dict.fromkeys(last))
    read(path, "mimo_v2", num_layers=2)
    with pytest.raises(CheckpointError, match=r"no tensor model.mtp.layers.2"):
        read(path, "mimo_v2", num_layers=3)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("norm_before_residual", True),
        ("logit_scale", 0.5),
        ("attention_multiplier", 2.0),
        ("attn_logit_softcapping", 30.0),
        ("mlp_bias", True),
        ("qkv_bias", True),
    ],
)
def test_a_setting_that_is_not_computed_is_refused(
    name: str, value: Any, layout: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "draft", layout, **{name: value})
    with pytest.raises(ConfigError, match=rf"draft/config\.json: {name} is {value}; expected"):
        read(path, layout)


def test_a_nested_config_is_looked_through_too(tmp_path: Path) -> None:
    path = written(tmp_path / "draft", "qwen", text_config=QWEN | {"logit_scale": 0.5})
    with pytest.raises(ConfigError, match=r"logit_scale is 0\.5; expected no such key"):
        read(path, "qwen")


@pytest.mark.parametrize("layout", ["nextn", "qwen", "mimo", "glm4_moe"])
@pytest.mark.parametrize(
    ("name", "value"),
    [("use_sliding_window", True), ("layer_types", ["full_attention", "sliding_attention"])],
)
def test_a_layer_that_is_run_again_has_no_window(
    name: str, value: Any, layout: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "draft", layout, **{name: value, "sliding_window": 64})
    with pytest.raises(ConfigError, match=rf"config\.json: {name} (is|has) .*; expected"):
        read(path, layout)


def test_a_table_of_embeddings_of_its_own_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "draft", "qwen", mtp_use_dedicated_embeddings=True)
    with pytest.raises(ConfigError, match="mtp_use_dedicated_embeddings is True; expected False"):
        read(path, "qwen")


@pytest.mark.parametrize("layout", ["mimo_v2", "step3p5"])
def test_fewer_layers_than_config_json_says_are_refused(layout: str, tmp_path: Path) -> None:
    lists = ("layer_types", "rope_theta", "partial_rotary_factors", "swiglu_limits")
    five: dict[str, Any] = {
        name: [*value, *value[-1:] * 2]
        for name, value in LAYOUTS[layout].items()
        if layout == "step3p5" and name.removesuffix("_shared") in lists
    }
    path = written(tmp_path / "draft", layout, num_nextn_predict_layers=5, **five)
    message = r"draft/config\.json: num_nextn_predict_layers is 5, but .* have 3 such layers; expec"
    with pytest.raises(CheckpointError, match=message):
        read(path, layout)
    (path / "config.json").write_text(json.dumps(LAYOUTS[layout] | {"num_nextn_predict_layers": 3}))
    read(path, layout)


def test_how_many_layers_there_are_is_bounded(tmp_path: Path) -> None:
    path = written(tmp_path / "draft", "mimo_v2", num_nextn_predict_layers=10**9)
    with pytest.raises(CheckpointError, match="num_nextn_predict_layers is 1000000000; expected"):
        read(path, "mimo_v2")


@pytest.mark.parametrize("name", ["rms_norm_eps", "layernorm_epsilon"])
def test_mimo_v2_s_layers_have_the_eps_of_their_own_config(name: str, tmp_path: Path) -> None:
    """It is under transformers' key or the published one; default: the target's."""
    none: dict[str, Any] = {"rms_norm_eps": None}
    path = written(tmp_path / "draft", "mimo_v2", **(none | {name: 1e-3}))
    config, _ = read(path, "mimo_v2")
    assert {layer.eps for layer in config.layer.layers} == {config.layer.rms_norm_eps} == {1e-3}
    target = replace(target_of("mimo_v2"), rms_norm_eps=0.25)
    for values, expected in ((none, 0.25), ({name: 1e-3}, 1e-3)):
        mtp = family_named("mimo_v2").mtp
        assert mtp is not None
        fields = Fields(path / "config.json", LAYOUTS["mimo_v2"] | none | values)
        assert mtp.read(fields, target).layer.layers[0].eps == expected
    (path / "config.json").write_text(json.dumps(LAYOUTS["mimo_v2"] | none | {name: float("nan")}))
    with pytest.raises(CheckpointError, match=rf"config\.json: {name} is nan; expected"):
        read(path, "mimo_v2")


def test_mimo_v2_s_two_names_of_eps_must_agree(tmp_path: Path) -> None:
    path = written(tmp_path / "draft", "mimo_v2", rms_norm_eps=1e-5, layernorm_epsilon=1e-6)
    with pytest.raises(CheckpointError, match="layernorm_epsilon is 1e-06; expected rms_norm_eps"):
        read(path, "mimo_v2")


def test_a_target_states_its_eps_under_the_published_name_too() -> None:
    config = dict(MIMO_V2_FLASH_JSON) | {"rms_norm_eps": None, "layernorm_epsilon": 1e-3}
    spec = family_named("mimo_v2").read(Fields(Path("config.json"), config))
    assert spec.layers[0].eps == spec.rms_norm_eps == 1e-3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_how_many_layers_a_config_says_its_target_has_is_bounded(
    layout: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "draft", layout, num_hidden_layers=10**9)
    with pytest.raises(CheckpointError, match="num_hidden_layers is 1000000000; expected an int"):
        read(path, layout)


@pytest.mark.parametrize(
    ("layout", "published"),
    [("mimo", True), ("nextn", False), ("glm4_moe", False), ("qwen", False)],
)
def test_whether_the_first_embedding_is_zero_can_be_said(
    layout: str, published: bool, tmp_path: Path
) -> None:
    """This applies to a layer that every level runs again; the default is SGLang's."""
    path = written(tmp_path / "draft", layout)
    assert read(path, layout)[0].zeroes_first == published
    for said in (False, True):
        (path / "config.json").write_text(json.dumps(LAYOUTS[layout] | {MASKS_FIRST: said}))
        assert read(path, layout)[0].zeroes_first == said


@pytest.mark.parametrize("layout", ["mimo_v2", "step3p5"])
def test_of_several_layers_it_cannot(layout: str, tmp_path: Path) -> None:
    path = written(tmp_path / "draft", layout, **{MASKS_FIRST: True})
    with pytest.raises(ConfigError, match=f"{MASKS_FIRST} is True; expected no such key"):
        read(path, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_order_that_a_config_says_is_the_layers(layout: str, tmp_path: Path) -> None:
    """The key is transformers'; the default is the family's order."""
    is_first = layout == "mimo"
    read(written(tmp_path / "same", layout, mtp_hidden_states_first=is_first), layout)
    path = written(tmp_path / "other", layout, mtp_hidden_states_first=not is_first)
    with pytest.raises(ConfigError, match=f"mtp_hidden_states_first is {not is_first}; expected"):
        read(path, layout)


@pytest.mark.parametrize("position", [0, 3])
@pytest.mark.parametrize("is_masked", [False, True])
def test_a_masked_first_embedding_says_nothing(
    position: int, is_masked: bool, tmp_path: Path
) -> None:
    """Only the row at position 0, and only if requested, is equal for every token."""
    path = written(tmp_path / "draft", "nextn", **{MASKS_FIRST: is_masked})
    config, names = read(path, "nextn")
    head = FeatureHead(config, Ops(), names=names)
    params = random_params(head.table)
    paged, hidden = PagedHead(head, params), np.ones((1, WIDTH), np.float32)
    one, other = (
        paged.run(paged.empty(), [token], hidden, start=position, is_prompt=True)[2]
        for token in (3, 7)
    )
    assert np.array_equal(one, other) == (is_masked and position == 0)


@pytest.mark.parametrize("has_infix", [False, True])
def test_step3p5_s_infix_may_stand_before_every_name(has_infix: bool, tmp_path: Path) -> None:
    path = written(tmp_path / "draft", "step3p5", with_target=True)
    file = path / "model.safetensors"

    def renamed(name: str) -> str:
        start = next((x for x in ("model.layers.2.", "model.layers.3.") if name.startswith(x)), "")
        rest = name.removeprefix(start).removeprefix("transformer.")
        return f"{start}transformer.{rest}" if start and has_infix else start + rest

    numbered = {renamed(name): x + i for i, (name, x) in enumerate(load_file(file).items())}
    save_file(numbered, file)
    config, names = read(path, "step3p5", num_layers=3)
    params = load_mtp(path, config, names, target_params=LENT, dtype=np.float32)
    before = "model.layers.3.transformer." if has_infix else "model.layers.3."
    for own, name in (("fuse", "eh_proj"), ("lm_head", "shared_head.output")):
        kernel = params["layers"][1][own]["kernel"]
        assert (kernel == numbered[f"{before}{name}.weight"].T).all()
    change(path, **{f"{before}embed_tokens.weight": (320, WIDTH)})
    read(path, "step3p5")
    change(path, **{f"{before}eh_proj.bias": (WIDTH,)})
    with pytest.raises(CheckpointError, match=rf"unknown tensor {before}eh_proj\.bias"):
        read(path, "step3p5")


def test_layers_alone_may_have_deepseek_s_own_number(tmp_path: Path) -> None:
    """It follows the target's last layer: num_hidden_layers in the same config.json."""
    path = written(tmp_path / "draft", "nextn", num_hidden_layers=61)
    file = path / "model.safetensors"
    numbered = {name.replace(".0.", ".61."): x for name, x in load_file(file).items()}
    numbered["model.layers.61.eh_proj.weight"][:] = 3
    save_file(numbered, file)
    change(path, **{"model.layers.61.embed_tokens.weight": (320, WIDTH)})
    config, names = read(path, "nextn")
    params = load_mtp(path, config, names, target_params=LENT, dtype=np.float32)
    assert (params["layers"][0]["fuse"]["kernel"] == 3).all()
    for name in ("model.layers.60.eh_proj.weight", "model.layers.61.eh_proj.bias"):
        change(path, **{name: (WIDTH,)})
        with pytest.raises(CheckpointError, match=f"unknown tensor {name}"):
            read(path, "nextn")
        change(path, **{name: None})
    (path / "config.json").write_text(json.dumps(ALONE | {"num_hidden_layers": 60}))
    with pytest.raises(CheckpointError, match=r"no tensor model\.layers\.0\.eh_proj\.weight"):
        read(path, "nextn")
    (path / "config.json").write_text(json.dumps(ALONE | {"num_hidden_layers": 61}))
    change(path, **{"model.layers.0.eh_proj.weight": (WIDTH, 2 * WIDTH)})  # one of both numbers
    with pytest.raises(CheckpointError, match=r"unknown tensor model\.layers\.61\."):
        read(path, "nextn")


def test_a_nested_config_is_read_for_all_of_the_layer(tmp_path: Path) -> None:
    """In a model that also reads images, the language model's sizes are in text_config alone."""
    path = written(tmp_path / "draft", "qwen")
    outer = {"architectures": QWEN["architectures"]}
    inner = {name: value for name, value in QWEN.items() if name != "architectures"}
    (path / "config.json").write_text(json.dumps(outer | {"text_config": inner}))
    read(path, "qwen")
    wrong = inner | {"vocab_size": 321}
    (path / "config.json").write_text(json.dumps(outer | {"text_config": wrong}))
    with pytest.raises(CheckpointError, match=r"are \(321, 32\); expected the target's \(320, 32"):
        read(path, "qwen")
