"""The set of shapes that an adaptive engine is built with."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jspec.config.limits import SpeculativeConfig
from jspec.errors import ConfigError

LEAST_SHARED = 8  # nodes of a row: from here on a tree is also verified at half of them


@dataclass(frozen=True, slots=True)
class Candidates:
    """What shapes are made of; None: by the rule of `shapes_for`.

    steps: levels of drafts, 0 is plain decoding. nodes: of the largest shape, verified a row on
    average, for which the device chooses over all rows (`SpeculativeConfig.total_nodes_per_row`).
    """

    steps: tuple[int, ...] | None = None
    nodes: tuple[float, ...] | None = None


def shapes_for(
    spec: SpeculativeConfig, candidates: Candidates | None = None
) -> tuple[SpeculativeConfig, ...]:
    """The shapes of an adaptive engine whose largest is `spec`, smallest first.

    Plain, one level, half of four or more, and `spec`; for trees also the chain as deep as they
    are, and the tree with half of its nodes for all rows together. Levels beyond S and nodes from N
    on are left out, as are the nodes where `spec` has a number of its own.

    In:  3/1/4 → 0/1/1 1/1/2 3/1/4;  6/1/7 → 0/1/1 1/1/2 3/1/4 6/1/7
         3/4/16 → 0/1/1 1/4/5 3/1/4 3/4/16 of 8 a row, 3/4/16
    """
    candidates = candidates or Candidates()
    most, steps = spec.num_steps, candidates.steps
    levels = steps if steps is not None else (0, 1, *((most // 2,) if most >= 4 else ()))
    found = [_of_levels(spec, level) for level in sorted({*levels, most}) if level <= most]
    if spec.topk > 1 and steps is None and spec.num_draft_tokens > most + 1:
        found.insert(-1, _shaped(spec, most, 1, most + 1))
    if not spec.counts_nodes:
        nodes = sorted(n for n in _nodes(spec, candidates) if n < spec.num_draft_tokens)
        found[-1:-1] = [replace(spec, total_nodes_per_row=n) for n in nodes]
    return tuple(dict.fromkeys(found))


def _nodes(spec: SpeculativeConfig, candidates: Candidates) -> tuple[float, ...]:
    """Of the largest shape, a row on average. Who names levels names these, too."""
    if candidates.nodes is not None or candidates.steps is not None:
        return candidates.nodes or ()
    is_wide = spec.topk > 1 and spec.num_draft_tokens >= LEAST_SHARED
    return (spec.num_draft_tokens / 2,) if is_wide else ()


def _of_levels(spec: SpeculativeConfig, levels: int) -> SpeculativeConfig:
    if levels == 0:
        return SpeculativeConfig.plain()
    if levels == spec.num_steps:
        return spec
    most = 1 + spec.algorithm.drafting.num_candidates(levels, spec.topk)
    nodes = levels + 1 if spec.topk == 1 else min(most, spec.num_draft_tokens)
    return _shaped(spec, levels, spec.topk, nodes)


def _shaped(spec: SpeculativeConfig, steps: int, topk: int, nodes: int) -> SpeculativeConfig:
    total = spec.total_nodes_per_row
    return SpeculativeConfig(
        algorithm=spec.algorithm,
        num_steps=steps,
        topk=topk,
        num_draft_tokens=nodes,
        total_nodes_per_row=None if total is None or total >= nodes else total,
    )


def read_candidates(path: Path) -> Candidates:
    """Of {"candidate_steps": [levels, ...], "total_nodes_per_row": [nodes, ...]}, of which one may
    be missing. Raises ConfigError for any other file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"speculative_adaptive_config {path}: {error}") from error
    rules = {"candidate_steps": _is_level, "total_nodes_per_row": _is_number_of_nodes}
    is_right = isinstance(found, dict) and found and set(found) <= set(rules)
    if not is_right or not all(_is_list_of(rules[key], value) for key, value in found.items()):
        raise ConfigError(
            f"speculative_adaptive_config {path}: found {found!r}; expected "
            f'{{"candidate_steps": [0, 1, 3], "total_nodes_per_row": [6, 8]}}, levels of drafts, 0 '
            f"being plain decoding, and nodes of the largest shape, from 1, verified of a row on "
            f"average"
        )
    steps, nodes = (found.get(key) for key in rules)
    return Candidates(
        steps=None if steps is None else tuple(steps), nodes=None if nodes is None else tuple(nodes)
    )


def _is_list_of(rule: Any, value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(rule, value))


def _is_level(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_number_of_nodes(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 1 <= value < math.inf
