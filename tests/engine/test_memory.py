"""The static sizes of an engine: what follows from the model, and what contradicts it."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from jspec.config.engine_args import EngineArgs
from jspec.config.limits import ServeLimits
from jspec.errors import ConfigError
from jspec.spec.model_spec import cache_groups
from tests.support.limits import limits_for
from tests.support.tiny_models import tiny_target_config


def limits_of(*, context_length: int | None = None, **arguments: Any) -> ServeLimits:
    return limits_for(
        EngineArgs(
            model_path="m",
            speculative_algorithm="NONE",
            dtype="float32",
            attention_backend="xla",
            context_length=context_length,
            page_size=16,
            **arguments,
        ),
        cache_groups(tiny_target_config(), name="target"),
        devices=jax.devices()[:1],
    )


@pytest.mark.parametrize(("given", "expected"), [(None, 256), (256, 256), (100, 100)])
def test_the_context_is_the_models_unless_it_is_shortened(given: int | None, expected: int) -> None:
    assert limits_of(context_length=given).pool.context_length == expected


def test_a_context_beyond_the_models_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"context_length is 257; .* 256, max_position_embedd"):
        limits_of(context_length=257)


@pytest.mark.parametrize(
    ("slots", "queue", "expected"), [(4, None, 1024), (2000, None, 2000), (300, 2, 2)]
)
def test_a_queue_fills_every_slot_unless_it_is_bounded(
    slots: int, queue: int | None, expected: int
) -> None:
    limits = limits_of(max_running_requests=slots, max_queued_requests=queue)
    assert limits.scheduling.max_queued_requests == expected
