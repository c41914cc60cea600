"""Layers of one's own as two families publish them, small and random, with a float64 reference.

What plain layers have not: a window that is shorter than the rows; K wider than V, scaled values
and sinks (MiMo-V2-Flash); more heads than the target's, norms of q and k, gated heads, a limit in
the MLP and an lm_head a layer (Step-3.5-Flash).
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from jspec.files.json_files import Fields
from jspec.models.decoder import Params
from jspec.models.files.stored import stored_tensors
from jspec.models.heads.head_params import HeadNames, head_params
from jspec.models.registry import family_named
from jspec.spec.head_spec import HeadSpec
from tests.models.mimo_v2_reference import MimoV2Layers
from tests.models.mtp_reference import F64, MtpReference
from tests.speculative.engines import TARGET
from tests.speculative.mtp_checkpoints import CONFIGS, drawn
from tests.speculative.mtp_published import PUBLISHED

FAMILIES = ("mimo_v2", "step3p5")  # with several layers
PUBLISHED_LAYERS = (*FAMILIES, "mimo")  # which has one


@dataclass(frozen=True, kw_only=True)
class MimoV2Rows(MimoV2Layers):
    """Its layers with what they cache: turned keys, and scaled values padded to their width."""

    def keys_and_values(self, layer: int, x: F64) -> tuple[F64, F64]:
        config, own = self.target.config, f"{self.prefix.format(layer)}self_attn."
        normed = self.target.norm(x, f"{self.prefix.format(layer)}input_layernorm")
        k, v = (
            (normed @ self.target.weight(f"{own}{part}_proj.weight").T).reshape(len(x), -1, width)
            for part, width in (("k", config["head_dim"]), ("v", config["v_head_dim"]))
        )
        k = self.target.rotated(k, config["swa_rope_theta"])
        padding = config["head_dim"] - config["v_head_dim"]
        v = np.pad(v * config["attention_value_scale"], ((0, 0), (0, 0), (0, padding)))
        return k.swapaxes(0, 1), v.swapaxes(0, 1)


@functools.cache
def published_config(family: str) -> tuple[HeadSpec, HeadNames]:
    """The layers as the family reads them, over the tiny target, and their names."""
    own, fields = family_named(family), Fields(Path("config.json"), CONFIGS[family])
    assert own.mtp is not None
    spec = own.read(fields)
    config = own.mtp.read(fields, spec)
    ids = (TARGET.num_layers,) if config.aux_layer_ids else ()
    return dataclasses.replace(config, aux_layer_ids=ids), own.mtp.names(spec)


@functools.cache
def published_params(family: str) -> Params:
    """Random weights: norms away from 1, sinks from 0."""
    return drawn(head_params(*published_config(family)), seed=5)


@functools.cache
def published_reference(family: str) -> MtpReference:
    config, names = published_config(family)
    params = published_params(family)
    table = tuple(spec for spec in head_params(config, names) if spec.layouts)
    tensors = dict(stored_tensors(table, params, dtype=np.float32))
    embed = np.asarray(params["embed"]["table"])
    tensors["model.embed_tokens.weight"] = embed
    lent = np.zeros_like(embed) if config.own_head else np.asarray(params["lm_head"]["kernel"]).T
    tensors["lm_head.weight"] = np.ascontiguousarray(lent)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        save_file(tensors, path / "model.safetensors")
        found = PUBLISHED[family].reference(path, CONFIGS[family], num_layers=config.num_layers)
    if isinstance(found, MimoV2Layers):
        own = {each.name: getattr(found, each.name) for each in dataclasses.fields(found)}
        return MimoV2Rows(**own)
    return found
