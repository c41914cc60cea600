"""Resolves EngineArgs, checkpoint facts and device facts, all as data, into a ResolvedConfig: later
code never checks whether an argument was given. Only the pool size follows (`size_pool`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jspec.config.engine_args import EngineArgs
from jspec.config.expert_placement import ExpertMap
from jspec.config.limits import Algorithm, SpeculativeConfig
from jspec.config.resolved_config import ResolvedConfig
from jspec.config.shape_sets import read_candidates, shapes_for
from jspec.errors import ConfigError
from jspec.pallas_kernels.bundles import OPS, choose_ops
from jspec.pallas_kernels.ops import Ops
from jspec.spec import indexing
from jspec.spec.cache_entry import FP8
from jspec.spec.layers.attention import AttentionSpec
from jspec.spec.model_spec import ModelSpec

LARGE_GPU_BYTES = 48 * 10**9  # memory that jax may use
# Clients send a whole benchmark or batch at once, and a waiting request costs only its ids.
DEFAULT_QUEUE = 1024
# An engine with at most this many prefills and decodes compiles all at the start, as on every CPU,
# where a later compilation would compete with serving for the same cores.
FEW_PROGRAMS = 10
KV_NAMES = {FP8: "fp8_e4m3", "bfloat16": "bfloat16"}  # the flag's values by dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    model_path: str
    tokenizer_path: str
    draft_path: str | None = None  # None: no draft model
    max_position: int  # longest context of the target
    head_dims: tuple[int, ...]  # of all models that run, target first
    algorithm: Algorithm | None = None  # if the files decide it
    kv_dtype: str | None = None  # of the KV cache; None: the model's
    expert_map: ExpertMap = ()  # of the target's layers


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    platform: str  # "cpu", "gpu" or "tpu"
    kind: str = "unknown"  # jax's device_kind
    compute_capability: str = "unknown"
    bytes_limit: int = 0  # memory per device that jax may use; 0: unknown

    @classmethod
    def of(cls, devices: Sequence[Any]) -> DeviceFacts:
        first = devices[0]
        return cls(
            platform=first.platform,
            kind=first.device_kind,
            compute_capability=getattr(first, "compute_capability", "unknown"),
            bytes_limit=(first.memory_stats() or {}).get("bytes_limit", 0),
        )


def resolve(args: EngineArgs, checkpoint: CheckpointFacts, device: DeviceFacts) -> ResolvedConfig:
    """Return all that the engine is built from. Raises ConfigError for contradictory arguments."""
    is_cpu = device.platform == "cpu"
    dtype = args.dtype
    if dtype == "auto":
        dtype = "float32" if is_cpu else "bfloat16"
    ops = _kernels(args, checkpoint, device, dtype=dtype)
    speculation = args.speculative
    num_slots = 8 if is_cpu else 48  # of a data rank
    if args.max_running_requests is not None:
        num_slots = -(-args.max_running_requests // args.dp_size)
    max_rows = num_slots * args.dp_size
    chunk = args.chunked_prefill_size or _default_chunk(device, ops)
    given: dict[str, Any] = {name: getattr(args, name) for name in EngineArgs.names()}
    resolved: dict[str, Any] = {
        "model_path": checkpoint.model_path,
        "tokenizer_path": checkpoint.tokenizer_path,
        "speculative_draft_model_path": checkpoint.draft_path,
        "dtype": dtype,
        "kv_cache_dtype": KV_NAMES.get(checkpoint.kv_dtype or dtype, dtype),
        "attention_backend": "xla" if ops.name == "xla" else "pallas",
        "context_length": _context_length(args, checkpoint.max_position),
        "speculative_algorithm": args.speculative_algorithm or speculation.algorithm.name,
        "drafts_as": (checkpoint.algorithm or speculation.algorithm).name,
        "speculative_num_steps": speculation.num_steps,
        "speculative_eagle_topk": speculation.topk,
        "speculative_num_draft_tokens": speculation.num_draft_tokens,
        "page_size": args.page_size or ops.page_size_on(device.kind),
        "max_running_requests": max_rows,
        "max_queued_requests": args.max_queued_requests or max(DEFAULT_QUEUE, max_rows),
        "chunked_prefill_size": chunk,
        "prefill_budget_tokens": _prefill_budget(args, chunk, is_cpu=is_cpu),
    }
    config = ResolvedConfig(
        **(given | resolved),
        kernels=next(name for name, bundle in OPS.items() if bundle == ops),
        column_major=speculation.num_steps > 0 and dtype == "bfloat16",  # a lookup drafts, too
        decode_buckets=_few(num_slots) if is_cpu else indexing.powers_of_two(1, num_slots),
        prefill_buckets=prefill_buckets(chunk, is_cpu=is_cpu),
        prefill_rows=min(args.prefill_max_requests or (4 if is_cpu else 16), num_slots),
        other_shapes=_other_shapes(args, checkpoint),
        expert_map=checkpoint.expert_map,
    )
    if config.compile_at_start != "auto":
        return config
    buckets = len(config.prefill_buckets) + 2 * len(config.decode_buckets)
    are_few = buckets + 2 * config.logprobs <= FEW_PROGRAMS
    return replace(config, compile_at_start="common" if are_few else "first")


def _other_shapes(args: EngineArgs, checkpoint: CheckpointFacts) -> tuple[SpeculativeConfig, ...]:
    if not args.speculative_adaptive:
        if args.speculative_adaptive_config is not None:
            raise ConfigError(
                f"speculative_adaptive_config is {args.speculative_adaptive_config!r}, but "
                f"speculative_adaptive is False; expected it unset"
            )
        return ()
    speculation = args.speculative
    if speculation.is_plain or speculation.simulate_acceptance is not None:
        found = (
            "speculative_algorithm is NONE"
            if speculation.is_plain
            else "simulate_acceptance is set"
        )
        raise ConfigError(
            f"speculative_adaptive is True, but {found}; expected drafts with a measured acceptance"
        )
    path = args.speculative_adaptive_config
    levels = None if path is None else read_candidates(Path(path))
    largest = replace(speculation, algorithm=checkpoint.algorithm or speculation.algorithm)
    return tuple(shape for shape in shapes_for(largest, levels) if shape != largest)


def ops_of(config: ResolvedConfig) -> Ops:
    return OPS[config.kernels].with_columns(config.column_major)


def head_dims_of(models: Iterable[ModelSpec]) -> tuple[int, ...]:
    mixers = (layer.attention for model in models for layer in model.layers)
    return tuple(dict.fromkeys(own.head_dim for own in mixers if type(own) is AttentionSpec))


def _kernels(
    args: EngineArgs, checkpoint: CheckpointFacts, device: DeviceFacts, *, dtype: str
) -> Ops:
    """Choose the platform's kernels if they support this model; arguments may name others."""
    problem = None
    if device.platform == "gpu":
        from jspec.pallas_kernels.ops_gpu import gpu_problem

        problem = gpu_problem(
            compute_capability=device.compute_capability,
            dtype=jnp.dtype(dtype),
            page_size=args.page_size,
            head_dims=checkpoint.head_dims,
        )
    return choose_ops(device.platform, args.attention_backend, gpu_problem=problem)


