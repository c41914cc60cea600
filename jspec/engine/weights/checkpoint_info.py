"""A description of a checkpoint directory and of what serving it needs, from its headers."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jspec.config.drafting import ALGORITHMS
from jspec.config.engine_args import EngineArgs
from jspec.engine.weights.resident_formats import Wanted, resident_formats
from jspec.errors import ConfigError, JspecError
from jspec.files.json_files import Fields, read_fields
from jspec.models.files.array_tensors import DTYPES
from jspec.models.files.checkpoint import check_directory, check_target, load_model_spec
from jspec.models.files.kv_scales import AUTO, cached_dtype
from jspec.models.files.tensor_files import Tensors, has_tensors, open_tensors
from jspec.models.heads.head_files import LAYER, stored_names
from jspec.models.params import with_formats
from jspec.models.registry import architectures, draft_algorithm, family_named, table_of
from jspec.pallas_kernels.ops import Ops
from jspec.spec.cache_entry import CacheLayout, State, Unit
from jspec.spec.cache_groups import CacheGroup, cache_bytes
from jspec.spec.layers.attention import AttentionSpec
from jspec.spec.layers.feed_forward import MoESpec
from jspec.spec.model_spec import ModelSpec, cache_groups, cached_in
from jspec.spec.weight_format import num_bytes
from jspec.speculative.drafters.registry import DRAFTERS
from jspec.speculative.drafters.source import DraftRequest, DraftSource


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    device_bytes: int
    weight_bytes: int
    cache_bytes: int
    tokens: int

    @property
    def fits(self) -> bool:
        return self.tokens > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    path: str
    kind: str  # "target" or "draft"
    architecture: str
    dtype: str
    serve: str  # the command; "" if problems prevent it
    problems: tuple[str, ...]
    shapes: dict[str, Any]
    num_tensors: int = 0
    parameters: int = 0  # number of weights
    stored_bytes: dict[str, int]  # of the files' tensors, by dtype
    weight_bytes: int = 0  # as served, in `dtype` or in packed formats
    tied_bytes: int = 0  # of transposed copies, not counted in `parameters`
    cache_bytes_per_token: int = 0  # as served in `dtype`
    state_bytes_per_row: int = 0  # of recurrent layers, without what a verification leaves pending
    algorithm: str | None = None
    memory: MemoryFit | None = None

    def to_json(self) -> dict[str, Any]:
        found = asdict(self)
        if self.memory is not None:
            found["memory"]["fits"] = self.memory.fits
        return found


def describe(
    path: Path,
    *,
    target: Path | None = None,
    dtype: str = "bfloat16",
    memory: int | None = None,
    quantization: str | None = None,  # of the target, like kv_cache_dtype
    kv_cache_dtype: str = AUTO,
) -> CheckpointInfo:
    """Describe a checkpoint, the draft of `target` if given, for `memory` bytes of a device. Raises
    CheckpointError without a directory or a readable config.json."""
    check_directory("DIR", path)
    if target is not None:
        check_directory("--target", target)
    fields = read_fields(path / "config.json")
    names = fields.get("architectures")
    architecture = names[0] if isinstance(names, list) and names else "(none)"
    algorithm = draft_algorithm(fields) or _algorithm_by_names(path)
    if algorithm is None and target is not None and architecture in architectures():
        algorithm = "STANDALONE"
    info = _of_files(path, architecture=str(architecture), dtype=dtype, algorithm=algorithm)
    served: Any = {"quantization": quantization, "kv_cache_dtype": kv_cache_dtype}
    if algorithm is None:
        info = _of_target(info, path, **served)
    else:
        info = _of_draft(info, path, fields, target)
    if memory is None:
        return info
    if algorithm is not None and target is None:
        raise ConfigError(
            f"--memory is given for {path}, a draft, which is served with its target; expected "
            f"--target too"
        )
    beside = None if target is None else describe(target, dtype=dtype, **served)
    return _with_memory(info, memory, beside=beside)


def _algorithm_by_names(path: Path) -> str | None:
    """Return the drafting algorithm by tensor names; None for a target or unreadable files."""
    # Tensor names decide, since heads name a language model as their architecture.
    try:
        names = stored_names(path)
        if f"{LAYER}hidden_norm.weight" in names:
            return "EAGLE3"
        if "fc.weight" in names:
            return "EAGLE"
        spec = load_model_spec(path)
    except JspecError:  # reported when it is read again
        return None
    family = family_named(spec.family)
    layers = [stored for stored in names.values() if re.search(r"layers\.\d+\.", stored)]
    return "NEXTN" if layers and all(family.is_draft(spec, name) for name in layers) else None


def _of_files(
    path: Path, *, architecture: str, dtype: str, algorithm: str | None
) -> CheckpointInfo:
    info = CheckpointInfo(
        path=str(path),
        kind="target" if algorithm is None else "draft",
        architecture=architecture,
        dtype=dtype,
        serve="",
        problems=(),
        shapes={},
        stored_bytes={},
        algorithm=algorithm,
    )
    if not has_tensors(path):
        problem = f"{path}: no weights; expected model.safetensors, pytorch_model.bin or orbax"
        return replace(info, problems=(problem,))
    try:
        with open_tensors(path) as tensors:
            counted = _count(tensors)
    except JspecError as error:
        return replace(info, problems=(str(error),))
    return replace(info, **counted, weight_bytes=counted["parameters"] * _itemsize(dtype))


def _count(tensors: Tensors, *, without: Collection[str] = ()) -> dict[str, Any]:
    sizes: Counter[str] = Counter()
    numbers = 0
    for name in (name for name in tensors.sources if name not in without):
        count, kind = math.prod(tensors.shape(name)), tensors.dtype(name)
        sizes[kind] += count * (DTYPES[kind].itemsize if kind in DTYPES else 1)
        numbers += count
    stored = dict(sizes.most_common())
    return {"num_tensors": len(tensors.sources), "parameters": numbers, "stored_bytes": stored}


def _of_target(
    info: CheckpointInfo, path: Path, *, quantization: str | None, kv_cache_dtype: str
) -> CheckpointInfo:
    """Add the model's facts. Without weights, their formats follow from config.json alone."""
    has_files = not info.problems
    try:
        spec = load_model_spec(path)
        cached = cached_in(spec, cached_dtype(kv_cache_dtype, path))
        wanted = Wanted(value=quantization, bundle=Ops.name, dtype=info.dtype, shards=1)
        formats = resident_formats(path, table_of(spec), wanted, has_files=has_files)
    except JspecError as error:
        return _with_problem(info, error)
    table = table_of(spec)
    total = sum(math.prod(param.shape) for param in table)
    served = with_formats(table, formats)
    tied = sum(math.prod(param.shape) for param in table if param.tied_to is not None)
    info = replace(
        info,
        shapes=_shapes(spec),
        parameters=total - tied,
        weight_bytes=sum(num_bytes(each.format_in(info.dtype), each.shape) for each in served),
        tied_bytes=tied * _itemsize(info.dtype),
        cache_bytes_per_token=_cache_bytes(cache_groups(cached, name="target"), info.dtype),
        state_bytes_per_row=_state_bytes(cache_groups(spec, name="target"), info.dtype),
    )
    if info.problems:
        return info
    words = ["jspec serve --model-path", str(path)]
    if _brings_draft(path, spec):
        info = replace(info, algorithm="NEXTN")
        words.append("--speculative-algorithm NEXTN")
    words += [] if quantization is None else [f"--quantization {quantization}"]
    words += [] if kv_cache_dtype == AUTO else [f"--kv-cache-dtype {kv_cache_dtype}"]
    try:
        check_target(path, spec)
    except JspecError as error:
        return _with_problem(info, error)
    return replace(info, serve=" ".join(words))


