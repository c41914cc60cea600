"""Sizes of a toy engine, for tests of the host half."""

from __future__ import annotations

import dataclasses

from jspec.config.limits import Algorithm, ServeLimits, SpeculativeConfig, WindowSpace
from jspec.spec.indexing import powers_of_two
from tests.support.flat_limits import flat_limits


def small_limits(
    *,
    steps_topk_nodes: tuple[int, int, int] = (3, 1, 4),
    algorithm: Algorithm = Algorithm.EAGLE3,
    num_slots: int = 4,
    num_pages: int = 64,
    page_size: int = 4,
    context_length: int = 128,
    chunk_size: int = 16,
    prefill_rows: int = 2,
    overlap_depth: int = 1,
    num_rounds: int = 1,
    max_queued_requests: int = 8,
    windows: tuple[WindowSpace, ...] = (),
    prefix_cache: bool = False,
    shapes: tuple[tuple[int, int, int], ...] = (),
) -> ServeLimits:
    """Return ServeLimits of a toy engine; 0/1/1 is plain decoding. shapes: the other shapes."""
    num_steps, topk, nodes = steps_topk_nodes
    draft_shape = SpeculativeConfig(
        algorithm=algorithm if num_steps else Algorithm.NONE,
        num_steps=num_steps,
        topk=topk,
        num_draft_tokens=nodes,
    )
    return flat_limits(
        draft_shape=draft_shape,
        num_slots=num_slots,
        num_pages=num_pages,
        page_size=page_size,
        context_length=context_length,
        decode_buckets=powers_of_two(1, num_slots),
        prefill_buckets=powers_of_two(1, chunk_size),
        prefill_rows=prefill_rows,
        overlap_depth=overlap_depth,
        num_rounds=num_rounds,
        max_queued_requests=max_queued_requests,
        windows=windows,
        prefix_cache=prefix_cache,
        other_shapes=tuple(_shape(draft_shape, other) for other in shapes),
    )


def _shape(
    draft_shape: SpeculativeConfig, steps_topk_nodes: tuple[int, int, int]
) -> SpeculativeConfig:
    num_steps, topk, nodes = steps_topk_nodes
    if not num_steps:
        return SpeculativeConfig.plain()
    return dataclasses.replace(draft_shape, num_steps=num_steps, topk=topk, num_draft_tokens=nodes)
