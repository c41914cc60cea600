"""How large everything is: what the arguments leave open follows from device and model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jspec.core import shapes
from jspec.core.config import ServeLimits, TransformerConfig
from jspec.core.engine_args import EngineArgs
from jspec.core.errors import ConfigError
from jspec.layers.attention import kv_heads_per_shard
from jspec.layers.linear import Shard
from jspec.pallas_kernels.paged_attention import (
    Backend,
    pool_width,
)

# Without a memory limit to go by (a CPU), the pool holds every slot at full context up to this.
CPU_POOL_BYTES = 1 << 30
# The kernels start one copy a page (and a TPU's keep page tables in scalar memory): larger pages.
XLA_PAGE_SIZE, KERNEL_PAGE_SIZE = 16, 64
LARGE_GPU_BYTES = 48 * 10**9  # of memory that jax may use


def resolve_dtype(name: str, platform: str) -> DTypeLike:
    """Weights, activations and KV in one dtype; "auto" is float32 on a CPU."""
    if name == "auto":
        return jnp.float32 if platform == "cpu" else jnp.bfloat16
    return jnp.dtype(name)


def kv_bytes_per_token(
    config: TransformerConfig, *, shards: int, dtype: DTypeLike, backend: Backend = "xla"
) -> int:
    """Bytes of one token in all layers of all shards; kv heads are replicated if shards > G."""
    heads = kv_heads_per_shard(config.num_kv_heads, Shard(shards)) * shards
    width = pool_width(config.head_dim, backend)
    return 2 * config.num_layers * heads * width * jnp.dtype(dtype).itemsize


def default_page_size(backend: Backend) -> int:
    """Tokens of a page where the arguments do not say."""
    return XLA_PAGE_SIZE if backend in ("xla", "reference") else KERNEL_PAGE_SIZE


def resolve_limits(
    args: EngineArgs,
    target: TransformerConfig,
    *,
    devices: list[jax.Device],
    dtype: DTypeLike,
    draft: TransformerConfig | None,
    backend: Backend,
) -> ServeLimits:
    """The static sizes of the engine.

    Raises ConfigError where the arguments contradict each other or the model, or where the
    weights leave no memory for a pool.
    """
    platform = devices[0].platform
    is_cpu = platform == "cpu"
    context = _context_length(args, target)
    num_slots = args.max_running_requests or (8 if is_cpu else 48)
    page_size = args.page_size or default_page_size(backend)
    chunk = args.chunked_prefill_size or _default_chunk(devices[0], backend)
    total = args.max_total_tokens
    if total is None:
        pools = [target] if draft is None else [target, draft]
        per_token = sum(
            kv_bytes_per_token(config, shards=len(devices), dtype=dtype, backend=backend)
            for config in pools
        )
        room = _pool_bytes(devices, args.mem_fraction_static)
        total = min(room // per_token, num_slots * (context + 64))
    if total < 1:
        raise ConfigError(
            f"mem_fraction_static {args.mem_fraction_static} leaves no memory for the KV pool "
            f"behind the weights; expected a larger share or a smaller model"
        )
    return ServeLimits(
        spec=args.speculative,
        num_slots=num_slots,
        num_pages=total // page_size,
        page_size=page_size,
        context_length=context,
        decode_buckets=shapes.powers_of_two(1, num_slots) if not is_cpu else _few(num_slots),
        prefill_buckets=_prefill_buckets(chunk, is_cpu=is_cpu),
        prefill_rows=min(4 if is_cpu else 16, num_slots),
        overlap_depth=args.overlap_depth,
        num_rounds=args.num_continuous_decode_steps,
        max_queued_requests=args.max_queued_requests or max(128, num_slots),
    )


def _default_chunk(device: jax.Device, backend: Backend) -> int:
    """Prefill tokens of one step. With the Hopper kernels many, so that what a step costs beside
    its tokens does not show; XLA's attention meets every query with every row's keys."""
    if device.platform == "cpu":
        return 256
    stats = (device.memory_stats() or {}) if backend == "gpu" else {}
    return 8192 if stats.get("bytes_limit", 0) > LARGE_GPU_BYTES else 2048


def _context_length(args: EngineArgs, target: TransformerConfig) -> int:
    """The argument, or all of the model's; beyond the model's the text would be nonsense."""
    most = target.max_position
    if args.context_length is not None and args.context_length > most:
        raise ConfigError(
            f"context_length is {args.context_length}; expected at most {most}, "
            f"max_position_embeddings in the model's config.json"
        )
    return args.context_length or most


def _few(num_slots: int) -> tuple[int, ...]:
    """On a CPU a compilation costs seconds and a padded row little: 1, 4, then all slots."""
    return (*(size for size in (1, 4) if size < num_slots), num_slots)


def _prefill_buckets(chunk: int, *, is_cpu: bool) -> tuple[int, ...]:
    first = 32 if is_cpu else 128
    if chunk <= first:
        return (chunk,)
    return (first, chunk) if is_cpu else shapes.powers_of_two(first, chunk)


def _pool_bytes(devices: list[jax.Device], fraction: float) -> int:
    """Bytes left for the pool on all devices together, weights already loaded."""
    total = 0
    for device in devices:
        stats = device.memory_stats()
        if not stats or "bytes_limit" not in stats:
            return CPU_POOL_BYTES
        total += int(stats["bytes_limit"] * fraction) - int(stats["bytes_in_use"])
    return total
