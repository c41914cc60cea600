"""LoRA adapters in peft's layout: adapter_config.json and adapter_model.safetensors.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight [r, in]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight [out, r]

The scale (lora_alpha / r, with use_rslora / sqrt(r)) is multiplied into B on reading. Source:
peft's `LoraConfig` and `get_pattern_key`, for the patterns of ranks and alphas.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jspec.errors import CheckpointError, NoCheckpointError, shown
from jspec.files.json_files import Fields, exists, in_file, read_fields
from jspec.models.files.tensor_files import HostArray, Tensors, listed, open_file
from jspec.models.lora_params import (
    adaptable_modules,
    adapted_products,
    module_of,
    path_of_product,
)
from jspec.models.params import ParamPath, ParamSpec, ParamTable, Part, shard_columns
from jspec.spec.lora_spec import LoRASpec

CONFIG = "adapter_config.json"
FILES = ("adapter_model.safetensors", "adapter_model.bin")
LAYOUT = f"a LoRA adapter in peft's layout ({CONFIG}, {FILES[0]})"
PREFIX = "base_model.model."
_NAME = re.compile(r"(?P<module>.+)\.lora_(?P<half>[AB])(\.default)?\.weight")
# Keys that would change the product in ways that are not computed here, with inactive values.
_INACTIVE: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (False,),
    "bias": ("none",),
    "lora_bias": (False,),
    "modules_to_save": ([],),
    "fan_in_fan_out": (False,),
    "layer_replication": ([],),
    "trainable_token_indices": ([],),
    "target_parameters": ([],),
    "alora_invocation_tokens": ([],),
    "arrow_config": (),
    "use_qalora": (False,),
    "use_bdlora": (False,),
}
# With other values the adapter belongs to a base model that its training changed.
_INITS = (True, False, "gaussian", "eva", "orthogonal", "loftq")


@dataclass(frozen=True, slots=True)
class LoRAConfig:
    rank: int
    alpha: float
    by_root: bool  # the scale is alpha / sqrt(rank)
    ranks: Mapping[str, int]  # by pattern of module names
    alphas: Mapping[str, float]

    @classmethod
    def read(cls, path: Path) -> LoRAConfig:
        """Read adapter_config.json. Raises ConfigError for a kind of adapter that is not served."""
        fields = read_fields(path / CONFIG)
        with in_file(fields.path):
            fields.refuse("peft_type", allowed=("LORA",), why="other adapters are not served")
            for name, allowed in _INACTIVE.items():
                why = "plain LoRA of linear layers is all that is served"
                fields.refuse(name, allowed=allowed, why=why)
            fields.refuse(
                "init_lora_weights",
                allowed=_INITS,
                why="such an adapter fits only a base that its training changed; convert it first",
            )
        return cls(
            rank=fields.integer("r"),
            alpha=fields.number("lora_alpha"),
            by_root=fields.flag("use_rslora", False),
            ranks=_patterns(fields, "rank_pattern"),
            alphas=_patterns(fields, "alpha_pattern"),
        )

    def rank_of(self, module: str) -> int:
        return self.ranks.get(_pattern(self.ranks, module), self.rank)

    def scale_of(self, module: str) -> float:
        rank = self.rank_of(module)
        alpha = self.alphas.get(_pattern(self.alphas, module), self.alpha)
        return alpha / (math.sqrt(rank) if self.by_root else rank)


def _patterns(fields: Fields, name: str) -> dict[str, Any]:
    table = fields.table(name)
    read = table.integer if name == "rank_pattern" else table.number
    for pattern in table.values:
        try:
            re.compile(pattern)
        except re.error as error:
            raise CheckpointError(
                f"{fields.path}: {name} has {shown(pattern)}; expected patterns ({error})"
            ) from error
    return {pattern: read(pattern) for pattern in table.values}


def _pattern(patterns: Mapping[str, Any], module: str) -> str:
    """Return the first pattern that matches the end of a module's name, or ""."""
    matches = (each for each in patterns if re.match(rf"(.*\.)?({each})$", module))
    return next(matches, "")


@contextmanager
def open_adapter(path: Path) -> Iterator[tuple[LoRAConfig, Tensors]]:
    """Open an adapter's directory. Raises CheckpointError, or ConfigError for its config."""
    if not exists(path / CONFIG):
        raise NoCheckpointError(f"lora_path is {str(path)!r}; expected a directory with {LAYOUT}")
    config = LoRAConfig.read(path)
    found = [path / name for name in FILES if exists(path / name)]
    if not found:
        raise NoCheckpointError(f"lora_path is {str(path)!r}, without weights; expected {LAYOUT}")
    with open_file(found[0]) as tensors:
        yield config, tensors


def needs_of(path: Path) -> tuple[int, frozenset[str]]:
    """Return the largest rank of an adapter, and the last parts of its modules' names."""
    with open_adapter(path) as (config, tensors):
        modules = {found["module"] for name in tensors.sources if (found := _NAME.fullmatch(name))}
        ranks = {config.rank_of(module.removeprefix(PREFIX)) for module in modules}
        return max(ranks, default=config.rank), frozenset(x.rsplit(".", 1)[-1] for x in modules)


