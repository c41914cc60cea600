"""The layer for multi-token prediction of Qwen3-Next and Qwen3.5, in a checkpoint of its own.

Full attention with a gate per query head dimension, RoPE on a part of each head, norms of q and k,
and a dense MLP. All norms are stored less one. The layer reads the target's hidden after the final
norm, and every draft level runs it again on its output after its final norm (family.feeds_normed).
Embedding and lm_head are the target's. These families are not served as targets, nor are the
experts of their larger layers.
"""

from __future__ import annotations

from dataclasses import replace

from jspec.errors import ConfigError
from jspec.files.json_files import Fields
from jspec.models.family import (
    FULL,
    OF_RECURRENT_LAYERS,
    MtpFamily,
    feeds_normed,
    masks_first,
    read_attention,
    read_dense,
    refuse_windows,
    without_partial_rotary,
)
from jspec.models.files.fp8 import check_quantization
from jspec.models.heads.head_params import HeadNames
from jspec.spec.head_spec import HeadSpec, mtp_spec
from jspec.spec.model_spec import HeadGate, LayerSpec, ModelSpec

NAMES = HeadNames(
    prefix="mtp.layers.{}.",
    around="mtp.",
    embed_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    fuse="fc",
    norm=("norm",),
    zero_centred=True,
)
LINEAR = "linear_attention"  # layer_types lists the target's layers


def read_alone(fields: Fields, target: ModelSpec) -> HeadSpec:
    """Read config.json, or its text_config if the model also reads images."""
    own = fields.table("text_config") if fields.get("text_config") else fields
    check_quantization(fields)
    name = "mtp_num_hidden_layers"
    if own.integer(name, 1) != 1:
        raise ConfigError(f"{own.path}: {name} is {own.get(name)}; expected 1, run at every level")
    own.refuse("num_experts", allowed=(0,), why="experts of such layers are not served")
    own.refuse("attn_output_gate", allowed=(True,), why="these layers gate what heads give")
    own.refuse("hidden_act", allowed=("silu", "swish"), why="only SwiGLU MLPs are served")
    own.refuse(
        "mtp_use_dedicated_embeddings", allowed=(False,), why="the target's embedding is used"
    )
    refuse_windows(own, kinds=(FULL, LINEAR))
    eps = own.number("rms_norm_eps", 1e-6)
    plain, factor = without_partial_rotary(own, default=0.25)
    attention = read_attention(
        plain, qk_norm=True, qkv_bias=own.flag("attention_bias", False), default_head_dim=256
    )
    attention = replace(
        attention, gate=HeadGate.OF_NUMBERS, rotary_dim=int(attention.head_dim * factor)
    )
    model = ModelSpec(
        vocab_size=own.integer("vocab_size"),
        hidden_size=own.integer("hidden_size"),
        layers=(LayerSpec(attention=attention, ffn=read_dense(own), eps=eps),),
        rms_norm_eps=eps,
        max_position=own.integer("max_position_embeddings", 32768),
        family=target.family,
    )
    return mtp_spec(
        layer=model,
        target_num_layers=target.num_layers,
        recurrent=True,
        feeds_back_normed=feeds_normed(own),
        zeroes_first=masks_first(own, False),
    )


ALONE = MtpFamily(
    read=read_alone,
    names=lambda _: NAMES,
    known=OF_RECURRENT_LAYERS | {"attn_output_gate"},
)
