"""What a step must be able to do beyond choosing a token: a set that selects a compiled program.

Each request needs some features, a plan the union of its rows', and a program has those that were
compiled in. A program serves every plan whose features it covers; one with none is the fastest.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


class Feature(enum.Enum):
    """One that costs time in a step, and is compiled in or left out."""

    # Each step looks programs up by these; Enum's own hash is of the name, and made in Python.
    __hash__ = object.__hash__

    FILTERS = "filters"  # top-k, top-p, min-p
    PENALTIES = "penalties"  # what changes logits by token ids: penalties, bias, minimum length
    LOGPROBS = "logprobs"  # log-probabilities of what is emitted, and of prompts
    HIDDEN = "hidden"  # hidden states of what is emitted, and of prompts
    GRAMMAR = "grammar"  # tokens that a grammar allows, told by the host for every node
    SHARED = "shared prefixes"  # keys that several rows begin with, read once; no request needs it


@dataclass(frozen=True, slots=True)
class StepFeatures:
    """An immutable set of features; iterates, and reads as text, in the order of `Feature`."""

    members: frozenset[Feature] = frozenset()

    def __contains__(self, feature: Feature) -> bool:
        return feature in self.members

    def __iter__(self) -> Iterator[Feature]:
        return (feature for feature in Feature if feature in self.members)

    def __len__(self) -> int:
        return len(self.members)

    def __repr__(self) -> str:  # part of a stored program's name: the same in every process
        return f"StepFeatures({self})"

    def __str__(self) -> str:
        """plain, sampling (SAMPLING), all, or the names."""
        if self.members == ALL.members:
            return "all"
        if self.members == SAMPLING.members:
            return "sampling"
        return "+".join(feature.value for feature in self) or "plain"

    def covers(self, other: StepFeatures) -> bool:
        """Whether a program with these serves a plan that needs `other`."""
        return other.members <= self.members

    def union(self, others: Iterable[StepFeatures]) -> StepFeatures:
        """These and all of the others'. Most add nothing, and cost one comparison."""
        members = self.members
        for other in others:
            if not other.members <= members:
                members |= other.members
        return StepFeatures(members)


PLAIN = StepFeatures()
# All that changes which token is chosen. Log-probabilities are apart: they cost more than these.
SAMPLING = StepFeatures(frozenset({Feature.FILTERS, Feature.PENALTIES}))
# All that an engine has from its start: the rest is made when somebody asks.
ALL = StepFeatures(frozenset({*SAMPLING, Feature.LOGPROBS}))
