"""Switches served weights in place, without two models on devices or host, and undoes a failure: an
old array is copied to the host and deleted, then the new one is put."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import traverse_util

from jspec.device.weights import Weight
from jspec.errors import EngineClosedError
from jspec.models.params import ParamPath


@dataclass(frozen=True, slots=True)
class SameAs:
    """A draft's weight that is its target's, at `path`."""

    path: ParamPath


Leaf = Weight | SameAs
Flat = dict[ParamPath, Weight]
PutAt = Callable[[ParamPath, Weight], Weight]  # from the host


class SwitchError(Exception):
    """The switch failed with `cause`; `restored` are the old weights, complete."""

    def __init__(self, cause: BaseException, restored: Flat) -> None:
        super().__init__(f"the weights were not switched: {cause!r}")
        self.cause, self.restored = cause, restored


def switch_leaves(old: Mapping[ParamPath, Leaf], new: dict[ParamPath, Leaf], put: PutAt) -> Flat:
    """Put the new weights on the devices, emptying `new` meanwhile to free host memory.

    old: deleted if replaced from the host. Raises SwitchError, or EngineClosedError if it cannot be
    undone.
    """
    switch = _Switch(old, new, put)
    try:
        return switch.run()
    except BaseException as error:
        raise SwitchError(error, switch.undo(error)) from error


class _Switch:
    def __init__(
        self, old: Mapping[ParamPath, Leaf], new: dict[ParamPath, Leaf], put: PutAt
    ) -> None:
        self._old, self._new, self._put = old, new, put
        self._saved: dict[ParamPath, Weight] = {}
        self._made: list[Weight] = []

    def run(self) -> Flat:
        done: dict[ParamPath, Leaf] = {}
        for path in tuple(self._new):
            leaf = self._new.pop(path)
            if isinstance(jax.tree.leaves(leaf)[0], jax.Array | SameAs):  # it needs no room
                done[path] = leaf
                continue
            self._make_room(path)
            done[path] = made = self._put(path, leaf)
            self._made.append(made)
        return _whole(done)

    def _make_room(self, path: ParamPath) -> None:
        leaf = self._old.get(path)
        if leaf is not None and not isinstance(leaf, SameAs):
            self._saved[path] = jax.tree.map(np.array, leaf)
            for array in jax.tree.leaves(leaf):
                array.delete()

    def undo(self, cause: BaseException) -> Flat:
        for array in jax.tree.leaves(self._made):
            array.delete()
        try:
            back = {path: self._put(path, value) for path, value in self._saved.items()}
        except Exception as error:
            raise EngineClosedError(
                "the weights were not switched, and the former ones could not be put back",
                f" because of {error!r}; they were not switched because of {cause!r}",
            ) from error
        return _whole({**self._old, **back})


def _whole(leaves: Mapping[ParamPath, Leaf]) -> Flat:
    targets = {path: leaf for path, leaf in leaves.items() if not isinstance(leaf, SameAs)}
    return {
        path: targets[leaf.path] if isinstance(leaf, SameAs) else leaf
        for path, leaf in leaves.items()
    }


def flat_leaves(params: Any, *, shares: Collection[str] = ()) -> dict[ParamPath, Any]:
    """Return every weight by (model, *path). shares: the draft's params that are its target's."""
    flat: dict[ParamPath, Any] = traverse_util.flatten_dict(params, keep_empty_nodes=False)
    return {
        path: SameAs(("target", *path[1:])) if path[0] == "draft" and path[1] in shares else leaf
        for path, leaf in flat.items()
    }
