"""Loading checkpoints, or with `load_format` "dummy" random weights, onto devices."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jspec.config.engine_args import EngineArgs
from jspec.config.expert_placement import expert_map
from jspec.config.resolved_config import ResolvedConfig
from jspec.device import hosts
from jspec.device.parallel import Parallel, devices_of_rank
from jspec.engine.memory.device_memory import check_weights_fit
from jspec.engine.resolving import CheckpointFacts, DeviceFacts, head_dims_of, ops_of, resolve
from jspec.engine.weights.adapters import lora_spec, no_adapters
from jspec.engine.weights.dummy_weights import dummy_params
from jspec.engine.weights.remote_checkpoints import local_directories
from jspec.engine.weights.resident_formats import Wanted, resident_formats
from jspec.engine.weights.target_copies import warn_of_other_targets
from jspec.engine.weights.weight_stream import put_on, put_parts_on, stream
from jspec.errors import ConfigError
from jspec.layers.expert_use import COPIES, copies_of
from jspec.layers.linear import Shard
from jspec.models.decoder import Decoder
from jspec.models.files.checkpoint import check_target, load_model_spec, load_target, warn_of_ends
from jspec.models.files.kv_scales import cached_dtype
from jspec.models.files.stored.param_reads import on_host
from jspec.models.layer import Params
from jspec.models.params import ParamSpec, ParamTable
from jspec.models.placement import Tables, param_places
from jspec.models.registry import table_of
from jspec.spec.axes import MODEL, Axis
from jspec.spec.cache_entry import FP8
from jspec.spec.expert_shards import experts_by_layer, has_experts, on_expert_shards, places_experts
from jspec.spec.layers.delta_net import DeltaNetSpec
from jspec.spec.layers.feed_forward import DenseSpec, MoESpec
from jspec.spec.model_spec import ModelSpec, cached_in
from jspec.spec.weight_format import num_bytes
from jspec.speculative.drafter import Drafter
from jspec.speculative.drafters.registry import DRAFTERS, source_of
from jspec.speculative.drafters.source import DraftRequest, DraftSource, ReadSource
from jspec.text.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)
BUNDLED = Path(__file__).resolve().parents[2] / "bundled"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPaths:
    target: Path
    tokenizer: Path
    draft: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModels:
    """Resolved config, static target and drafter, and their params on the mesh."""

    config: ResolvedConfig
    target: Decoder
    drafter: Drafter
    params: dict[str, Any]
    source: DraftSource  # of the drafter
    request: DraftRequest
    read_source: ReadSource  # with `request`, to read other weights for the drafter
    draft_layer: ModelSpec | None = None


def resolve_paths(args: EngineArgs) -> ModelPaths:
    """Return the checkpoint directories, downloading remote ones. Raises CheckpointError."""
    algorithm, bundled = args.algorithm, args.bundled_draft
    asked = {"model_path": args.model_path, "tokenizer_path": args.tokenizer_path}
    if algorithm.has_model and bundled is None:
        asked["speculative_draft_model_path"] = args.speculative_draft_model_path
    found = local_directories({name: os.fspath(value) for name, value in asked.items() if value})
    target = found.get("model_path", BUNDLED / "target")
    draft = found.get("speculative_draft_model_path")
    if bundled is not None:
        draft = BUNDLED / bundled
    elif algorithm.in_target:
        draft = draft or target
    return ModelPaths(
        target=target,
        tokenizer=found.get("tokenizer_path", target),
        draft=draft if algorithm.has_model else None,
    )


def load_models(
    args: EngineArgs,
    paths: ModelPaths,
    *,
    mesh: Mesh,
    drafters: Mapping[str, ReadSource] = DRAFTERS,
) -> LoadedModels:
    """Read configs, resolve, and load target and draft. Raises CheckpointError or ConfigError."""
    parallel = Parallel.of(mesh)
    parallel.check_served()
    kv_dtype = cached_dtype(args.kv_cache_dtype, paths.target)
    spec = cached_in(load_model_spec(paths.target), kv_dtype)
    expert_shards = parallel.expert * args.expert_ranks
    if expert_shards > 1 and not has_experts(spec):
        raise ConfigError(f"ep_size is {expert_shards}; expected 1: the model has no experts")
    if args.expert_distribution_recorder_mode is not None and not has_experts(spec):
        raise ConfigError(
            f"expert_distribution_recorder_mode is {args.expert_distribution_recorder_mode!r}; "
            "expected it unset: the model has no experts"
        )
    spec = on_expert_shards(
        spec, expert_shards, data_shards=args.expert_ranks, spares=args.expert_spares
    )
    warn_of_ends(paths.target, spec)
    check_divisible(spec, parallel)
    if args.load_format != "dummy":
        check_target(paths.target, spec)  # before specs are built layer by layer
    request = DraftRequest(
        args=args,
        path=paths.draft,
        target=spec,
        target_path=paths.target,
        tokenizer=paths.tokenizer,
        shards=parallel.model,
        expert_shards=expert_shards,
        kv_dtype=kv_dtype,
    )
    read_source = partial(source_of, read=drafters[args.algorithm.name])
    source = read_source(request)
    for draft_spec in source.specs:
        check_divisible(draft_spec, parallel)
    checkpoint = CheckpointFacts(
        model_path=str(paths.target),
        tokenizer_path=str(paths.tokenizer),
        draft_path=None if paths.draft is None else str(paths.draft),
        max_position=spec.max_position,
        head_dims=head_dims_of((spec, *source.specs)),
        algorithm=source.algorithm,
        kv_dtype=kv_dtype,
        expert_map=expert_map(args, experts_by_layer(spec)),
    )
    config = resolve(args, checkpoint, DeviceFacts.of(mesh.local_devices))
    return _place_models(config, source, request, read_source, mesh=mesh)


def _place_models(
    config: ResolvedConfig,
    source: DraftSource,
    request: DraftRequest,
    read_source: ReadSource,
    *,
    mesh: Mesh,
) -> LoadedModels:
    spec = request.target
    shard = Shard(request.shards, MODEL)
    ops = ops_of(config).on(mesh.devices.flat[0].device_kind)
    if request.kv_dtype == FP8 and ops.xla_for_fp8():
        log.info("XLA reads and writes the KV cache in FP8 for %s", ", ".join(ops.xla_for_fp8()))
    has_files = config.load_format != "dummy"
    wanted = Wanted(
        value=config.quantization, bundle=ops.name, dtype=config.dtype, shards=request.shards
    )
    formats = resident_formats(request.target_path, table_of(spec), wanted, has_files=has_files)
    lora = lora_spec(config, table_of(spec))
    if lora is not None:
        config = replace(config, max_lora_rank=lora.rank, lora_target_modules=lora.modules)
    experts = config.expert_map if places_experts(spec) else ()
    target = Decoder(spec, ops, shard, source.aux_layer_ids, formats, lora, experts)
    drafter = source.make(ops, shard)
    if request.path is not None:
        name = "speculative_draft_model_quantization"
        wanted = replace(wanted, name=name, value=config.speculative_draft_model_quantization)
        table = (own for own in drafter.table if own.path[0] not in source.shares)
        canonical = source.canonical
        of_draft = resident_formats(
            request.path, tuple(table), wanted, has_files=has_files, canonical=canonical
        )
        if of_draft:
            request = replace(request, formats=of_draft)
            source = read_source(request)
            drafter = source.make(ops, shard)
    placed = _target_params(config, target, mesh=mesh)
    try:
        draft = _draft_params(config, source, drafter, target, placed, mesh=mesh)
    except BaseException:
        for array in jax.tree.leaves(placed):
            array.delete()  # a kept error must not keep a target's memory
        raise
    return LoadedModels(
        config=config,
        target=target,
        drafter=drafter,
        params={"target": placed, "draft": draft},
        source=source,
        request=request,
        read_source=read_source,
        draft_layer=source.specs[0] if source.specs else None,
    )


def _target_params(config: ResolvedConfig, target: Decoder, *, mesh: Mesh) -> Params:
    path, dtype = Path(config.model_path), jnp.dtype(config.dtype)
    _check_fits("model_path", path, target.table, mesh=mesh, dtype=dtype)
    if config.load_format == "dummy":
        made = dummy_params(
            {"target": target.table},
            mesh=mesh,
            vocab_size=target.spec.vocab_size,
            dtype=dtype,
            column_major=target.ops.column_major,
        )["target"]
        return made | expert_copies(target, mesh=mesh)
    put = put_on(mesh, column_major=target.ops.column_major)
    loaded = load_target(
        path,
        target.spec,
        dtype=dtype,
        shards=target.shard.size,
        place=partial(stream, put=put, **_how_to_place(mesh)),
        formats=target.formats,
        experts=target.experts,
    )
    adapters = no_adapters(target, mesh=mesh, dtype=dtype)
    return loaded | adapters | expert_copies(target, mesh=mesh)


def expert_copies(target: Decoder, *, mesh: Mesh) -> Params:
    """Return the places of each placed expert's copies, on every device; {} if none is placed."""
    counts = zip(target.experts, experts_by_layer(target.spec), strict=False)
    copies: dict[Any, Any] = {
        layer: copies_of(placed, count) for layer, (placed, count) in enumerate(counts) if placed
    }
    return {COPIES: place(mesh, {}, copies)} if copies else {}