def _brings_draft(path: Path, spec: ModelSpec) -> bool:
    family = family_named(spec.family)
    with open_tensors(path) as tensors:
        return any(family.is_draft(spec, name) for name in tensors.sources)


def _of_draft(
    info: CheckpointInfo, path: Path, fields: Fields, target: Path | None
) -> CheckpointInfo:
    named = "TARGET" if target is None else str(target)
    serve = (
        f"jspec serve --model-path {named} --speculative-algorithm {info.algorithm} "
        f"--speculative-draft-model-path {path}"
    )
    sizes = ("num_hidden_layers", "hidden_size", "vocab_size", "draft_vocab_size")
    info = replace(
        info,
        serve="" if info.problems else serve,
        shapes={name: fields.get(name) for name in sizes if fields.get(name) is not None},
    )
    if target is None:
        return info
    try:
        source, words = served_draft(info.algorithm, path, target)
    except JspecError as error:
        return _with_problem(info, error)
    info = replace(info, serve="" if info.problems else f"{serve}{words}")
    if source.unread and not info.problems:  # copies of what the target has already
        with open_tensors(path) as tensors:
            own = _count(tensors, without=source.unread)
        numbers = own["parameters"]
        info = replace(info, parameters=numbers, weight_bytes=numbers * _itemsize(info.dtype))
    if info.algorithm == "NEXTN":  # its config.json is the target's
        layers = sum(each.num_layers for each in source.specs)
        info = replace(info, shapes={**info.shapes, "num_hidden_layers": layers})
    groups = tuple(g for each in source.specs for g in cache_groups(each, name="draft"))
    shapes = {**info.shapes, "aux_layer_ids": list(source.aux_layer_ids)}
    return replace(info, shapes=shapes, cache_bytes_per_token=_cache_bytes(groups, info.dtype))


