"""The set of draft shapes that an adaptive engine is built with."""

from __future__ import annotations

import json
from pathlib import Path

from jspec.config.limits import SpeculativeConfig
from jspec.errors import ConfigError, reason_of
from jspec.files.json_files import json_fault


def shapes_for(
    draft_shape: SpeculativeConfig, steps: tuple[int, ...] | None = None
) -> tuple[SpeculativeConfig, ...]:
    """Return the shapes of an adaptive engine whose largest is `draft_shape`, smallest first.

    steps: levels of drafts; 0 is plain decoding, and levels beyond S are omitted. By default:
    plain, one level, half of four or more levels, and for trees also the chain of the same depth.

    In:  3/1/4 → 0/1/1 1/1/2 3/1/4;  6/1/7 → 0/1/1 1/1/2 3/1/4 6/1/7
         3/4/16 → 0/1/1 1/4/5 3/1/4 3/4/16
    """
    most = draft_shape.num_steps
    levels = steps if steps is not None else (0, 1, *((most // 2,) if most >= 4 else ()))
    found = [_of_levels(draft_shape, level) for level in sorted({*levels, most}) if level <= most]
    if draft_shape.topk > 1 and steps is None and draft_shape.num_draft_tokens > most + 1:
        found.insert(-1, _shaped(draft_shape, most, 1, most + 1))
    return tuple(dict.fromkeys(found))


def _of_levels(draft_shape: SpeculativeConfig, levels: int) -> SpeculativeConfig:
    if levels == 0:
        return SpeculativeConfig.plain()
    if levels == draft_shape.num_steps:
        return draft_shape
    topk = draft_shape.topk
    most = 1 + draft_shape.algorithm.num_candidates(levels, topk) + topk * draft_shape.lookup_steps
    nodes = levels + 1 if draft_shape.is_chain else min(most, draft_shape.num_draft_tokens)
    return _shaped(draft_shape, levels, draft_shape.topk, nodes)


def _shaped(draft_shape: SpeculativeConfig, steps: int, topk: int, nodes: int) -> SpeculativeConfig:
    return SpeculativeConfig(
        algorithm=draft_shape.algorithm,
        num_steps=steps,
        topk=topk,
        num_draft_tokens=nodes,
        lookup=draft_shape.lookup,
    )


def read_candidates(path: Path) -> tuple[int, ...]:
    """Return the levels of {"candidate_steps": [levels, ...]}. Raises ConfigError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"speculative_adaptive_config {path}: {reason_of(error)}") from error
    except ValueError as error:
        raise ConfigError(f"speculative_adaptive_config {path} {json_fault(error)}") from error
    levels = found.get("candidate_steps") if isinstance(found, dict) and len(found) == 1 else None
    is_right = isinstance(levels, list) and all(type(x) is int and x >= 0 for x in levels)
    if not levels or not is_right:
        raise ConfigError(
            f"speculative_adaptive_config {path}: found {found!r}; expected "
            f'{{"candidate_steps": [0, 1, 3]}}, levels of drafts, 0 being plain decoding'
        )
    return tuple(levels)
