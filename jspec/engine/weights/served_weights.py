"""The served weights: read by published names, and replaced by weights of the same shapes.

An update is read and checked completely before the switch, onto the devices if both models fit
there, else onto the host. Compiled programs take weights as arguments and stay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jspec.device.parallel import Parallel
from jspec.device.weights import Weight
from jspec.engine.weights.adapters import AdapterSlots, Placed
from jspec.engine.weights.loading import LoadedModels
from jspec.engine.weights.named_weights import NamedWeights
from jspec.engine.weights.update_reading import HasRoom, UpdateReader, unreadable
from jspec.engine.weights.weight_stream import put_on
from jspec.engine.weights.weight_switch import Leaf, SwitchError, flat_leaves, switch_leaves
from jspec.errors import CheckpointError, EngineClosedError, clear_frames
from jspec.layers.expert_use import COPIES
from jspec.messages.weight_update import AdapterUpdate, DiskUpdate, Model, WeightUpdate
from jspec.models.files.tensor_files import HostArray
from jspec.models.lora_params import ROOT as LORA
from jspec.models.params import ParamPath
from jspec.models.placement import nested
from jspec.speculative.drafters.source import DraftSource


class HoldsParams(Protocol):
    @property
    def params(self) -> Any: ...

    def replace_params(self, params: Any) -> None: ...

    def exclusively(self) -> AbstractContextManager[object]:
        """Return a lock; while it is acquired no program starts or is being timed."""
        ...


NOT_STORED = (LORA, COPIES)  # of a target's params: no checkpoint of the model has them


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
        self._mesh = mesh
        self._source = models.source
        self._dtype = np.dtype(jnp.dtype(models.config.dtype))
        self._reader = UpdateReader(models, mesh=mesh, dtype=self._dtype, has_room=has_room)
        self._put = put_on(mesh, column_major=models.target.ops.column_major)
        own = dataclasses.replace(models.target, lora=None)
        self._tables = {Model.TARGET: own.table, Model.DRAFT: models.drafter.table}
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

    @property
    def _named(self) -> NamedWeights:
        return NamedWeights(
            tables=self._tables,
            source=self._source,
            params=self._runner.params,
            dtype=self._dtype,
            shards=Parallel.of(self._mesh).model,
        )

    def tensor(self, name: str, model: Model | None) -> HostArray:
        return self._named.tensor(name, model)

    def prepare(self, update: WeightUpdate) -> PreparedWeights | PreparedAdapter:
        try:
            if isinstance(update, AdapterUpdate):
                path = update.path
                placed = None if path is None else self._adapters.read(path)
                return PreparedAdapter(update.slot, placed)
            new, source = self._reader.read(update, self._named)
        except BaseException as error:
            clear_frames(error)  # they refer to the read weights
            if isinstance(error, OSError):  # a file that the system cannot read
                raise CheckpointError(unreadable(error)) from error
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
        kept = {(Model.TARGET.value, name) for name in NOT_STORED}
        return {path: leaf for path, leaf in leaves.items() if path[:2] not in kept}

    def _with_kept(self, params: dict[str, Any]) -> dict[str, Any]:
        served = self._runner.params[Model.TARGET.value]
        params[Model.TARGET.value] |= {name: served[name] for name in NOT_STORED if name in served}
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


def _tree(leaves: Mapping[ParamPath, Any]) -> dict[str, Any]:
    return {Model.TARGET.value: {}, Model.DRAFT.value: {}} | nested(leaves.items())
