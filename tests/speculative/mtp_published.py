"""Facts about each published layer for multi-token prediction, independent of jspec's own reading.

Written by hand from SGLang's and vLLM's loaders and forwards, so that a family that is read wrongly
(another order, another norm, a tensor under another's name) differs from its float64 forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from tests.models.deepseek_reference import DeepseekLayers
from tests.models.glm_reference import GlmLayers
from tests.models.mimo_v2_reference import MimoV2Layers, MimoV2Reference
from tests.models.mtp_reference import MtpReference
from tests.models.qwen3_next_reference import Qwen3NextLayers
from tests.models.step_reference import StepLayers

ATTENTION = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")
BIASES = ("q_proj.bias", "k_proj.bias", "v_proj.bias")
QK_NORMS = ("q_norm.weight", "k_norm.weight")
LATENT = tuple(
    f"{name}.weight"
    for name in (
        *("q_a_proj", "q_a_layernorm", "q_b_proj", "o_proj"),
        *("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"),
    )
)
INDEXER = (
    *(f"indexer.{name}.weight" for name in ("wq_b", "wk", "k_norm", "weights_proj")),
    "indexer.k_norm.bias",
)
MLP = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
EXPERTS = tuple(f"experts.{e}.{part}" for e in range(6) for part in MLP)
MIXTURE = ("gate.weight", "gate.e_score_correction_bias", *EXPERTS)
Fields = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Published:
    """One layout. prefix: of a layer, with a place for its number; first: the number of layer 0.

    around: tensors around a layer, if they differ. names: those that differ from enorm, hnorm,
    eh_proj, final_layernorm, shared_head.output and post_attention_layernorm.
    attention, mlp: the tensors of layer 0. make: the forward, from config.json and all tensors.
    """

    prefix: str
    first: Callable[[Fields], int] = lambda _: 0
    around: str | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    attention: tuple[str, ...] = ATTENTION
    mlp: tuple[str, ...] = MLP
    recurrent: bool = False
    chained: bool = False
    hidden_first: bool = False
    reads_normed: bool = True
    feeds_normed: bool = False
    own_heads: bool = False
    zeroes_first: bool = False
    theta: Callable[[Fields], float] = lambda fields: float(fields["rope_theta"])
    make: Callable[..., MtpReference] = lambda _, **settings: MtpReference(**settings)

    def tensor_names(self, fields: Fields, num_layers: int) -> set[str]:
        """Return all of a file's tensors of the layers."""
        found = set()
        for layer in range(num_layers):
            own = self.prefix.format(self.first(fields) + layer)
            outer = own if self.around is None else self.around
            head = ("shared_head.output",) if self.own_heads else ()
            for name in ("enorm", "hnorm", "eh_proj", "final_layernorm", *head):
                found.add(f"{outer}{self.names.get(name, name)}.weight")
            for name in ("input_layernorm", "post_attention_layernorm"):
                found.add(f"{own}{self.names.get(name, name)}.weight")
            found |= {f"{own}self_attn.{name}" for name in self.attention}
            found |= {f"{own}mlp.{name}" for name in self.mlp}
        return found

    def reference(
        self, path: Path, fields: Fields, *, num_layers: int, target: Path | None = None
    ) -> MtpReference:
        """Return the layers in float64. target: file of embedding and lm_head, if not in `path`."""
        tensors = flat_tensors(path)
        of_target = tensors if target is None else flat_tensors(target)
        tensors["embed.weight"] = of_target["model.embed_tokens.weight"]
        tensors["head.weight"] = of_target["lm_head.weight"]
        for layer in range(num_layers):  # counted from 0, as the reference does
            prefix = self.prefix.format(self.first(fields) + layer)
            for before in (self.around or prefix, prefix):
                tensors |= {
                    f"own.{layer}.{name.removeprefix(before)}": tensors[name]
                    for name in self.tensor_names(fields, num_layers)
                    if name.startswith(before)
                }
        fields = fields.get("text_config", fields)
        return self.make(
            fields,
            tensors=tensors,
            prefix="own.{}.",
            head_dim=fields.get("head_dim"),
            theta=self.theta(fields),
            eps=fields.get("rms_norm_eps", fields.get("layernorm_epsilon")),
            chained=self.chained,
            hidden_first=self.hidden_first,
            feeds_normed=self.feeds_normed,
            own_heads=self.own_heads,
            zeroes_first=self.zeroes_first,
            names=self.names,
        )


def flat_tensors(path: Path) -> dict[str, Any]:
    """A file's tensors; those of a text model inside of another have a text model's names."""
    stored = load_file(path / "model.safetensors").items()
    return {name.replace("model.language_model.", "model."): value for name, value in stored}


def after_the_target(fields: Fields) -> int:
    return int(fields["num_hidden_layers"])


