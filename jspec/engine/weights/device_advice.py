"""Advice on a checkpoint's layout on the user's devices, from its headers."""

from __future__ import annotations

from pathlib import Path

from jspec.config.engine_args import EngineArgs
from jspec.engine.memory.parallel_choices import Advice, Load, Served, advise
from jspec.engine.weights.checkpoint_info import CheckpointInfo, served_draft
from jspec.engine.weights.resident_formats import Wanted, resident_formats
from jspec.errors import ConfigError
from jspec.layers.linear import Shard
from jspec.models.files.checkpoint import load_model_spec
from jspec.models.files.kv_scales import AUTO, cached_dtype
from jspec.models.files.tensor_files import has_tensors
from jspec.models.params import ParamTable, with_formats
from jspec.models.registry import table_of
from jspec.pallas_kernels.ops import Ops
from jspec.spec.accelerators import DeviceGroup
from jspec.spec.model_spec import cache_groups, cached_in


def advise_for(
    info: CheckpointInfo,
    group: DeviceGroup,
    load: Load,
    *,
    target: Path | None = None,
    quantization: str | None = None,
    kv_cache_dtype: str = AUTO,
) -> Advice:
    """Compare the layouts of the checkpoint that `describe` found, with `describe`'s arguments.

    Raises ConfigError for a draft without its target, and JspecError for files that cannot be read.
    """
    path = Path(info.path)
    if info.kind == "draft" and target is None:
        raise ConfigError(
            f"--devices is given for {path}, a draft, which is served with its target; expected "
            f"--target too"
        )
    of_target = path if target is None else target
    spec = load_model_spec(of_target)
    table = table_of(spec)
    draft: ParamTable = ()
    groups = cache_groups(cached_in(spec, cached_dtype(kv_cache_dtype, of_target)), name="target")
    if info.kind == "draft":
        source, _ = served_draft(info.algorithm, path, of_target)
        drafter = source.make(Ops(), Shard())
        draft = tuple(own for own in drafter.table if own.path[0] not in source.shares)
        groups += drafter.cache_groups

    def tables(shards: int) -> tuple[ParamTable, ParamTable]:
        wanted = Wanted(
            value=quantization,
            bundle=group.accelerator.platform,
            dtype=info.dtype,
            shards=shards,
        )
        found = resident_formats(of_target, table, wanted, has_files=has_tensors(of_target))
        return with_formats(table, found), draft

    served = Served(spec=spec, groups=groups, tables=tables, dtype=info.dtype)
    return advise(served, group, load, fraction=EngineArgs().mem_fraction_static)
