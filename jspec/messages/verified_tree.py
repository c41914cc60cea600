"""The tree of one verification, as host data for inspection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedTree:
    """Node 0 is the root, the last token before the step; parents[0] = -1, parents[i] < i."""

    ids: tuple[int, ...]
    parents: tuple[int, ...]
    accepted: tuple[int, ...]  # nodes of the accepted drafts, from the root's child down

    @classmethod
    def of(
        cls, tokens: Sequence[int], parents: Sequence[int], *, accepted_ids: Sequence[int]
    ) -> VerifiedTree | None:
        """Return the tree and its accepted path, or None for a root alone.

            tokens 7 5 6 9   parents -1 0 0 2   accepted_ids 6 9   → accepted 2 3

        A simulated acceptance also emits tokens that were not drafted; the path ends before them.
        """
        if len(tokens) == 1:
            return None
        children = {pair: node for node, pair in enumerate(zip(parents, tokens, strict=True))}
        path: list[int] = []
        for token_id in accepted_ids:
            child = children.get((path[-1] if path else 0, token_id))
            if child is None:
                break
            path.append(child)
        return cls(ids=tuple(tokens), parents=tuple(parents), accepted=tuple(path))
