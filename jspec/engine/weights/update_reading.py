"""Reads new weights completely, from a checkpoint or from arrays, and checks that they fit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jspec.device import hosts
from jspec.device.parallel import Parallel, devices_of_rank
from jspec.device.weights import Weight
from jspec.engine.memory.device_memory import gib, least_memory
from jspec.engine.weights.loading import LoadedModels
from jspec.engine.weights.named_weights import NamedWeights
from jspec.engine.weights.target_copies import warn_of_other_targets
from jspec.engine.weights.weight_checks import Finite, as_host, differences
from jspec.engine.weights.weight_stream import put_on, put_parts_on, stream
from jspec.engine.weights.weight_switch import (
    Leaf,
    flat_leaves,
)
from jspec.errors import (
    CheckpointError,
    ConfigError,
    JspecError,
    reason_of,
)
from jspec.messages.weight_update import (
    ArrayUpdate,
    DiskUpdate,
    Model,
)
from jspec.models.files.array_tensors import LazyTensor, in_memory
from jspec.models.files.checkpoint import (
    check_directory,
    check_target,
    load_model_spec,
    load_target,
)
from jspec.models.files.published import changed_reads, layouts_by_name
from jspec.models.files.stored.param_reads import ParamRead
from jspec.models.params import ParamPath, ParamSpec
from jspec.spec.weight_format import num_bytes
from jspec.speculative.drafters.source import DraftSource

HasRoom = Callable[[int], bool]
GIVEN = "the given tensors"


class UpdateReader:
    def __init__(
        self,
        models: LoadedModels,
        *,
        mesh: Mesh,
        dtype: np.dtype[Any],
        has_room: HasRoom | None = None,  # None: for at most half of the free memory
    ) -> None:
        self._models, self._mesh, self._dtype = models, mesh, dtype
        self._shards = Parallel.of(mesh).model
        self._has_room = has_room or self._is_half_of_free
        self._put = put_on(mesh, column_major=models.target.ops.column_major)
        self._put_parts = put_parts_on(mesh)

    def read(
        self, update: DiskUpdate | ArrayUpdate, served: NamedWeights
    ) -> tuple[dict[ParamPath, Leaf], DraftSource]:
        """Return the new weights, on the devices or the host, and their draft's source. Raises
        ConfigError, CheckpointError, and OSError for a file that cannot be read."""
        found = Finite()
        if isinstance(update, DiskUpdate):
            new, source = self._from_disk(update, served, found)
        else:
            new, source = self._from_arrays(update, served, found), served.source
        found.check()
        return new, source

    def _is_half_of_free(self, needed: int) -> bool:
        """Leave the other half to steps that run meanwhile. A CPU has no limit."""
        devices = devices_of_rank(self._mesh)
        memory = least_memory(self._mesh.local_devices)
        return memory is None or 2 * math.ceil(needed / len(devices)) <= memory.free

    def _place(self, reads: Sequence[ParamRead], found: Finite) -> Mapping[ParamPath, Any]:
        needed = sum(
            num_bytes(spec.format_in(self._dtype), spec.physical_shape(self._shards))
            for each in reads
            for spec in (each.spec, each.tied)
            if spec is not None
        )
        has_room = self._has_room(needed)
        if not has_room and not hosts.is_one_process(self._mesh):
            raise ConfigError(
                f"new weights take {gib(needed)} over all devices, more than half of what is free; "
                "expected room for both models where several hosts share one"
            )
        own = hosts.own_shards(self._mesh)
        if not has_room:
            return stream(reads, found.checking(_on_host), own=own)
        put_parts = found.checking_parts(self._put_parts)
        return stream(reads, found.checking(self._put), put_parts=put_parts, own=own)

    def _from_disk(
        self, update: DiskUpdate, served: NamedWeights, found: Finite
    ) -> tuple[dict[ParamPath, Any], DraftSource]:
        models, faults, source = self._models, [], served.source
        if update.target is not None:
            faults += _fault(lambda: self._check_target(Path(update.target or "")))
        if update.draft is not None:
            path = Path(update.draft)
            source, more = self._draft_source(path, served.source)
            faults += more
        if faults:
            raise CheckpointError("\n".join(faults))
        new: dict[ParamPath, Any] = {}
        read: dict[str, Any] = {}  # the new target's params

        def place(reads: Sequence[ParamRead]) -> Mapping[ParamPath, Any]:
            return self._place(reads, found)

        if update.target is not None:
            read = load_target(
                Path(update.target),
                models.target.spec,
                dtype=self._dtype,
                shards=self._shards,
                place=place,
                formats=models.target.formats,
                experts=models.target.experts,
            )
            new |= flat_leaves({Model.TARGET.value: read})
        if update.draft is not None:
            drafts = dict(source.read(served.params["target"], self._dtype, place))
            if update.draft != update.target:
                target = read or served.params["target"]
                warn_of_other_targets(Path(update.draft), source, target)
            new |= flat_leaves({Model.DRAFT.value: drafts}, shares=source.shares)
        return new, source

    def _check_target(self, path: Path) -> None:
        check_directory("model_path", path)
        served, formats = self._models.target.spec, self._models.target.formats
        spares = self._models.request.args.expert_spares
        spec = self._models.request.on_devices(load_model_spec(path), spares=spares)
        ends = {name: getattr(served, name) for name in ("eos_token_ids", "bos_token_id")}
        other = differences(served, dataclasses.replace(spec, **ends))
        lines = [f"config.json: {line}" for line in other]
        lines += _fault(lambda: check_target(path, served, formats=formats))
        if lines:
            raise CheckpointError("\n  ".join((f"{path}: not weights of the served model", *lines)))

    def _draft_source(self, path: Path, source: DraftSource) -> tuple[DraftSource, list[str]]:
        models = self._models
        if models.request.path is None:
            algorithm = models.config.algorithm.name
            raise ConfigError(
                f"the update has a draft, but speculative_algorithm is {algorithm}, without one; "
                "expected target weights only"
            )
        found: list[DraftSource] = []

        def read() -> None:
            check_directory("speculative_draft_model_path", path)
            args = dataclasses.replace(models.request.args, load_format="auto")
            found.append(
                models.read_source(dataclasses.replace(models.request, args=args, path=path))
            )
            ops, shard = models.target.ops, models.target.shard
            lines = differences(models.drafter, found[0].make(ops, shard))
            if lines:
                raise CheckpointError(
                    "\n  ".join((f"{path}: not weights of the draft that is served", *lines))
                )

        faults = _fault(read)
        return (found[0] if found else source), faults

    def _from_arrays(
        self, update: ArrayUpdate, served: NamedWeights, found: Finite
    ) -> dict[ParamPath, Any]:
        if not update.arrays:
            raise CheckpointError(f"{GIVEN}: there are none; expected at least one")
        new: dict[ParamPath, Any] = {}
        faults: list[str] = []
        reads: dict[Model, list[ParamRead]] = {}
        for model, given in _by_model(update, served).items():

            def read(model: Model = model, given: dict[str, LazyTensor] = given) -> None:
                reads[model] = changed_reads(
                    f"{GIVEN} ({model.value})",
                    given,
                    served.table(model),
                    served.arrays(model),
                    dtype=self._dtype,
                    shards=self._shards,
                )

            faults += _fault(read)
        if faults:
            raise CheckpointError("\n".join(faults))
        for model, changed in reads.items():
            placed = self._place(changed, found)
            new |= {(model.value, *path): leaf for path, leaf in placed.items()}
        return new


def _by_model(update: ArrayUpdate, served: NamedWeights) -> dict[Model, dict[str, LazyTensor]]:
    """Split arrays by model; an unknown name goes to the target, where it is an error."""
    # A draft's copies of target tensors are skipped, as when files are read.
    known = {model: layouts_by_name(served.table(model)) for model in (Model.TARGET, Model.DRAFT)}
    whose: dict[Model, dict[str, LazyTensor]] = {}
    both: list[str] = []
    for name, array in update.arrays.items():
        stored = served.source.canonical(name)
        is_drafts = name not in known[Model.TARGET] and stored in known[Model.DRAFT]
        model = update.model or (Model.DRAFT if is_drafts else Model.TARGET)
        if update.model is Model.DRAFT and stored in served.source.unread:
            continue
        both += [name] * (name in known[Model.TARGET] and name in known[Model.DRAFT])
        named = stored if model is Model.DRAFT else name
        given = whose.setdefault(model, {})
        if named in given:
            raise CheckpointError(f"{GIVEN}: {name} is a second {named}")
        given[named] = in_memory(as_host(name, array))
    if update.model is None and both and Model.DRAFT in whose:
        raise CheckpointError(
            f"{GIVEN}: {both[0]} is a tensor of the target and of the draft, and "
            f"{next(iter(whose[Model.DRAFT]))} one of the draft alone; expected a selector"
        )
    return whose


def _on_host(_: ParamSpec, value: Weight) -> Weight:
    return value


def _fault(run: Callable[[], object]) -> list[str]:
    try:
        run()
    except JspecError as error:
        return [str(error)]
    except OSError as error:
        return [unreadable(error)]
    return []


def unreadable(error: OSError) -> str:
    named = "a file of the checkpoint" if error.filename is None else error.filename
    return f"{named}: cannot be read: {reason_of(error)}"
