"""ServeLimits by the names of their fields, whichever part has them."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from jspec.config.limits import PoolLimits, ProgramLimits, SchedulingLimits, ServeLimits

PARTS = {"pool": PoolLimits, "programs": ProgramLimits, "scheduling": SchedulingLimits}
PART_OF = {field.name: name for name, part in PARTS.items() for field in fields(part)}


def flat_limits(**values: Any) -> ServeLimits:
    parts, own = _by_part(values)
    return ServeLimits(**own, **{name: part(**parts[name]) for name, part in PARTS.items()})


def with_limits(limits: ServeLimits, **changes: Any) -> ServeLimits:
    """Return the limits with some fields changed."""
    parts, own = _by_part(changes)
    changed = {name: replace(getattr(limits, name), **each) for name, each in parts.items()}
    return replace(limits, **own, **changed)


def _by_part(values: dict[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    parts: dict[str, dict[str, Any]] = {name: {} for name in PARTS}
    own = {name: value for name, value in values.items() if name not in PART_OF}
    for name, value in values.items():
        if name in PART_OF:
            parts[PART_OF[name]][name] = value
    return parts, own