def mimo_v2_layers(fields: Fields, **settings: Any) -> MtpReference:
    own = MimoV2Reference(config=dict(fields), tensors=settings["tensors"])
    return MimoV2Layers(target=own, **settings)


def step_layers(fields: Fields, **settings: Any) -> MtpReference:
    limit = fields["swiglu_limits_shared"][after_the_target(fields)]
    return StepLayers(window=fields["sliding_window"], limit=limit, **settings)


def with_experts(make: Callable[..., GlmLayers], rotary: float) -> Callable[..., MtpReference]:
    """rotary: the share of each head that RoPE rotates, if config.json does not give it."""

    def made(fields: Fields, **settings: Any) -> MtpReference:
        rope = fields.get("rope_parameters") or fields
        share = rope.get("partial_rotary_factor")
        return make(
            rotary=int(fields["head_dim"] * (rotary if share is None else share)),
            top_k=fields.get("num_experts_per_tok", 0),
            scale=fields.get("routed_scaling_factor", 1.0),
            **settings,
        )

    return made


def deepseek_layers(fields: Fields, **settings: Any) -> MtpReference:
    own = {"top_k": fields["num_experts_per_tok"], "scale": fields["routed_scaling_factor"]}
    return DeepseekLayers(config=fields, rotary=0, **own, **settings)


SPARSE = Published(
    prefix="model.layers.{}.",
    first=after_the_target,
    names={"final_layernorm": "shared_head.norm"},
    attention=(*LATENT, *INDEXER),
    mlp=(*MIXTURE, *(f"shared_experts.{part}" for part in MLP)),
    recurrent=True,
    feeds_normed=True,
    make=deepseek_layers,
)
DEEPSEEK, QWEN = "DeepseekV3ForCausalLMNextN", "Qwen3_5ForCausalLMMTP"
SHARED = ("shared_expert_gate.weight", *(f"shared_expert.{part}" for part in MLP))
QWEN_LAYER = Published(
    prefix="mtp.layers.{}.",
    around="mtp.",
    names={
        "enorm": "pre_fc_norm_embedding",
        "hnorm": "pre_fc_norm_hidden",
        "eh_proj": "fc",
        "final_layernorm": "norm",
    },
    attention=(*ATTENTION, *BIASES, "o_proj.bias", *QK_NORMS),
    recurrent=True,
    feeds_normed=True,
    make=with_experts(Qwen3NextLayers, 0.25),
)
PUBLISHED = {
    "mimo": Published(
        prefix="model.mtp_layers.{}.",
        names={"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj"},
        attention=(*ATTENTION, *BIASES),
        recurrent=True,
        hidden_first=True,
        feeds_normed=True,
        zeroes_first=True,
    ),
    "mimo_v2": Published(
        prefix="model.mtp.layers.{}.",
        names={"post_attention_layernorm": "pre_mlp_layernorm"},
        attention=(*ATTENTION, "attention_sink_bias"),
        reads_normed=False,
        theta=lambda fields: float(fields["swa_rope_theta"]),
        make=mimo_v2_layers,
    ),
    "step3p5": Published(
        prefix="model.layers.{}.",
        first=after_the_target,
        names={
            "final_layernorm": "transformer.shared_head.norm",
            "shared_head.output": "transformer.shared_head.output",
        },
        attention=(*ATTENTION, *QK_NORMS, "g_proj.weight"),
        chained=True,
        reads_normed=False,
        own_heads=True,
        theta=lambda fields: float(fields["rope_theta"][after_the_target(fields)]),
        make=step_layers,
    ),
    "glm4_moe": Published(
        prefix="model.layers.{}.",
        first=after_the_target,
        names={"final_layernorm": "shared_head.norm"},
        attention=(*ATTENTION, *BIASES, *QK_NORMS),
        mlp=(*MIXTURE, *(f"shared_experts.{part}" for part in MLP)),
        recurrent=True,
        feeds_normed=True,
        make=with_experts(GlmLayers, 0.5),
    ),
    "deepseek_v3": replace(SPARSE, attention=LATENT),
    "deepseek_v32": SPARSE,
    "glm_moe_dsa": replace(
        SPARSE, theta=lambda fields: float(fields["rope_parameters"]["rope_theta"])
    ),
    DEEPSEEK: Published(
        prefix="model.layers.{}.",
        names={"final_layernorm": "shared_head.norm"},
        attention=(*ATTENTION, *BIASES),
        recurrent=True,
        feeds_normed=True,
        make=with_experts(GlmLayers, 1.0),
    ),
    QWEN: QWEN_LAYER,
    "qwen3_next": replace(
        QWEN_LAYER,
        attention=(*ATTENTION, *QK_NORMS),
        mlp=("gate.weight", *EXPERTS, *SHARED),
    ),
    "qwen3_5": replace(
        QWEN_LAYER,
        attention=(*ATTENTION, *QK_NORMS),
        theta=lambda fields: float(fields["rope_parameters"]["rope_theta"]),
    ),
}
