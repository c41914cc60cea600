"""A drafter's plan (`DraftSource`), and the request that its entry in `registry` makes it from. A
plan is made before any weight is read, so that configs and settings are checked first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from jax.typing import DTypeLike

from jspec.config.limits import Algorithm
from jspec.layers.linear import Shard
from jspec.models.files.stored.param_reads import Place
from jspec.models.heads.target_copies import Copies
from jspec.models.params import ParamTable
from jspec.pallas_kernels.ops import Ops
from jspec.spec.expert_shards import on_expert_shards
from jspec.spec.model_spec import ModelSpec, cached_in
from jspec.spec.weight_format import Formats
from jspec.speculative.drafter import Drafter
from jspec.speculative.target import Params

if TYPE_CHECKING:  # its help texts do not affect programs (engine/programs/source_digest.py)
    from jspec.config.engine_args import EngineArgs


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRequest:
    args: EngineArgs
    path: Path | None  # the draft's checkpoint; None for an algorithm without one
    target: ModelSpec
    target_path: Path
    tokenizer: Path  # the directory of the target's tokenizer
    shards: int
    expert_shards: int = 1  # of all data ranks that share the experts
    formats: Formats = ()  # of the draft's weights that are not dense
    kv_dtype: str | None = None  # of the draft's cache; None: the model's

    def on_devices(self, spec: ModelSpec, *, spares: int | None = None) -> ModelSpec:
        """Return a model as this engine caches and shards it. spares: see `on_expert_shards`."""
        cached, data_shards = cached_in(spec, self.kv_dtype), self.args.expert_ranks
        return on_expert_shards(cached, self.expert_shards, data_shards=data_shards, spares=spares)

    @property
    def checkpoint(self) -> Path:
        if self.path is None:
            raise ValueError(f"{self.args.algorithm.name} has no draft checkpoint; expected one")
        return self.path


def made(drafter: Drafter) -> Callable[[Ops, Shard], Drafter]:
    """Return `DraftSource.make` for a drafter that runs no model."""

    def make(ops: Ops, shard: Shard) -> Drafter:
        del ops, shard
        return drafter

    return make


def no_params(target_params: Params, dtype: DTypeLike, place: Place) -> Params:
    del target_params, dtype, place
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSource:
    """How to build a drafter and its params.

    read: returns the params, sharded for the request and placed by `place`, from the target's
        params on the devices, which it may share, and the weights' dtype. A drafter without a
        table reads onto the host
    shares: names of params that are the target's own arrays, also after its weights change
    published: stored layouts, if not the target's, of weights whose table entry has none
    copies: tensors of its files that the target has too, by canonical name, read or not
    with_target: given the target's new params and its own, returns its own with derived values
        recomputed; arrays shared with the target need no update
    """

    make: Callable[[Ops, Shard], Drafter]  # builds the drafter
    read: Callable[[Params, DTypeLike, Place], Params] = no_params
    specs: tuple[ModelSpec, ...] = ()  # the models that it runs, whose attention must be supported
    aux_layer_ids: tuple[int, ...] = ()  # the target layers captured for it
    shares: tuple[str, ...] = ()
    published: ParamTable = ()
    canonical: Callable[[str], str] = str  # maps a stored tensor's name to the table's
    copies: Copies = field(default_factory=dict)
    with_target: Callable[[Params, Params], Params] | None = None
    algorithm: Algorithm | None = None  # if the checkpoint decides it

    @property
    def unread(self) -> frozenset[str]:
        """The names of stored tensors in whose place the target's own are used."""
        return frozenset(name for name, copy in self.copies.items() if not copy.is_read)


ReadSource = Callable[[DraftRequest], DraftSource]
