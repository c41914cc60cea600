"""The served weights of both models under their published names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jspec.engine.weights.weight_switch import (
    flat_leaves,
)
from jspec.errors import (
    RequestError,
    shown,
)
from jspec.messages.weight_update import (
    Model,
)
from jspec.models.files.published import layouts_by_name, published_tensor
from jspec.models.files.tensor_files import HostArray
from jspec.models.params import ParamPath, ParamTable
from jspec.speculative.drafters.source import DraftSource


@dataclasses.dataclass(frozen=True, slots=True)
class NamedWeights:
    tables: Mapping[Model, ParamTable]
    source: DraftSource
    params: Any  # of both models, as served
    dtype: np.dtype[Any]
    shards: int

    def tensor(self, name: str, model: Model | None) -> HostArray:
        """Return a tensor as `messages.protocols.Weights` specifies."""
        for each in Model if model is None else (model,):
            stored = self.source.canonical(name) if each is Model.DRAFT else name
            found = layouts_by_name(self.table(each)).get(stored)
            if found is not None:
                how: dict[str, Any] = {"dtype": self.dtype, "shards": self.shards}
                return published_tensor(found, stored, self.arrays(each), **how)
        whose = "target or draft" if model is None else f"the {model.value}"
        raise RequestError(f"name is {shown(name)}; expected a tensor of {whose}")

    def arrays(self, model: Model) -> Callable[[ParamPath], Any]:
        leaves = flat_leaves(self.params)
        return lambda path: leaves[(model.value, *path)]

    def table(self, model: Model) -> ParamTable:
        """Return a model's weights that have a stored form, without those of the other model."""
        table = tuple(spec for spec in self.tables[model] if spec.layouts)
        if model is Model.TARGET:
            return table
        all_of_draft = (*table, *self.source.published)
        return tuple(spec for spec in all_of_draft if spec.path[0] not in self.source.shares)
