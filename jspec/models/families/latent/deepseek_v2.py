"""DeepSeek V2 and V2-Lite (DeepseekV2ForCausalLM): V3 with softmax routers without a bias.

`topk_method` selects among all experts or those of the best groups. The selected weights are
multiplied by routed_scaling_factor and never normalized.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jspec.files.json_files import Fields
from jspec.models.families.latent.deepseek_v3 import (
    after_dense,
    latent_json,
    moe_json,
    read_latent_decoder,
    read_moe,
)
from jspec.models.family import Family
from jspec.spec.layers.feed_forward import MoESpec, Routing
from jspec.spec.model_spec import ModelSpec

GREEDY, GROUPED = "greedy", "group_limited_greedy"


def read(fields: Fields) -> ModelSpec:
    fields.refuse("scoring_func", allowed=("softmax",), why="this family's router has a softmax")
    fields.refuse("topk_method", allowed=(GREEDY, GROUPED), why="no other choice is built")
    fields.refuse("norm_topk_prob", allowed=(False,), why="the weights are not normalized")
    fields.refuse("mlp_bias", allowed=(False,), why="MLPs have no biases here")
    fields.refuse("rope_interleave", allowed=(True,), why="RoPE rotates pairs of neighbours here")

    def moe() -> MoESpec:
        plain = read_moe(fields, Routing.SOFTMAX_THEN_TOP)
        if fields.get("topk_method") != GROUPED:
            return plain
        groups = fields.integer("n_group"), fields.integer("topk_group")
        return replace(plain, num_groups=groups[0], top_groups=groups[1])

    return read_latent_decoder(
        fields,
        range(fields.integer("num_hidden_layers")),
        family=FAMILY.name,
        ffn=after_dense(fields, moe, default_dense=0),
    )


def to_json(spec: ModelSpec) -> dict[str, Any]:
    written = latent_json(spec, architecture="DeepseekV2ForCausalLM", model_type="deepseek_v2")
    written |= moe_json(spec)
    is_grouped = written.get("n_group", 1) > 1
    return written | {"topk_method": GROUPED if is_grouped else GREEDY}


FAMILY = Family(
    name="deepseek_v2", architectures=("DeepseekV2ForCausalLM",), read=read, to_json=to_json
)
