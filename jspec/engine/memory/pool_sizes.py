"""The KV pool's size: as configured, or what the weights leave."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from jspec.config.limits import (
    PoolLimits,
    ProgramLimits,
    SchedulingLimits,
    ServeLimits,
    SnapshotLimits,
    WindowSpace,
)
from jspec.config.resolved_config import ResolvedConfig
from jspec.config.shared_prefixes import SharingLimits
from jspec.engine.memory import device_memory
from jspec.engine.memory.device_memory import MemoryDevice
from jspec.pallas_kernels.ops import Ops
from jspec.spec import indexing
from jspec.spec.cache_entry import KV, CacheLayout, bytes_per_unit, kv_heads_per_shard
from jspec.spec.cache_groups import (
    CacheGroup,
    cache_bytes,
    page_spaces,
    slot_groups,
    snapshot_groups,
)
from jspec.spec.layers.attention import AttentionSpec
from jspec.spec.model_spec import ModelSpec

log = logging.getLogger(__name__)

CPU_POOL_BYTES = 1 << 30  # limit of the pool where the memory is unknown
# With a prefix cache, a window space also has pages for the ends of this many finished texts per
# slot, where their next turns start. They are at most 1/MOST_FOR_TAILS of the pages that pools of
# all layers together would have.
TAILS_PER_SLOT = 4
MOST_FOR_TAILS = 8
# With a prefix cache, recurrent layers have this many snapshots of states per slot, but at most
# 1/MOST_FOR_SNAPSHOTS of the memory for caches, and one in any case. Long prompts have one about
# every SNAPSHOT_TOKENS tokens.
SNAPSHOTS_PER_SLOT = 4
MOST_FOR_SNAPSHOTS = 10
SNAPSHOT_TOKENS = 512
NO_WEIGHTS: Mapping[str, int] = {}


def size_pool(
    config: ResolvedConfig,
    groups: tuple[CacheGroup, ...],  # the caches of target and drafter
    *,
    devices: Sequence[MemoryDevice],  # of one data rank
    ops: Ops,
    weights: Mapping[str, int] = NO_WEIGHTS,  # byte counts for `no_pool_error`
) -> ServeLimits:
    """Return the engine's static sizes, with as many pages as the loaded weights leave. Raises
    ConfigError if one request does not fit."""
    page_size, num_slots = config.page_size, config.max_running_requests // config.dp_size
    limits = ServeLimits(
        draft_shape=config.speculative,
        other_shapes=config.other_shapes,
        pool=PoolLimits(
            num_slots=num_slots,
            num_pages=num_slots * _pages_of_context(config),
            page_size=page_size,
            context_length=config.context_length,
            num_ranks=config.dp_size,
        ),
        programs=ProgramLimits(
            decode_buckets=config.decode_buckets,
            prefill_buckets=config.prefill_buckets,
            prefill_rows=config.prefill_rows,
            logprobs=config.logprobs,
        ),
        scheduling=SchedulingLimits(
            prefill_budget=config.prefill_budget_tokens,
            prefill_seconds=None
            if config.prefill_budget_ms is None
            else config.prefill_budget_ms / 1e3,
            overlap_depth=config.overlap_depth,
            num_rounds=config.num_continuous_decode_steps,
            max_queued_requests=config.max_queued_requests,
            priority_order=config.priority_order,
            prefix_cache=not config.disable_radix_cache,
        ),
    )
    layout = CacheLayout(
        page_size=page_size,
        dtype=config.dtype,
        shards=config.rank_size,
        lanes=ops.lanes,
        num_nodes=limits.draft_shape.num_draft_tokens,
        num_path=limits.draft_shape.max_emitted,
    )
    return _sized(limits, config, groups, devices=devices, layout=layout, weights=weights)


def _sized(
    limits: ServeLimits,
    config: ResolvedConfig,
    groups: tuple[CacheGroup, ...],
    *,
    devices: Sequence[MemoryDevice],
    layout: CacheLayout,
    weights: Mapping[str, int],
) -> ServeLimits:
    """Return `limits` with the pages that fit; they come with the largest useful number."""
    # max_total_tokens are usable tokens of the full space. The pool also has the scratch of one
    # row: the last one that runs when pages are short.
    page_size, of_page = limits.pool.page_size, partial(cache_bytes, layout=layout)
    states = slot_groups(groups)
    groups = tuple(group for group in groups if group not in states)
    scratch = config.speculative.num_scratch_pages(page_size)
    of_states = (limits.pool.num_slots + 1) * cache_bytes(states, layout)
    pool_bytes = _pool_bytes(devices, config.mem_fraction_static)
    if states and limits.scheduling.prefix_cache:
        of_snapshot = cache_bytes(snapshot_groups(states), layout)
        snapshots = _snapshots(limits.pool, pool_bytes, of_snapshot)
        limits = replace(limits, pool=replace(limits.pool, snapshots=snapshots))
        of_states += (snapshots.count + 1) * of_snapshot
    pool_bytes -= of_states
    most = limits.pool.num_pages
    tokens = config.max_total_tokens
    asked = None if tokens is None else indexing.num_pages(tokens, page_size) + scratch
    wanted = most if asked is None else asked
    as_one = min(pool_bytes // of_page(groups), wanted) if groups else wanted
    windows = _window_spaces(limits, groups, as_one=as_one)
    full, *apart = page_spaces(groups, windows=[space.window for space in windows])
    taken = sum(w.num_pages * of_page(s.groups) for w, s in zip(windows, apart, strict=True))
    of_full = of_page(full.groups)
    room = (pool_bytes - taken) // of_full if of_full else wanted * (pool_bytes >= 0)
    if asked is not None and tokens is not None:
        device_memory.check_pool_fits(
            devices,
            tokens=tokens,
            num_bytes=asked * of_full + taken + of_states,
            fitting=max(0, room - scratch) * page_size,
        )
        return _with_pages(limits, asked, windows)
    if room < scratch + 1:
        least = (scratch + 1) * of_full + taken + of_states
        raise device_memory.no_pool_error(
            devices, config.mem_fraction_static, num_bytes=least, **weights
        )
    notice = device_memory.unused_notice(devices, os.environ) if room < most else None
    if notice is not None:
        log.warning("%s", notice)
    return _with_pages(limits, min(room, most), windows)


def _with_pages(
    limits: ServeLimits, num_pages: int, windows: tuple[WindowSpace, ...]
) -> ServeLimits:
    return replace(limits, pool=replace(limits.pool, num_pages=num_pages, windows=windows))


def _snapshots(pool: PoolLimits, pool_bytes: int, of_snapshot: int) -> SnapshotLimits:
    affordable = pool_bytes // MOST_FOR_SNAPSHOTS // of_snapshot - 1  # and a dummy
    count = min(pool.num_slots * SNAPSHOTS_PER_SLOT, affordable)
    return SnapshotLimits(max(count, 1), max(SNAPSHOT_TOKENS // pool.page_size, 1))


def _window_spaces(
    limits: ServeLimits, groups: tuple[CacheGroup, ...], *, as_one: int
) -> tuple[WindowSpace, ...]:
    """Return a space for each window that saves memory: pages for all slots, or what fits. as_one:
    pages of the pools if all layers cached everything, which bounds every window."""
    of_chunks = limits.pages_of_chunks(limits.programs.chunk_size)
    of_context = limits.pool.num_pages // limits.pool.num_slots
    spaces = []
    for window in sorted({group.window for group in groups if group.window is not None}):
        of_row = limits.window_pages_per_row(window)
        if of_row < of_context and of_row + of_chunks <= as_one:
            wanted = limits.pool.num_slots * of_row + of_chunks
            if limits.scheduling.prefix_cache:
                tails = limits.pool.num_slots * TAILS_PER_SLOT * limits.pool.tail_pages(window)
                wanted += min(tails, as_one // MOST_FOR_TAILS)
            spaces.append(WindowSpace(window, min(wanted, as_one)))
    return tuple(spaces)


def sharing_limits(config: ResolvedConfig, target: ModelSpec, ops: Ops) -> SharingLimits | None:
    """Return when decodes share prefix reads; None if they never do, without a prefix cache or a
    kernel in `ops` that reads a prefix for two rows at once."""
    is_off = config.disable_radix_cache or config.disable_cascade_attn
    mixers = (layer.attention for layer in target.layers)
    full = {own for own in mixers if type(own) is AttentionSpec and own.window is None}
    is_off |= any(own.has_kv_scales for own in full)  # not measured
    if is_off or ops.sharing_pays_from is None or not full:
        return None
    shards, token = config.rank_size, CacheLayout(page_size=1, dtype=config.dtype, lanes=ops.lanes)
    packs, num_bytes = [], []
    for attention in full:
        heads = kv_heads_per_shard(attention.num_kv_heads, shards)
        group = attention.num_heads // shards // heads
        nodes = config.speculative.num_draft_tokens
        packs.append(ops.rows_a_pack(queries_per_row=nodes, group=group))
        entry = KV(heads, attention.head_dim, attention.value_dim, attention.kv_dtype)
        num_bytes.append(bytes_per_unit(entry, token))
    if min(packs) < 2:
        return None
    return SharingLimits(
        rows_a_pack=min(packs),
        pays_from=-(-ops.sharing_pays_from // min(num_bytes)),
        least_rows=ops.sharing_least_rows,
    )


def _pages_of_context(config: ResolvedConfig) -> int:
    """Return the pages of a row at full context, with 64 more tokens or its scratch."""
    context, page_size = config.context_length, config.page_size
    roomy = (context + 64) // page_size
    scratch = config.speculative.num_scratch_pages(page_size)
    return max(roomy, indexing.num_pages(context, page_size) + scratch)


def _pool_bytes(devices: Sequence[MemoryDevice], fraction: float) -> int:
    found = device_memory.pool_bytes(devices, fraction)
    return CPU_POOL_BYTES if found is None else found