def check_adapter(path: Path, table: ParamTable, lora: LoRASpec) -> None:
    """Raise the errors of `read_adapter` that the config and the headers alone show."""
    with open_adapter(path) as (config, tensors):
        _checked(tensors, config, table, lora)


def read_adapter(
    path: Path, table: ParamTable, lora: LoRASpec, *, dtype: npt.DTypeLike, shards: int
) -> dict[ParamPath, HostArray]:
    """Return an adapter's A [in, parts, rank] and B [rank, out] by path, over all shards, zeros
    without one. table: the target's, without adapters. Raises one CheckpointError for all that does
    not fit."""
    with open_adapter(path) as (config, tensors):
        halves = _checked(tensors, config, table, lora)
        reader = _Reader(tensors, config, halves, lora.rank, np.dtype(dtype), shards)
        weights = (reader.weights(spec) for spec in adapted_products(table, lora))
        return {path: array for each in weights for path, array in each}


Halves = Mapping[str, Mapping[str, str]]  # module -> A or B -> the tensor's name


@dataclass(frozen=True, slots=True)
class _Reader:
    tensors: Tensors
    config: LoRAConfig
    halves: Halves
    rank: int
    dtype: np.dtype[Any]
    shards: int

    def weights(self, spec: ParamSpec) -> Iterator[tuple[ParamPath, HostArray]]:
        layout = next(
            (each for each in spec.layouts if any(module_of(x) in self.halves for x in each)),
            spec.layouts[0],
        )
        a = np.zeros((spec.shape[0], len(layout), self.rank), self.dtype)
        root = path_of_product(spec)
        for index, (part, own) in enumerate(zip(spec.layouts[0], layout, strict=True)):
            shards = spec.column_shards(self.shards)
            columns = [range(first, first + n) for _, first, n in shard_columns((part,), shards)]
            b = np.zeros((self.rank, sum(map(len, columns))), self.dtype)
            module = module_of(own)
            if module in self.halves:
                down, up = (self._numbers(module, half) for half in ("A", "B"))
                a[:, index, : len(down)] = down.T
                rows = up[own.rows] * np.float32(self.config.scale_of(module))
                b[: len(down)] = rows[[i for each in columns for i in each]].T
            yield (*root, "b", index), b
        yield (*root, "a"), a

    def _numbers(self, module: str, half: str) -> HostArray:
        name = self.halves[module][half]
        numbers: HostArray = self.tensors.weight(name).astype(np.float32)
        if not np.isfinite(numbers).all():
            raise CheckpointError(f"{self.tensors.path}: {name} has a number that is not finite")
        return numbers


def _checked(tensors: Tensors, config: LoRAConfig, table: ParamTable, lora: LoRASpec) -> Halves:
    known: dict[str, tuple[int, Part]] = {
        module_of(part): (spec.shape[0], part)
        for spec in adapted_products(table, lora)
        for layout in spec.layouts
        for part in layout
    }
    halves: dict[str, dict[str, str]] = {}
    strange, misfits = [], []
    for name in sorted(tensors.sources):
        found = _NAME.fullmatch(name)
        module = "" if found is None else found["module"].removeprefix(PREFIX)
        if found is None or module not in known:
            strange.append(_why_strange(name, module, table, lora))
            continue
        halves.setdefault(module, {})[found["half"]] = name
        size, part = known[module]
        rank = config.rank_of(module)
        expected = (rank, size) if found["half"] == "A" else (part.shape[0], rank)
        if rank > lora.rank:
            misfits.append(f"{name} has rank {rank}; expected at most max_lora_rank {lora.rank}")
        elif tensors.shape(name) != expected:
            misfits.append(f"{name} has shape {tensors.shape(name)}; expected {expected}")
        else:
            tensors.weight_dtype(name)
    missing = [
        f"{module} has lora_{next(iter(own))} alone; expected lora_A and lora_B"
        for module, own in halves.items()
        if len(own) == 1
    ]
    kinds = {"not adapted here": strange, "of another shape": misfits, "incomplete": missing}
    if any(kinds.values()):
        raise CheckpointError(f"{tensors.path}: {listed(kinds)}")
    if not halves:
        raise CheckpointError(f"{tensors.path}: has no tensor; expected {LAYOUT}")
    return halves


def _why_strange(name: str, module: str, table: ParamTable, lora: LoRASpec) -> str:
    served = ", ".join(lora.modules)
    if "lora_embedding" in name or ".embed_tokens." in name:
        return f"{name} adapts the embedding; expected adapters of {served} alone"
    if "lora_magnitude_vector" in name:
        return f"{name} is DoRA's; expected plain LoRA"
    if not module:
        return f"{name} is no lora_A or lora_B of a linear layer; expected those alone"
    if ".experts." in name:
        return f"{name} adapts experts; expected adapters of {served} alone"
    last = module.rsplit(".", 1)[-1]
    if last in adaptable_modules(table) and last not in lora.modules:
        return f"{name} adapts {last}; expected modules in lora_target_modules, {served}"
    if last in lora.modules:
        return f"{name} adapts {module}, which the model has not; expected its own layers"
    return f"{name} adapts {last}, which is no plain linear layer here; expected {served}"
