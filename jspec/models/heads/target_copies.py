"""Tensors of a draft's files that its target has too, compared with the target's own on a sample of
rows: a copy in another dtype differs by a few percent, another model's table by about 140."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.models.files.tensor_files import WEIGHT_DTYPES, Tensors
from jspec.models.heads.head_params import HEAD
from jspec.models.params import ParamPath

NUM_ROWS = 64
FOREIGN = 0.1  # of the target's root mean square; 8-bit codes differ by 0.04, fine-tuning by less


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetCopy:
    """A tensor that the target has too. path: of the target's. is_read: the head uses its own."""

    path: ParamPath
    is_read: bool


Copies = Mapping[str, TargetCopy]  # by the tensor's canonical name


def difference(tensors: Tensors, name: str, path: ParamPath, weight: Any) -> float | None:
    """Return the root mean square of stored minus target's, relative to the target's, for NUM_ROWS
    tokens; None if shape or dtype shows that it is no copy. weight: [V, E], or an lm_head's [E,
    V]."""
    axis = 1 if path == HEAD else 0
    shape = tuple(weight.shape[::-1] if axis else weight.shape)
    if tensors.shape(name) != shape or tensors.dtype(name) not in WEIGHT_DTYPES:
        return None
    ids = np.unique(np.linspace(0, shape[0] - 1, NUM_ROWS).astype(np.int32))
    stored = np.stack([_row(tensors, name, int(token)) for token in ids])
    take = jnp.take if isinstance(weight, jax.Array) else np.take
    chosen = np.asarray(take(weight, ids, axis=axis)).astype(np.float32)
    own = chosen.T if axis else chosen
    size = float(np.sqrt(np.mean(own**2)))
    return float(np.sqrt(np.mean((stored - own) ** 2))) / size if size else None


def _row(tensors: Tensors, name: str, token: int) -> np.ndarray:
    ((_, block),) = tensors.row_blocks(name, range(token, token + 1))
    return np.asarray(block[0], np.float32)