def _draft_params(
    config: ResolvedConfig,
    source: DraftSource,
    drafter: Drafter,
    target: Decoder,
    target_params: Params,
    *,
    mesh: Mesh,
) -> Params:
    path, dtype = config.speculative_draft_model_path, jnp.dtype(config.dtype)
    if not drafter.table:  # e.g. a lookup table, replicated on every device
        weights = source.read(target_params, dtype, on_host)
        return place(mesh, {}, {"draft": weights})["draft"]
    own = tuple(spec for spec in drafter.table if spec.path[0] not in source.shares)
    if path is not None:
        _check_fits("speculative_draft_model_path", Path(path), own, mesh=mesh, dtype=dtype)
    if config.load_format == "dummy":
        made = dummy_params(
            {"draft": own},
            mesh=mesh,
            vocab_size=target.vocab_size,
            dtype=dtype,
            column_major=target.ops.column_major,
        )["draft"]
        return {**made, **{name: target_params[name] for name in source.shares}}
    put = put_on(mesh, column_major=target.ops.column_major)
    how = _how_to_place(mesh)
    found = source.read(target_params, dtype, partial(stream, put=put, **how))
    if path is not None and path != config.model_path:
        warn_of_other_targets(Path(path), source, target_params)
    return found


def _how_to_place(mesh: Mesh) -> dict[str, Any]:
    return {"put_parts": put_parts_on(mesh), "own": hosts.own_shards(mesh)}


