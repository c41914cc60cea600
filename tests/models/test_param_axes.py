"""The sharding of every family's and head's weights, against tests/golden/param_specs.txt."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

from jspec.device.parallel import partition_spec
from jspec.errors import ConfigError
from jspec.files.json_files import Fields
from jspec.models.files.checkpoint import load_model_spec
from jspec.models.heads.head_params import head_params
from jspec.models.params import ParamSpec, ParamTable
from jspec.models.registry import DRAFTS, FAMILIES, family_named, table_of
from jspec.spec.axes import EXPERT, MESH_AXES, MODEL, TENSOR
from tests.models.test_hf_mtp import LAYOUTS, target_of
from tests.speculative.every_drafter import EAGLE1, EAGLE3

GOLDEN = Path(__file__).parents[1] / "golden"
SHARDS = (1, 2, 4)
NAMES = {None: "-", MODEL: "model", EXPERT: "expert", TENSOR: "tensor"}


def tables() -> Iterator[tuple[str, ParamTable]]:
    for config in sorted(GOLDEN.glob("families/*/config.json")):
        yield config.parent.name, table_of(load_model_spec(config.parent))
    for config in sorted(GOLDEN.glob("llama/*/config.json")):
        yield f"llama {config.parent.name}", table_of(load_model_spec(config.parent))
    yield "EAGLE", head_params(dataclasses.replace(EAGLE1, norms_pair=True, fc_bias=True))
    yield "EAGLE3", head_params(dataclasses.replace(EAGLE3, fc_bias=True))
    for layout, config in LAYOUTS.items():
        target = target_of(layout)
        mtp = DRAFTS.get(config["architectures"][0]) or family_named(target.family).mtp
        assert mtp is not None
        layers = mtp.read(Fields(Path("config.json"), config), target)
        yield f"NEXTN {layout}", head_params(layers, mtp.names(target))


def described(name: str, spec: ParamSpec) -> str:
    """Describe a weight's sharding.

    In:  the qkv product [64, 96] of layer 3, 2 kv heads of 16
    Out: "llama layers.*.attention.qkv.kernel - model | 64x96 64x96 64x128"
    """
    path = re.sub(r"\.\d+\.", ".*.", ".".join(map(str, spec.path)))
    axes = (*partition_spec(spec.axes), *(None,) * len(spec.shape))[: len(spec.shape)]
    axes_of = " ".join(NAMES[axis] for axis in axes)
    return f"{name}: {path} {axes_of} | {' '.join(shape_on(spec, n) for n in SHARDS)}"


def shape_on(spec: ParamSpec, shards: int) -> str:
    try:
        return "x".join(map(str, spec.physical_shape(shards)))
    except ConfigError:
        return "refused"


def test_weights_are_sharded_as_they_were() -> None:
    found = dict.fromkeys(described(name, spec) for name, table in tables() for spec in table)
    assert list(found) == (GOLDEN / "param_specs.txt").read_text().splitlines()


def test_every_family_is_here() -> None:
    names = {name.split()[0] for name, _ in tables()}
    assert {family.name for family in FAMILIES} - names <= {"mimo"}  # Qwen2's table


def test_axes_are_of_every_dimension_or_of_none() -> None:
    for name, table in tables():
        for spec in table:
            assert len(spec.axes) in (0, len(spec.shape)), (name, spec.path)
            assert set(spec.axes) <= {None, *MESH_AXES}, (name, spec.path)
