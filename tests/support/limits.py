"""Limits of an engine for a config and devices that need not exist."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jspec.config.engine_args import EngineArgs
from jspec.config.limits import ServeLimits
from jspec.engine.memory.pool_sizes import size_pool
from jspec.engine.resolving import CheckpointFacts, DeviceFacts, ops_of, resolve
from jspec.spec.cache_groups import CacheGroup


def limits_for(
    args: EngineArgs, groups: tuple[CacheGroup, ...], *, devices: Sequence[Any]
) -> ServeLimits:
    """Return limits like `building` does: resolved, then sized by the free memory of `devices`."""
    checkpoint = CheckpointFacts(
        model_path="m", tokenizer_path="m", max_position=256, head_dims=(16,)
    )
    config = resolve(args, checkpoint, DeviceFacts.of(devices))
    return size_pool(config, groups, devices=list(devices), ops=ops_of(config))