def _check_fits(name: str, path: Path, table: ParamTable, *, mesh: Mesh, dtype: DTypeLike) -> None:
    parallel, of_model = Parallel.of(mesh), jnp.dtype(dtype).name

    def of_rank(spec: ParamSpec) -> int:
        whole = num_bytes(spec.format_in(of_model), spec.physical_shape(parallel.model))
        return whole // (parallel.data if "experts_of_ranks" in spec.axes else 1)

    memories = hosts.memories(devices_of_rank(mesh))
    check_weights_fit(memories, sum(map(of_rank, table)), f"{name} {str(path)!r}")


def place(
    mesh: Mesh, tables: Tables, params: dict[str, Any], *, column_major: bool = False
) -> dict[str, Any]:
    places = param_places(mesh, tables, params, column_major=column_major)
    # Wait, so that temporaries of a layout change are freed before the pool is sized.
    placed: dict[str, Any] = jax.block_until_ready(hosts.put(params, places))
    return placed


def check_divisible(spec: ModelSpec, parallel: Parallel) -> None:
    """Raise ConfigError for the first size that the shards of its axis do not divide."""
    for layer in dict.fromkeys(spec.layers):
        mixer = layer.attention
        sizes: list[tuple[Axis, str, int]] = []
        if isinstance(mixer, DeltaNetSpec):
            sizes.append(("heads", "linear_num_value_heads", mixer.num_heads))
            sizes.append(("heads", "linear_num_key_heads", mixer.num_key_heads))
        else:
            sizes.append(("heads", "num_attention_heads", mixer.num_heads))
        for ffn in layer.ffns:
            if isinstance(ffn, DenseSpec):
                sizes.append(("mlp", "intermediate_size", ffn.inner))
            else:
                sizes.append(("expert_mlp", "moe_intermediate_size", ffn.inner))
            if isinstance(ffn, MoESpec) and ffn.shared is not None:
                sizes.append(("mlp", "the shared expert's width", ffn.shared.inner))
        for axis, name, size in sorted(sizes, key=lambda each: each[1]):
            shards = parallel.shards(axis)
            if size % shards:
                split = "tp_size" if shards == parallel.model else "tp_size / ep_size"
                raise ConfigError(f"{split} is {shards}; expected a divisor of {name} {size}")
        if isinstance(mixer, DeltaNetSpec):
            continue
        groups, shards = mixer.num_kv_heads, parallel.shards("kv_heads")
        if groups % shards and shards % groups:
            raise ConfigError(
                f"tp_size is {shards}; expected a divisor or a multiple of num_key_value_heads "
                f"{groups}"
            )


def end_of_sequence_ids(target: Path, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Return the ids that end a text: those of the model's files, then the tokenizer's."""
    named = () if tokenizer is None else tokenizer.eos_token_ids
    return tuple(dict.fromkeys((*load_model_spec(target).eos_token_ids, *named)))
