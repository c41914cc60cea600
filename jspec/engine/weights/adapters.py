"""LoRA adapters on the devices: space for them, and an adapter's place in the stacked weights."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import traverse_util
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jspec.config.engine_args import EngineArgs
from jspec.device import hosts
from jspec.device.parallel import Parallel, partition_spec
from jspec.engine.weights.dummy_weights import dummy_params
from jspec.engine.weights.remote_checkpoints import local_directories
from jspec.errors import ConfigError
from jspec.models.decoder import Decoder
from jspec.models.files.lora_files import check_adapter, needs_of, read_adapter
from jspec.models.layer import Params
from jspec.models.lora_params import ROOT, adaptable_modules, lora_params
from jspec.models.params import ParamPath, ParamTable
from jspec.models.placement import nested
from jspec.models.registry import table_of
from jspec.spec.lora_spec import ALL_MODULES, LoRASpec


def adapter_directory(path: str) -> Path:
    """Return an adapter's directory, fetched if it is remote. Raises CheckpointError."""
    return local_directories({"lora_path": path})["lora_path"]


def lora_spec(args: EngineArgs, table: ParamTable) -> LoRASpec | None:
    """Return the space for adapters that the arguments request, or those of `lora_paths` need.

    table: of the target. Raises ConfigError, and CheckpointError for an adapter that does not fit.
    """
    if not args.has_loras:
        return None
    paths = [adapter_directory(path) for _, path in args.named_lora_paths]
    needs = [needs_of(path) for path in paths]
    rank = args.max_lora_rank or max((rank for rank, _ in needs), default=0)
    if not rank:
        raise ConfigError("enable_lora is True without lora_paths; expected max_lora_rank too")
    known = adaptable_modules(table)
    named = set(args.lora_target_modules) - {ALL_MODULES}
    if unknown := sorted(named.difference(known)):
        raise ConfigError(
            f"lora_target_modules has {', '.join(unknown)}; expected some of {', '.join(known)}, "
            f"which the model has, or {ALL_MODULES}"
        )
    found = {module for _, modules in needs for module in modules}.intersection(known)
    is_all = ALL_MODULES in args.lora_target_modules or not (named or found)
    wanted = set(known) if is_all else named or found
    modules = tuple(module for module in known if module in wanted)
    lora = LoRASpec(num_loras=args.max_loras_per_batch, rank=rank, modules=modules)
    for path in paths:  # before anything is loaded or compiled
        check_adapter(path, table, lora)
    return lora


def no_adapters(target: Decoder, *, mesh: Mesh, dtype: DTypeLike) -> Params:
    """Return the stacked weights of a target without adapters: zeros, in {"lora": ...}."""
    tables = {"target": lora_params(table_of(target.spec), target.lora)}
    vocab_size = target.spec.vocab_size
    return dummy_params(tables, mesh=mesh, vocab_size=vocab_size, dtype=dtype)["target"]


Placed = Mapping[ParamPath, jax.Array]  # an adapter's own weights, by path


class AdapterSlots:
    """Reads adapters and writes them into the stacked weights of a target, which are copied: steps
    in flight keep the weights that they were dispatched with."""

    def __init__(self, target: Decoder, *, mesh: Mesh, dtype: DTypeLike) -> None:
        self._base, self._lora = table_of(target.spec), target.lora
        self._mesh, self._dtype = mesh, dtype
        weights = lora_params(self._base, target.lora)
        self._specs = {spec.path: partition_spec(spec.axes) for spec in weights}

    def read(self, path: str) -> Placed:
        """Read and check an adapter, and put it on the devices. Raises CheckpointError."""
        if self._lora is None:
            raise ConfigError("enable_lora is False; expected True where adapters are loaded")
        shards = Parallel.of(self._mesh).model
        directory = adapter_directory(path)
        return self._put(
            read_adapter(directory, self._base, self._lora, dtype=self._dtype, shards=shards)
        )

    def _put(self, arrays: Mapping[ParamPath, Any]) -> Placed:
        def put(path: ParamPath, array: Any) -> jax.Array:
            first, last = self._specs[path]
            axes = (first, *[None] * (array.ndim - 2), last)
            return hosts.put(array, NamedSharding(self._mesh, PartitionSpec(*axes)))

        return {path: put(path, array) for path, array in arrays.items()}

    def written(self, params: Params, slot: int, placed: Placed) -> Params:
        assert self._lora is not None
        stacked = flat(params[ROOT], root=(ROOT,))
        layers: dict[ParamPath, dict[ParamPath, jax.Array]] = {}
        for path, own in placed.items():
            layers.setdefault(path[:3], {})[path[3:]] = own
        for layer, parts in layers.items():
            old = {path: stacked[(*layer, *path)] for path in parts}
            new = _with_slot(old, parts, (slot - 1) * self._lora.rank, width=self._lora.width)
            for path, array in new.items():
                stacked[(*layer, *path)] = jax.device_put(array, old[path].sharding)
        return {**params, **nested(stacked.items())}

    def warm_up(self, params: Params) -> None:
        """Compile what `written` runs, so that loading an adapter compiles nothing."""
        if self._lora is None:
            return
        lora, empty = self._lora, {}
        for path, whole in flat(params[ROOT], root=(ROOT,)).items():
            size, columns = whole.shape
            is_a = path[-1] == "a"
            shape = (size, columns // lora.width, lora.rank) if is_a else (lora.rank, columns)
            empty[path] = np.zeros(shape, whole.dtype)
        self.written(params, 1, self._put(empty))


def flat(params: Params, *, root: ParamPath) -> dict[ParamPath, Any]:
    found: dict[ParamPath, Any] = traverse_util.flatten_dict(params)
    return {(*root, *path): leaf for path, leaf in found.items()}


@partial(jax.jit, static_argnames="width")
def _with_slot(
    stacked: dict[Any, jax.Array], own: dict[Any, jax.Array], first: jax.Array, *, width: int
) -> dict[Any, jax.Array]:
    """Write A [in, parts, rank] and B [rank, out] from column or row `first` of each part on."""

    def put(whole: jax.Array, new: jax.Array) -> jax.Array:
        if new.ndim == 2:
            return jax.lax.dynamic_update_slice(whole, new, (first, 0))
        parts = whole.reshape(*new.shape[:2], width)
        return jax.lax.dynamic_update_slice(parts, new, (0, 0, first)).reshape(whole.shape)

    return {path: put(stacked[path], new) for path, new in own.items()}
