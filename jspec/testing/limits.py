"""The sizes that an engine would have, of a config and devices that need not exist."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jspec.core.cache_groups import CacheGroup
from jspec.core.config import ServeLimits
from jspec.core.engine_args import EngineArgs
from jspec.engine.memory import size_pool
from jspec.engine.resolving import CheckpointFacts, DeviceFacts, ops_of, resolve


def limits_for(
    args: EngineArgs,
    groups: tuple[CacheGroup, ...],
    *,
    devices: Sequence[Any],
    max_position: int = 256,
) -> ServeLimits:
    """As `building` finds them: resolved, then sized by what `devices` have free."""
    checkpoint = CheckpointFacts(
        model_path="m", tokenizer_path="m", max_position=max_position, head_dims=(16,)
    )
    config = resolve(args, checkpoint, DeviceFacts.of(devices))
    return size_pool(config, groups, devices=list(devices), ops=ops_of(config))