def _context_length(args: EngineArgs, most: int) -> int:
    """Return the argument or the model's length, beyond which text would be nonsense."""
    if args.context_length is not None and args.context_length > most:
        raise ConfigError(
            f"context_length is {args.context_length}; expected at most {most}, "
            f"max_position_embeddings in the model's config.json"
        )
    return args.context_length or most


def _default_chunk(device: DeviceFacts, ops: Ops) -> int:
    """Return the prefill tokens per step: many for the Hopper kernels, to amortize fixed costs."""
    # XLA's attention multiplies every query with every row's keys, so it gets fewer.
    if device.platform == "cpu":
        return 256
    return 8192 if ops.prefers_long_chunks and device.bytes_limit > LARGE_GPU_BYTES else 2048


def _prefill_budget(args: EngineArgs, chunk: int, *, is_cpu: bool) -> int:
    """Return the prompt tokens between two decode steps: 45 ms of an 8B model on an H200."""
    # On a CPU this is a whole chunk, to which every longer prompt is padded anyway.
    if args.prefill_budget_tokens is not None:
        if args.prefill_budget_ms is not None:
            raise ConfigError(
                f"prefill_budget_tokens is {args.prefill_budget_tokens} and prefill_budget_ms "
                f"{args.prefill_budget_ms:g}; expected one of the two"
            )
        return min(args.prefill_budget_tokens, chunk)
    return chunk if is_cpu else max(chunk // 4, min(chunk, 128))


def _few(num_slots: int) -> tuple[int, ...]:
    """Return decode buckets for a CPU (1, 4, all): compiling costs seconds, a padded row little."""
    return (*(size for size in (1, 4) if size < num_slots), num_slots)


def prefill_buckets(chunk: int, *, is_cpu: bool) -> tuple[int, ...]:
    """Return the token counts of the prefill programs.

    Padding costs as much as tokens, so sizes are dense: every 128 up to 1,024, four per octave up
    to 2,048, two above (decision 21). On a CPU compiling costs more than padding.

    In:  8192    Out: 128 256 ... 1024, 1280 1536 1792 2048, 3072 4096, 6144 8192
    """
    first = 32 if is_cpu else 128
    if chunk <= first:
        return (chunk,)
    if is_cpu:
        return (first, chunk)
    sizes = {size for octave in indexing.powers_of_two(first, chunk) for size in _between(octave)}
    return (*sorted(size for size in sizes if size < chunk), chunk)


def _between(octave: int) -> tuple[int, ...]:
    step = 128 if octave < 1024 else octave // (4 if octave < 2048 else 2)
    return tuple(range(octave, 2 * octave, step))
