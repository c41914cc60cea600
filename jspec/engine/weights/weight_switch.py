"""Switches served weights in place, without two models on the devices, and undoes a failure.

New weights are on the devices already, or on the host. Those on the host replace the old ones one
by one: the old array is copied to the host and deleted, then the new one is put. So devices and
host hold at most one model each, and no file is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import traverse_util

from jspec.errors import EngineClosedError
from jspec.models.files.tensor_files import HostArray
from jspec.models.params import Path


@dataclass(frozen=True, slots=True)
class SameAs:
    """Marks a weight that is another weight's array: a draft's that it shares with its target."""

    path: Path


Leaf = jax.Array | HostArray | SameAs
Flat = dict[Path, jax.Array]
PutAt = Callable[[Path, HostArray], jax.Array]


class SwitchError(Exception):
    """The switch failed with `cause`; `restored` are the old weights, complete."""

    def __init__(self, cause: BaseException, restored: Flat) -> None:
        super().__init__(f"the weights were not switched: {cause!r}")
        self.cause, self.restored = cause, restored


def switch_leaves(old: Mapping[Path, jax.Array], new: dict[Path, Leaf], put: PutAt) -> Flat:
    """Put the new weights on the devices; empties `new` on the way to free host memory.

    old: the served arrays; those replaced by host arrays are deleted to make room. Raises
    SwitchError with the cause and the restored weights; EngineClosedError if the old ones could not
    be restored.
    """
    switch = _Switch(old, new, put)
    try:
        return switch.run()
    except BaseException as error:
        raise SwitchError(error, switch.undo(error)) from error


class _Switch:
    def __init__(self, old: Mapping[Path, jax.Array], new: dict[Path, Leaf], put: PutAt) -> None:
        self._old, self._new, self._put = old, new, put
        self._kept = {id(leaf) for leaf in new.values() if isinstance(leaf, jax.Array)}
        self._saved: dict[int, tuple[Path, HostArray]] = {}  # by the old array's id
        self._made: list[jax.Array] = []

    def run(self) -> Flat:
        done: Flat = {}
        for path in tuple(self._new):
            leaf = self._new[path]
            if isinstance(leaf, jax.Array):
                done[path] = leaf
            elif not isinstance(leaf, SameAs):
                self._make_room(path)
                done[path] = self._put(path, leaf)
                self._made.append(done[path])
                del self._new[path]
        for path, leaf in self._new.items():
            if isinstance(leaf, SameAs):
                done[path] = done[leaf.path]
        return done

    def _make_room(self, path: Path) -> None:
        leaf = self._old.get(path)
        if leaf is None or id(leaf) in self._kept or id(leaf) in self._saved:
            return
        self._saved[id(leaf)] = path, np.array(leaf)
        leaf.delete()

    def undo(self, cause: BaseException) -> Flat:
        for array in self._made:
            array.delete()
        try:
            back = {key: self._put(path, value) for key, (path, value) in self._saved.items()}
        except Exception as error:
            raise EngineClosedError(
                "the weights were not switched, and the former ones could not be put back",
                f" because of {error!r}; they were not switched because of {cause!r}",
            ) from error
        return {path: back.get(id(leaf), leaf) for path, leaf in self._old.items()}


def flat_leaves(params: Any) -> Flat:
    """Return every array by (model, *path)."""
    flat: Flat = traverse_util.flatten_dict(params, keep_empty_nodes=False)
    return flat
