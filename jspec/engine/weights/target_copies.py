"""Warnings about drafts whose files contain tensors of another target."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jspec.models.files.stored.tensors import value_at
from jspec.models.files.w8a8 import open_tensors
from jspec.models.heads.target_copies import FOREIGN, NUM_ROWS, TargetCopy, difference
from jspec.speculative.drafters.source import DraftSource

log = logging.getLogger(__name__)


def warn_of_other_targets(path: Path, source: DraftSource, target: Mapping[str, Any]) -> None:
    """Warn of each tensor that the draft should share with the target but does not, by a sample of
    rows."""
    if not source.copies:
        return
    with open_tensors(path, canonical=source.canonical) as tensors:
        for name, copy in source.copies.items():
            if name not in tensors:
                continue
            found = difference(tensors, name, copy.path, value_at(target, copy.path))
            if found is not None and found > FOREIGN:
                file, stored = tensors.sources[name]
                log.warning(
                    "%s: %s differs from the target's by %.0f%% (root mean square over %d tokens); "
                    "%s",
                    *(file.path, stored, 100 * found, NUM_ROWS, _what_to_do(copy)),
                )


def _what_to_do(copy: TargetCopy) -> str:
    if copy.is_read:
        return (
            "the head drafts with its own. That is correct if it was trained with it for this "
            "target; a head of another target has few drafts accepted. Without the tensor in its "
            "file the target's is used; jspec doctor measures both"
        )
    return (
        "the target's is used instead, but the head seems to be trained for another target: if "
        "few drafts are accepted, get the head of this target. jspec doctor measures it"
    )
