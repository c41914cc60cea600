"""The served weights: read by published names, and replaced by weights of the same shapes.

An update is read and checked completely before the switch, onto the devices if both models fit
there, else onto the host. Compiled programs take weights as arguments and stay.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jspec.device import hosts
from jspec.device.parallel import Parallel, devices_of_rank
from jspec.device.weights import Weight
from jspec.engine.memory.device_memory import gib, least_memory
from jspec.engine.weights.adapters import AdapterSlots, Placed
from jspec.engine.weights.loading import LoadedModels
from jspec.engine.weights.target_copies import warn_of_other_targets
from jspec.engine.weights.weight_checks import Finite, as_host, differences
from jspec.engine.weights.weight_stream import put_on, put_parts_on, stream
from jspec.engine.weights.weight_switch import (
    Leaf,
    SwitchError,
    flat_leaves,
    switch_leaves,
)
from jspec.errors import (
    CheckpointError,
    ConfigError,
    EngineClosedError,
    JspecError,
    RequestError,
    clear_frames,
    reason_of,
    shown,
)
from jspec.layers.expert_use import COPIES
from jspec.messages.weight_update import (
    AdapterUpdate,
    ArrayUpdate,
    DiskUpdate,
    Model,
    WeightUpdate,
)
from jspec.models.files.array_tensors import LazyTensor, in_memory
from jspec.models.files.checkpoint import (
    check_directory,
    check_target,
    load_model_spec,
    load_target,
)
from jspec.models.files.published import changed_reads, layouts_by_name, published_tensor
from jspec.models.files.stored import ParamRead
from jspec.models.files.tensor_files import HostArray
from jspec.models.lora_params import ROOT as LORA
from jspec.models.params import ParamPath, ParamSpec, ParamTable
from jspec.models.placement import nested
from jspec.spec.weight_format import num_bytes
from jspec.speculative.drafters.source import DraftSource


class HoldsParams(Protocol):
    @property
    def params(self) -> Any: ...

    def replace_params(self, params: Any) -> None: ...

    def exclusively(self) -> AbstractContextManager[object]:
        """Return a lock; while it is acquired no program starts or is being timed."""
        ...


HasRoom = Callable[[int], bool]
GIVEN = "the given tensors"
NOT_STORED = (LORA, COPIES)  # of a target's params: no checkpoint of the model has them
TARGET, DRAFT = Model.TARGET, Model.DRAFT


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedWeights:
    leaves: dict[ParamPath, Leaf]  # every stored weight, changed or not
    source: DraftSource


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedAdapter:
    slot: int
    placed: Placed | None  # None: nothing to write, since no request uses the slot


class ServedWeights:
    """Implements `messages.protocols.Weights` for a runner's params."""

    def __init__(
        self,
        models: LoadedModels,
        runner: HoldsParams,
        *,
        mesh: Mesh,
        has_room: HasRoom | None = None,  # None: for at most half of the free memory
    ) -> None:
        self._models = models
        self._runner = runner
        self._mesh, self._shards = mesh, Parallel.of(mesh).model
        self._has_room = has_room or self._is_half_of_free
        self._source = models.source
        self._dtype = np.dtype(jnp.dtype(models.config.dtype))
        self._put = put_on(mesh, column_major=models.target.ops.column_major)
        own = dataclasses.replace(models.target, lora=None)
        self._put_parts = put_parts_on(mesh)
        self._tables: dict[Model, ParamTable] = {TARGET: own.table, DRAFT: models.drafter.table}
        self._adapters = AdapterSlots(models.target, mesh=mesh, dtype=self._dtype)
        self._adapters.warm_up(runner.params["target"])

    @property
    def models(self) -> LoadedModels:
        return self._models

    @property
    def mesh(self) -> Mesh:
        return self._mesh

    @property
    def params(self) -> Any:
        return self._runner.params

    @property
    def has_draft(self) -> bool:
        return self._models.request.path is not None

    @property
    def draft_is_in_target(self) -> bool:
        request = self._models.request
        return request.path is not None and request.path == request.target_path

    # Reading.

    def tensor(self, name: str, model: Model | None) -> HostArray:
        for each in (TARGET, DRAFT) if model is None else (model,):
            stored = self._source.canonical(name) if each is DRAFT else name
            found = layouts_by_name(self._published(each)).get(stored)
            if found is not None:
                how: dict[str, Any] = {"dtype": self._dtype, "shards": self._shards}
                return published_tensor(found, stored, self._served(each), **how)
        whose = "target or draft" if model is None else f"the {model.value}"
        raise RequestError(f"name is {shown(name)}; expected a tensor of {whose}")

    def _served(self, model: Model) -> Callable[[ParamPath], Any]:
        leaves = flat_leaves(self._runner.params)
        return lambda path: leaves[(model.value, *path)]

    def _published(self, model: Model) -> ParamTable:
        """Return a model's weights that have a stored form, without those of the other model."""
        table = tuple(spec for spec in self._tables[model] if spec.layouts)
        if model is TARGET:
            return table
        all_of_draft = (*table, *self._source.published)
        return tuple(spec for spec in all_of_draft if spec.path[0] not in self._source.shares)

    # Changing.

    def prepare(self, update: WeightUpdate) -> PreparedWeights | PreparedAdapter:
        try:
            if isinstance(update, AdapterUpdate):
                path = update.path
                placed = None if path is None else self._adapters.read(path)
                return PreparedAdapter(update.slot, placed)
            found = Finite()
            if isinstance(update, DiskUpdate):
                new, source = self._from_disk(update, found)
            else:
                new, source = self._from_arrays(update, found), self._source
            found.check()
        except BaseException as error:
            clear_frames(error)  # they refer to the read weights
            if isinstance(error, OSError):  # a file that the system cannot read
                raise CheckpointError(_unreadable(error)) from error
            raise
        old = self._leaves()
        # A draft from disk may have other own weights than the former draft.
        whole = {path[0] for path in new} if isinstance(update, DiskUpdate) else set()
        kept = {path: leaf for path, leaf in old.items() if path[0] not in whole}
        return PreparedWeights({**kept, **new}, source)

    def switch(self, prepared: PreparedWeights | PreparedAdapter) -> None:
        if isinstance(prepared, PreparedAdapter):
            self._write(prepared)
            return
        with self._runner.exclusively():
            self._switch(prepared)

    def _write(self, prepared: PreparedAdapter) -> None:
        if prepared.placed is not None:
            params = self._runner.params
            target = self._adapters.written(params["target"], prepared.slot, prepared.placed)
            self._runner.replace_params({**params, "target": target})

    def _leaves(self) -> dict[ParamPath, Leaf]:
        leaves = flat_leaves(self._runner.params, shares=self._source.shares)
        kept = {(TARGET.value, name) for name in NOT_STORED}
        return {path: leaf for path, leaf in leaves.items() if path[:2] not in kept}

    def _with_kept(self, params: dict[str, Any]) -> dict[str, Any]:
        served = self._runner.params[TARGET.value]
        params[TARGET.value] |= {name: served[name] for name in NOT_STORED if name in served}
        return params

    def _switch(self, prepared: PreparedWeights) -> None:
        old = self._leaves()
        derive = prepared.source.with_target
        try:
            params = self._with_kept(_tree(switch_leaves(old, prepared.leaves, self._put_at)))
        except SwitchError as error:
            self._runner.replace_params(self._with_kept(_tree(error.restored)))
            raise error.cause from None
        try:
            if derive is not None:
                params["draft"] = derive(params["target"], params["draft"])
        except Exception as error:
            if any(leaf.is_deleted() for leaf in jax.tree.leaves(self._runner.params)):
                raise EngineClosedError(
                    "the weights were switched only in part", f": {error!r}"
                ) from error
            raise
        self._runner.replace_params(params)
        self._source = prepared.source

    def _put_at(self, path: ParamPath, value: Weight) -> Weight:
        spec = next(x for x in self._tables[Model(path[0])] if x.path == path[1:])
        return self._put(spec, value)

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

    # From disk.

    def _from_disk(
        self, update: DiskUpdate, found: Finite
    ) -> tuple[dict[ParamPath, Any], DraftSource]:
        models, faults, source = self._models, [], self._source
        if update.target is not None:
            faults += _fault(lambda: self._check_target(Path(update.target or "")))
        if update.draft is not None:
            path = Path(update.draft)
            source, more = self._draft_source(path)
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
            new |= flat_leaves({TARGET.value: read})
        if update.draft is not None:
            drafts = dict(source.read(self._runner.params["target"], self._dtype, place))
            if update.draft != update.target:
                target = read or self._runner.params["target"]
                warn_of_other_targets(Path(update.draft), source, target)
            new |= flat_leaves({DRAFT.value: drafts}, shares=source.shares)
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

    def _draft_source(self, path: Path) -> tuple[DraftSource, list[str]]:
        models = self._models
        if not self.has_draft:
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
        return (found[0] if found else self._source), faults

    # From arrays.

    def _from_arrays(self, update: ArrayUpdate, found: Finite) -> dict[ParamPath, Any]:
        if not update.arrays:
            raise CheckpointError(f"{GIVEN}: there are none; expected at least one")
        new: dict[ParamPath, Any] = {}
        faults: list[str] = []
        reads: dict[Model, list[ParamRead]] = {}
        for model, given in self._by_model(update).items():

            def read(model: Model = model, given: dict[str, LazyTensor] = given) -> None:
                reads[model] = changed_reads(
                    f"{GIVEN} ({model.value})",
                    given,
                    self._published(model),
                    self._served(model),
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

    def _by_model(self, update: ArrayUpdate) -> dict[Model, dict[str, LazyTensor]]:
        """Split arrays by model; an unknown name goes to the target, where it is an error."""
        # A draft's copies of target tensors are skipped, as when files are read.
        known = {model: layouts_by_name(self._published(model)) for model in (TARGET, DRAFT)}
        whose: dict[Model, dict[str, LazyTensor]] = {}
        both: list[str] = []
        for name, array in update.arrays.items():
            stored = self._source.canonical(name)
            is_drafts = name not in known[TARGET] and stored in known[DRAFT]
            model = update.model or (DRAFT if is_drafts else TARGET)
            if update.model is DRAFT and stored in self._source.unread:
                continue
            both += [name] * (name in known[TARGET] and name in known[DRAFT])
            named = stored if model is DRAFT else name
            given = whose.setdefault(model, {})
            if named in given:
                raise CheckpointError(f"{GIVEN}: {name} is a second {named}")
            given[named] = in_memory(as_host(name, array))
        if update.model is None and both and DRAFT in whose:
            raise CheckpointError(
                f"{GIVEN}: {both[0]} is a tensor of the target and of the draft, and "
                f"{next(iter(whose[DRAFT]))} one of the draft alone; expected a selector"
            )
        return whose


def _on_host(_: ParamSpec, value: Weight) -> Weight:
    return value


def _tree(leaves: Mapping[ParamPath, Any]) -> dict[str, Any]:
    return {TARGET.value: {}, DRAFT.value: {}} | nested(leaves.items())


def _fault(run: Callable[[], object]) -> list[str]:
    try:
        run()
    except JspecError as error:
        return [str(error)]
    except OSError as error:
        return [_unreadable(error)]
    return []


def _unreadable(error: OSError) -> str:
    named = "a file of the checkpoint" if error.filename is None else error.filename
    return f"{named}: cannot be read: {reason_of(error)}"
