"""A head's config.json: the plain and the speculators layout, and the variants refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from jspec.errors import CheckpointError, ConfigError
from jspec.models.heads.eagle3_config import eagle3_config_json, load_eagle3_config
from jspec.spec.head_spec import FeatureNorm, HeadSpec, eagle3_spec
from jspec.spec.layers.feed_forward import DenseSpec
from jspec.spec.model_spec import ModelSpec, uniform_decoder
from jspec.spec.rope import RopeConfig

SIZES: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_layers": 32,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "rope": RopeConfig(theta=500000.0),
    "max_position": 131072,
    "eos_token_ids": (128001,),
    "bos_token_id": 128000,
}
TARGET = uniform_decoder(**SIZES)
# like EAGLE's own LLaMA 3.1 head: no rope_theta, no head_dim, no aux ids
HEAD = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "draft_vocab_size": 32000,
    "max_position_embeddings": 2048,
}


def head_layer(rope: RopeConfig = RopeConfig(), *, bias: bool = False) -> ModelSpec:  # noqa: B008
    """Return the one layer of HEAD; bias: on q, k, v and the output."""
    changes = {"num_layers": 1, "rope": rope, "max_position": 2048}
    spec = uniform_decoder(**(SIZES | changes | {"eos_token_ids": (), "bos_token_id": None}))
    attention = replace(spec.one_layer.attention, qkv_bias=bias, out_bias=bias)
    return replace(spec, layers=(replace(spec.one_layer, attention=attention),))


LAYER = head_layer()
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "draft_vocab_size": 32000,
    "transformer_layer_config": {key: HEAD[key] for key in HEAD if key != "architectures"},
}
AUX_IDS = "eagle_aux_hidden_state_layer_ids"


def write(path: Path, values: Any) -> Path:
    (path / "config.json").write_text(json.dumps(values))
    return path


def load_head(path: Path, values: dict[str, Any], **knobs: Any) -> HeadSpec:
    return load_eagle3_config(write(path, values), target=TARGET, **knobs)


@given(
    rope=st.sampled_from([RopeConfig(), RopeConfig(theta=5e5), RopeConfig(factor=8.0)]),
    bias=st.booleans(),
    norm_before_residual=st.booleans(),
    norms=st.sampled_from([(True, False), (True, True), (False, False)]),
    aux_layer_ids=st.sets(st.integers(0, 32), min_size=1, max_size=5),
)
def test_written_configs_read_back(
    tmp_path_factory: pytest.TempPathFactory,
    rope: RopeConfig,
    bias: bool,
    norm_before_residual: bool,
    norms: tuple[bool, bool],
    aux_layer_ids: set[int],
) -> None:
    ids = tuple(sorted(aux_layer_ids))
    head = eagle3_spec(
        layer=head_layer(rope, bias=bias),
        draft_vocab_size=100,
        target_hidden_size=4096,
        aux_layer_ids=ids,
        norm_before_residual=norm_before_residual,
        norm_before_head=norms[0],
        feeds_back_normed=norms[1],
    )
    path = write(tmp_path_factory.mktemp("head"), eagle3_config_json(head, dtype="bfloat16"))
    assert load_eagle3_config(path, target=TARGET) == head


def test_eagle_s_own_head_keeps_its_own_rope(tmp_path: Path) -> None:
    head = load_head(tmp_path, HEAD)
    assert head == eagle3_spec(
        layer=LAYER,
        draft_vocab_size=32000,
        target_hidden_size=4096,
        aux_layer_ids=(2, 16, 29),
        norm_before_residual=False,
    )


def test_draft_rope_theta_overrides_the_config(tmp_path: Path) -> None:
    head = load_head(tmp_path, HEAD | {"rope_theta": 1e6})
    assert head.layer.one_layer.attention.rope == RopeConfig(theta=1e6)
    head = load_head(tmp_path, HEAD | {"rope_theta": 1e6}, draft_rope_theta=1e4)
    assert head.layer.one_layer.attention.rope == RopeConfig(theta=1e4)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (2, 16, 29)),
        ({"eagle_config": {}}, (2, 16, 29)),
        ({"eagle_config": {AUX_IDS: [2, 16, 29]}}, (2, 16, 29)),
        ({"eagle_config": {AUX_IDS: [1, 15, 28]}}, (2, 16, 29)),
        ({"eagle_config": {AUX_IDS: [3, 17, 30]}}, (4, 18, 31)),  # SGLang adds one to all
        ({"eagle_config": {AUX_IDS: [0, 31]}}, (1, 32)),
        ({"eagle_config": {AUX_IDS: [20, 26, 32]}}, (20, 26, 32)),  # unless the last is L
        ({"eagle_config": {AUX_IDS: [2, 16, 29]}, AUX_IDS: [3, 17, 30]}, (3, 17, 30)),  # written so
        ({"eagle_config": {AUX_IDS: []}}, (2, 16, 29)),
        ({AUX_IDS: [1, 15, 31]}, (2, 16, 32)),
        ({AUX_IDS: [24, 30, 32]}, (24, 30, 32)),
        ({AUX_IDS: [0, 3]}, (0, 3)),
    ],
)
def test_both_aux_id_conventions_mean_inputs_of_layers(
    changes: dict[str, Any], expected: tuple[int, ...], tmp_path: Path
) -> None:
    assert load_head(tmp_path, HEAD | changes).aux_layer_ids == expected


@pytest.mark.parametrize("ids", [[], [2, 16, 33], [1, 15, 32], [-1, 2], ["2"], 2])
def test_aux_ids_outside_the_target_are_refused(ids: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=AUX_IDS):
        load_head(tmp_path, HEAD | {AUX_IDS: ids})


def test_a_shallow_target_has_no_default_aux_ids(tmp_path: Path) -> None:
    target = uniform_decoder(**(SIZES | {"num_layers": 6}))
    with pytest.raises(ConfigError, match="6 layers has no default"):
        load_eagle3_config(write(tmp_path, HEAD), target=target)


@pytest.mark.parametrize(
    "name", ["LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM"]
)
@pytest.mark.parametrize(("stored", "expected"), [(32000, 32000), (None, 128256)])
def test_plain_architectures_and_their_draft_vocabulary(
    name: str, stored: int | None, expected: int, tmp_path: Path
) -> None:
    head = load_head(tmp_path, HEAD | {"architectures": [name], "draft_vocab_size": stored})
    assert head.draft_vocab_size == expected


def test_the_speculators_layout(tmp_path: Path) -> None:
    head = load_head(tmp_path, SPECULATORS)
    assert head.layer == LAYER
    assert head.norm_before_residual
    assert not load_head(
        tmp_path, SPECULATORS | {"norm_before_residual": False}
    ).norm_before_residual
    assert load_head(tmp_path, HEAD | {"norm_before_residual": True}).norm_before_residual


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc is True and fc_norm is True"),
        ({"speculators_model_type": "dflash"}, "speculators_model_type is 'dflash'"),
        (
            {"transformer_layer_config": HEAD | {"model_type": "gemma2"}},
            "model_type is 'gemma2'; expected 'llama' or 'qwen3'",
        ),
        (
            {"transformer_layer_config": HEAD | {"final_logit_softcapping": 30.0}},
            "final_logit_softcapping is 30.0; expected no such key",
        ),
    ],
)
def test_speculators_variants_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_head(tmp_path, SPECULATORS | changes)


@pytest.mark.parametrize(
    ("values", "changes"),
    [
        (SPECULATORS | {"norm_output": True}, {"feeds_back_normed": True}),
        (SPECULATORS | {"norm_output": False}, {}),
        (SPECULATORS | {"norm_before_fc": True}, {"feature_norm": FeatureNorm.WHOLE}),
        (SPECULATORS | {"fc_norm": True}, {"feature_norm": FeatureNorm.EACH}),
        (SPECULATORS | {AUX_IDS: [1, 15, 28]}, {"aux_layer_ids": (1, 15, 28)}),  # inputs always
        (HEAD | {"norm_output": True}, {"feeds_back_normed": True}),
        (HEAD | {"norm_output": False}, {}),
        (HEAD | {"eagle_config": {"parallel_draft_heads_num_layers": 1}}, {}),
        (HEAD | {"eagle_config": {"use_last_layernorm": False}}, {"norm_before_head": False}),
        (HEAD | {"eagle_config": {"norm_before_fc": True}}, {"feature_norm": FeatureNorm.WHOLE}),
        (HEAD | {"fc_norm": True}, {"feature_norm": FeatureNorm.EACH}),
        (HEAD | {"eagle_config": {"use_aux_hidden_state": False}}, {"aux_layer_ids": ()}),
        (HEAD | {"bias": True}, {"fc_bias": True}),
        (HEAD | {"logit_scale": 0.5}, {"logit_scale": 0.5}),
    ],
)
def test_each_variant_is_a_property(
    values: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    usual = load_head(tmp_path, SPECULATORS if "transformer_layer_config" in values else HEAD)
    assert load_head(tmp_path, values) == replace(usual, **changes)


def test_the_layers_styles(tmp_path: Path) -> None:
    layer = HEAD | {"mlp_bias": True, "attention_bias": True, "num_hidden_layers": 3}
    plain = load_head(tmp_path, layer).layer
    assert plain.num_layers == 3
    attention, ffn = plain.one_layer.attention, plain.one_layer.ffn
    assert (attention.qkv_bias, attention.out_bias, attention.qk_norm) == (True, True, False)
    assert ffn == DenseSpec(inner=14336, bias=True)
    qwen2 = load_head(tmp_path, HEAD | {"qkv_bias": True}).layer.one_layer.attention
    assert (qwen2.qkv_bias, qwen2.out_bias) == (True, False)
    qwen3 = SPECULATORS | {"transformer_layer_config": HEAD | {"model_type": "qwen3"}}
    assert load_head(tmp_path, qwen3).layer.one_layer.attention.qk_norm


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm is True; expected"),
        (
            {"eagle_config": {"use_input_layernorm_in_first_layer": False}},
            "use_input_layernorm_in_first_layer is False; expected True",
        ),
        ({"eagle_config": {"parallel_draft_step": 4}}, "parallel_draft_step is 4; expected 1"),
        ({"eagle_config": {"hidden_scale": 2.0}}, "hidden_scale is 2.0; expected no such key"),
        ({"mask_token_id": 5}, "mask_token_id is 5; expected no such key: the head does not draft"),
        ({"residual_multiplier": 0.2}, "residual_multiplier is 0.2; expected no such key"),
        ({"norm_after_fc": True}, "norm_after_fc is True; expected no such key"),
        ({"layer_types": ["sliding_attention"]}, "layer_types has .*sliding.*expected 'full_att"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method .awq.; expected .fp8."),
        ({"architectures": ["LlamaForCausalLMEagle"]}, "architecture is 'LlamaForCausalLMEagle'"),
        (
            {"hidden_size": 2048, "target_hidden_size": 4096}
            | {"eagle_config": {"use_aux_hidden_state": False}},
            "hidden_size is 2048; expected the target's 4096, since a head without aux layers",
        ),
        ({"num_key_value_heads": 5}, "num_attention_heads is 32; expected a multiple"),
    ],
)
def test_plain_variants_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_head(tmp_path, HEAD | changes)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize("where", ["eagle_config", "transformer_layer_config", "top"])
@pytest.mark.parametrize(
    "name",
    [
        *("norm_before_residual", "norm_output", "logit_scale", "attention_bias", "mlp_bias"),
        *("bias", "qkv_bias", "fc_norm", "norm_before_fc", "use_last_layernorm"),
        *("draft_vocab_size", "truncated_vocab_size", "num_aux_hidden_states", AUX_IDS),
        *("use_aux_hidden_state", "eagle_config", "use_mtp_layernorm"),
    ],
)
def test_no_key_is_overlooked_where_nobody_looks_for_it(
    name: str, where: str, tmp_path: Path
) -> None:
    """Every setting, in every table of either layout, has an effect or is refused.

    Each gets a value that differs from the usual head's.
    """
    value: Any = {AUX_IDS: [3, 17, 30], "logit_scale": 0.5, "eagle_config": {"norm_output": True}}
    value |= {"draft_vocab_size": 64000, "truncated_vocab_size": 64000, "num_aux_hidden_states": 2}
    value |= {"use_last_layernorm": False, "use_aux_hidden_state": False}
    layouts: tuple[dict[str, Any], ...] = (HEAD, SPECULATORS)
    for usual in layouts:
        said, is_nested = value.get(name, True), "transformer_layer_config" in usual
        if where == "transformer_layer_config" and not is_nested:
            continue
        if is_nested and name == "norm_before_residual":
            said = False
        table = usual if where == "top" else usual.get(where, {})
        changed = {**table, name: said}
        values = changed if where == "top" else {**usual, where: changed}
        before = load_head(tmp_path, usual)
        refused: list[str] = []
        try:
            after = load_head(tmp_path, values)
        except (ConfigError, CheckpointError) as error:
            refused.append(str(error))
        if refused:
            assert name in refused[0] or "norm_output" in refused[0]
        else:
            assert after != before, f"{name} in {where} is {said}, and changes nothing"


def test_keys_that_say_nothing_of_the_forward_are_no_error(tmp_path: Path) -> None:
    said = {"norm_after_fc": False, "aux_loss": None, "transformers_version": "4.57.0", "pad": 3}
    assert load_head(tmp_path, HEAD | said) == load_head(tmp_path, HEAD)


def test_an_older_head_without_a_norm_before_lm_head_is_told_by_its_tensors(tmp_path: Path) -> None:
    said = HEAD | {"norm_output": False}
    for name, has_norm in (("fc.weight", False), ("norm.weight", True)):
        save_file({name: np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
        assert load_head(tmp_path, said).norm_before_head is has_norm


def test_what_is_not_normed_cannot_be_fed_back_normed(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"norm_output is True, but .*use_last_layernorm is False"
    ):
        load_head(tmp_path, HEAD | {"norm_output": True, "use_last_layernorm": False})


def test_an_eagle_1_head_is_refused(tmp_path: Path) -> None:
    values = {key: value for key, value in HEAD.items() if key != "draft_vocab_size"}
    with pytest.raises(ConfigError, match="draft_vocab_size is absent"):
        load_head(tmp_path, values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 151936}, "vocab_size is 151936; expected the target's 128256"),
        ({"hidden_size": 2048}, r"hidden_size\) is 2048; expected the target's 4096"),
        ({"target_hidden_size": 2048}, r"is 2048; expected the target's 4096"),
        ({"draft_vocab_size": 128257}, "draft_vocab_size is 128257; expected at most .* 128256"),
    ],
)
def test_a_head_of_another_target_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_head(tmp_path, HEAD | changes)


def test_a_narrower_head_names_its_target_s_width(tmp_path: Path) -> None:
    head = load_head(tmp_path, HEAD | {"hidden_size": 2048, "target_hidden_size": 4096})
    assert (head.layer.hidden_size, head.target_hidden_size) == (2048, 4096)
