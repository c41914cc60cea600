"""Separate layers as two families publish them, small and random, with a float64 reference.

They have features that plain layers lack: a window shorter than the rows; K wider than V, scaled
values and sinks (MiMo-V2-Flash); more heads than the target's, norms of q and k, gated heads, a
limit in the MLP and an lm_head per layer (Step-3.5-Flash).
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from jspec.files.json_files import Fields
from jspec.models.files.stored.tensors import stored_tensors
from jspec.models.heads.head_params import HeadNames, head_params
from jspec.models.layer import Params
from jspec.models.registry import family_named
from jspec.spec.head_spec import HeadSpec
from tests.models.mtp_reference import MtpReference
from tests.speculative.engines import TARGET
from tests.speculative.mtp_checkpoints import CONFIGS, drawn
from tests.speculative.mtp_published import PUBLISHED

FAMILIES = ("mimo_v2", "step3p5")  # with several layers
PUBLISHED_LAYERS = (*FAMILIES, "mimo")  # which has one


@functools.cache
def published_config(family: str) -> tuple[HeadSpec, HeadNames]:
    """Return the layers as the family reads them, over the tiny target, and their names."""
    own, fields = family_named(family), Fields(Path("config.json"), CONFIGS[family])
    assert own.mtp is not None
    spec = own.read(fields)
    config = own.mtp.read(fields, spec)
    ids = (TARGET.num_layers,) if config.aux_layer_ids else ()
    return dataclasses.replace(config, aux_layer_ids=ids), own.mtp.names(spec)


@functools.cache
def published_params(family: str) -> Params:
    """Draw random weights: norms away from 1, sinks from 0."""
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
        return PUBLISHED[family].reference(path, CONFIGS[family], num_layers=config.num_layers)
