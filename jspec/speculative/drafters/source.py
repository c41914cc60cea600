"""What a drafter is built from: the request of the engine, and the answer of its row in `registry`.

Configs are read, and every setting checked, before any weight is: an answer is a plan. It says
which kernels must serve and what the target must capture, and how the drafter and its params are
made once target and kernels are there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jax.typing import DTypeLike

from jspec.config.limits import Algorithm
from jspec.layers.linear import Shard
from jspec.models.files.stored import Place
from jspec.models.files.tensor_files import Tensors
from jspec.models.heads.target_copies import Copies
from jspec.models.params import ParamTable
from jspec.pallas_kernels.ops import Ops
from jspec.spec.model_spec import ModelSpec
from jspec.speculative.drafter import Drafter
from jspec.speculative.target import Params

if TYPE_CHECKING:  # its help texts change no program (engine/programs/source_digest.py)
    from jspec.config.engine_args import EngineArgs


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRequest:
    """path: directory of the draft's checkpoint, None for an algorithm without one. target: what
    is served, out of target_path. tokenizer: its tokenizer's directory.
    """

    args: EngineArgs
    path: Path | None
    target: ModelSpec
    target_path: Path
    tokenizer: Path
    shards: int

    @property
    def checkpoint(self) -> Path:
        """`path`, of an algorithm that has one."""
        if self.path is None:
            raise ValueError(f"{self.args.algorithm.value} has no draft checkpoint; expected one")
        return self.path


def made(drafter: Drafter) -> Callable[[Ops, Shard], Drafter]:
    """`DraftSource.make` of a drafter that runs no model: kernels and shard are nothing to it."""

    def make(ops: Ops, shard: Shard) -> Drafter:
        del ops, shard
        return drafter

    return make


def no_params(target_params: Params, dtype: DTypeLike, place: Place) -> Params:
    """The params of a drafter without any."""
    del target_params, dtype, place
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSource:
    """make: the static drafter, with the kernels and the shard of the engine.

    read: its params, dealt to the request's shards, where `place` puts them; given the target's
        params on the devices, which it may share, and the dtype of the weights. A drafter without
        a table reads onto the host.
    specs: of the models that it runs; their attention must be served too.
    aux_layer_ids: what of the target is captured for it.
    shares: names of params that dummy weights take from the target's.
    published: how weights are stored whose entry in the drafter's table does not say, where they
        are not the target's. canonical: the table's name of a stored tensor's. copies: what its
        files may hold of the target's, under names that are not read. copies_in: those that open
        files of its may hold, read or not, to be compared with the target's.
    with_target: the params (second) once the target's (first) have changed, for what was computed
        from those; arrays that are the target's own follow by themselves.
    algorithm: what is in force, where the checkpoint decides that and not the arguments.
    """

    make: Callable[[Ops, Shard], Drafter]
    read: Callable[[Params, DTypeLike, Place], Params] = no_params
    specs: tuple[ModelSpec, ...] = ()
    aux_layer_ids: tuple[int, ...] = ()
    shares: tuple[str, ...] = ()
    published: ParamTable = ()
    canonical: Callable[[str], str] = str
    copies: frozenset[str] = frozenset()
    copies_in: Callable[[Tensors], Copies] | None = None
    with_target: Callable[[Params, Params], Params] | None = None
    algorithm: Algorithm | None = None


ReadSource = Callable[[DraftRequest], DraftSource]
