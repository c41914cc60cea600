"""The registry of model families: architecture name -> family, family name -> weights."""

from __future__ import annotations

import difflib
from pathlib import Path

from jspec.errors import ConfigError
from jspec.files.json_files import Fields
from jspec.models.families import (
    gemma4,
    glm4_moe,
    gpt_oss,
    llama,
    mimo,
    mimo_v2,
    minimax_m2,
    mistral,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
    step3p5,
)
from jspec.models.families.latent import (
    deepseek_v2,
    deepseek_v3,
    deepseek_v32,
    glm4_moe_lite,
    glm_moe_dsa,
    mistral4,
)
from jspec.models.family import Family, MtpFamily
from jspec.models.params import ParamTable
from jspec.spec.model_spec import ModelSpec

FAMILIES: list[Family] = [
    llama.FAMILY,
    mistral.FAMILY,
    mistral4.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    qwen3_moe.FAMILY,
    qwen3_next.FAMILY,
    qwen3_5.FAMILY,
    gpt_oss.FAMILY,
    mimo.FAMILY,
    mimo_v2.FAMILY,
    step3p5.FAMILY,
    glm4_moe.FAMILY,
    glm4_moe_lite.FAMILY,
    deepseek_v2.FAMILY,
    deepseek_v3.FAMILY,
    deepseek_v32.FAMILY,
    glm_moe_dsa.FAMILY,
    minimax_m2.FAMILY,
    gemma4.FAMILY,
]

# Architectures of checkpoints with only a layer for multi-token prediction.
DRAFTS: dict[str, MtpFamily] = {
    "DeepseekV3ForCausalLMNextN": glm4_moe.ALONE,
    "Glm4MoeForCausalLMNextN": glm4_moe.ALONE,
    "Qwen3NextForCausalLMMTP": qwen3_next.MTP,
    "Qwen3_5ForCausalLMMTP": qwen3_next.MTP,
}

# Block drafters: architectures and speculators' model types, and the kind of each.
BLOCKS: dict[str, str] = {
    "DFlashDraftModel": "dflash",
    "MuseGlimmerAssistantModel": "dflash",
    "DSparkDraftModel": "dspark",
    "Qwen3DSparkModel": "dspark",
    "DFlash2DraftModel": "dflash2",
    "DFlash2BeamDraftModel": "dflash2",
    "dflash": "dflash",
    "dflash2": "dflash2",
    "dspark": "dspark",
}

# Draft models that read the caches of Gemma 4: of the plain and the unified kind.
ASSISTANTS = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")

LLAMA4 = (
    "attention within chunks, layers without RoPE, norms after RoPE, a scale of queries that grows "
    "with the position and experts whose inputs are weighted (Llama 4)"
)
# Known architectures that are refused, and the missing features.
NOT_BUILT: dict[str, str] = {
    "DeepseekV4ForCausalLM": "compressed sparse attention and hyper-connections (DeepSeek-V4)",
    "KimiLinearForCausalLM": "delta attention (Kimi Linear)",
    "KimiK3ForConditionalGeneration": "delta attention and sparse attention (Kimi-K3)",
    "Glm5NextForConditionalGeneration": "delta attention and sparse attention (GLM-5.3-Flash)",
    "MuseSparkForConditionalGeneration": "the decoder of Muse Spark",
    "Llama4ForCausalLM": LLAMA4,
    "Llama4ForConditionalGeneration": LLAMA4,
    "NemotronHForCausalLM": "Mamba-2 layers, and layers of one mixer or one MLP (Nemotron-H)",
}


def register(family: Family) -> None:
    """Add a family in this process. Call it before an engine reads a checkpoint of the family."""
    FAMILIES.append(family)


def architectures() -> tuple[str, ...]:
    return tuple(name for family in FAMILIES for name in family.architectures)


def draft_algorithm(fields: Fields) -> str | None:
    """Return SGLang's name of the algorithm for a draft's config.json; None for a target."""
    names = fields.get("architectures")
    name = names[0] if isinstance(names, list) and names else ""
    if fields.get("speculators_model_type") in ("eagle3", "peagle") or "Eagle3" in str(name):
        return "EAGLE3"
    if "PEagle" in str(name):
        return "EAGLE3"
    if (fields.get("speculators_model_type") or name) in BLOCKS:
        return "DFLASH"
    if name in DRAFTS:
        return "NEXTN"
    if name in ASSISTANTS:
        return "FROZEN_KV_MTP"
    return "EAGLE" if "Eagle" in str(name) else None


def family_of(architecture: str, path: Path) -> Family:
    """Return the family of a checkpoint's architecture. Raises ConfigError if it is not served."""
    for family in FAMILIES:
        if architecture in family.architectures:
            return family
    if architecture in NOT_BUILT:
        raise ConfigError(
            f"{path}: architecture is {architecture!r}, which is known and not built: "
            f"{NOT_BUILT[architecture]}"
        )
    known = architectures()
    near = difflib.get_close_matches(architecture, known, n=1)
    hint = f" (the nearest is {near[0]})" if near else ""
    raise ConfigError(
        f"{path}: architecture is {architecture!r}; expected one of {', '.join(known)}{hint}"
    )


def family_named(name: str) -> Family:
    """Return the family of ModelSpec.family. Raises ConfigError for an unknown name."""
    found = next((family for family in FAMILIES if family.name == name), None)
    if found is None:
        names = ", ".join(family.name for family in FAMILIES)
        raise ConfigError(f"model family is {name!r}; expected one of {names}")
    return found


def table_of(spec: ModelSpec) -> ParamTable:
    return family_named(spec.family).table(spec)