def served_draft(algorithm: str | None, path: Path, target: Path) -> tuple[DraftSource, str]:
    """Return the draft's source and its extra words of the command. Raises JspecError."""
    most = ALGORITHMS[algorithm or "NONE"].default_steps
    spec = load_model_spec(target)
    faults: list[JspecError] = []  # the last one applies to every S
    for steps in range(most, 0, -1):
        args = EngineArgs(
            model_path=str(target),
            speculative_algorithm=algorithm,
            speculative_draft_model_path=str(path),
            speculative_num_steps=None if steps == most else steps,
        )
        request = DraftRequest(
            args=args,
            path=path,
            target=spec,
            target_path=target,
            tokenizer=target,
            shards=1,
            kv_dtype=cached_dtype(AUTO, target),
        )
        try:
            source = DRAFTERS[args.algorithm.name](request)
        except JspecError as error:
            faults.append(error)
            continue
        return source, "" if not faults else f" --speculative-num-steps {steps}"
    raise faults[-1]


def _shapes(spec: ModelSpec) -> dict[str, Any]:
    mixers = [layer.attention for layer in spec.layers]
    heads = [own for own in mixers if isinstance(own, AttentionSpec)]
    ffns = (ffn for layer in spec.layers for ffn in layer.ffns)
    experts = [ffn for ffn in ffns if isinstance(ffn, MoESpec)]
    found: dict[str, Any] = {
        "family": spec.family,
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "context_length": spec.max_position,
        "num_heads": sorted({a.num_heads for a in heads}),
        "num_kv_heads": sorted({a.num_kv_heads for a in heads}),
        "head_dim": sorted({a.head_dim for a in heads}),
        "windows": sorted({a.window for a in heads if a.window is not None}),
        "eos_token_ids": list(spec.eos_token_ids),
    }
    if experts:
        found["num_experts"] = sorted({ffn.num_experts for ffn in experts})
    return found


def _cache_bytes(groups: tuple[CacheGroup, ...], dtype: str) -> int:
    of_tokens = tuple(g for g in groups if g.entry.unit is Unit.PAGE)
    return cache_bytes(of_tokens, CacheLayout(page_size=1, dtype=dtype))


def _state_bytes(groups: tuple[CacheGroup, ...], dtype: str) -> int:
    states = tuple(replace(g, entry=g.entry.snapshot) for g in groups if isinstance(g.entry, State))
    return cache_bytes(states, CacheLayout(page_size=1, dtype=dtype))


def _with_memory(
    info: CheckpointInfo, memory: int, *, beside: CheckpointInfo | None
) -> CheckpointInfo:
    both = (info,) if beside is None else (info, beside)
    weights = sum(each.weight_bytes for each in both)
    of_token = sum(each.cache_bytes_per_token for each in both)
    of_rows = sum(each.state_bytes_per_row for each in both)  # at least one row
    left = max(memory * 9 // 10 - weights - of_rows, 0)
    fit = MemoryFit(
        device_bytes=memory,
        weight_bytes=weights,
        cache_bytes=left,
        tokens=left // of_token if of_token else 0,
    )
    return replace(info, memory=fit)


def _with_problem(info: CheckpointInfo, error: JspecError) -> CheckpointInfo:
    said = str(error)
    known = info.problems if said in info.problems else (*info.problems, said)
    return replace(info, problems=known, serve="")


def _itemsize(dtype: str) -> int:
    return 4 if dtype == "float32" else 2
