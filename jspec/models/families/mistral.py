"""Mistral 7B and later models with the same layer (transformers' MistralForCausalLM), Ministral 3.

Every layer has the window `sliding_window`; null means full attention. The default is 4,096, and
full attention for Ministral 3. Mistral3ForConditionalGeneration wraps one of these or Mistral Small
4.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jspec.errors import ConfigError, shown
from jspec.files.json_files import Fields
from jspec.models.decoder_params import decoder_params
from jspec.models.families.latent import mistral4
from jspec.models.families.latent.mistral4 import NESTED, UNREAD, growth_json, read_growth
from jspec.models.family import (
    FULL,
    SLIDING,
    Family,
    decoder_json,
    read_attention,
    read_decoder,
    read_dense,
    read_windows,
    text_fields,
)
from jspec.models.files.w8a8 import check_quantization
from jspec.models.params import ParamTable, or_nested
from jspec.spec.model_spec import ModelSpec

WITH_IMAGES, MINISTRAL = "Mistral3ForConditionalGeneration", "Ministral3ForCausalLM"
KINDS = ("mistral", "ministral3", "mistral4")  # of the text model inside a model with images


def read(fields: Fields) -> ModelSpec:
    if fields.architecture() != WITH_IMAGES:
        return _decoder(fields, grows=fields.architecture() == MINISTRAL)
    own = text_fields(fields)
    kind = own.get("model_type") or "mistral"
    if kind not in KINDS:
        raise ConfigError(
            f"{fields.path}: model_type in text_config is {shown(kind)}; expected "
            f"{' or '.join(map(repr, KINDS))}"
        )
    return mistral4.read(own) if kind == "mistral4" else _decoder(own, grows=kind == "ministral3")


def _decoder(fields: Fields, *, grows: bool) -> ModelSpec:
    check_quantization(fields)
    default = None if grows else 4096
    window = None
    if fields.values.get("sliding_window", default) is not None:
        window = fields.integer("sliding_window", default)
    dense = read_dense(fields)
    attention = read_attention(fields)
    return read_decoder(
        fields,
        family=FAMILY.name,
        attention=replace(attention, growth=read_growth(fields)) if grows else attention,
        ffn=lambda _: dense,
        windows=read_windows(fields, window=window, default=lambda _: SLIDING if window else FULL),
        default_eps=1e-5 if grows else 1e-6,
    )


def table(spec: ModelSpec) -> ParamTable:
    return or_nested(decoder_params(spec), *NESTED)


def to_json(spec: ModelSpec) -> dict[str, Any]:
    attention = spec.one_layer.softmax_attention
    names = ("MistralForCausalLM", "mistral")
    if attention.growth is not None:
        names = (MINISTRAL, "ministral3")
    written = decoder_json(spec, architecture=names[0], model_type=names[1])
    return growth_json(written, attention) | {"sliding_window": attention.window}


FAMILY = Family(
    name="mistral",
    architectures=("MistralForCausalLM", MINISTRAL, WITH_IMAGES),
    read=read,
    to_json=to_json,
    table=table,
    unread=UNREAD,
)
