"""Step options: computations of a step beyond choosing tokens. They select a program.

A program serves every plan whose options it covers; the one without options is the fastest.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


class StepOption(enum.Enum):
    """A part of a step that costs time and is compiled only if a request needs it."""

    # Every step looks programs up by options; Enum's own hash runs in Python.
    __hash__ = object.__hash__

    FILTERS = "filters"  # top-k, top-p, min-p
    PENALTIES = "penalties"  # changes of logits by token id: penalties, bias, minimum length
    LOGPROBS = "logprobs"  # log-probabilities of emitted and prompt tokens
    HIDDEN = "hidden"  # hidden states of emitted and prompt tokens
    GRAMMAR = "grammar"  # masks of allowed tokens, sent by the host for every node
    SHARED = "shared prefixes"  # prefix KV read once for several rows; no request needs it


@dataclass(frozen=True, slots=True)
class StepOptions:
    """An immutable set of options that iterates and prints in the order of `StepOption`."""

    members: frozenset[StepOption] = frozenset()

    def __contains__(self, option: StepOption) -> bool:
        return option in self.members

    def __iter__(self) -> Iterator[StepOption]:
        return (option for option in StepOption if option in self.members)

    def __len__(self) -> int:
        return len(self.members)

    def __repr__(self) -> str:  # part of a stored program's name: stable across processes
        return f"StepOptions({self})"

    def __str__(self) -> str:
        """Return "plain", "sampling" (SAMPLING), "all", or the names joined by +."""
        if self.members == ALL.members:
            return "all"
        if self.members == SAMPLING.members:
            return "sampling"
        return "+".join(option.value for option in self) or "plain"

    def covers(self, other: StepOptions) -> bool:
        return other.members <= self.members

    def within(self, options: frozenset[StepOption]) -> StepOptions:
        return self if self.members <= options else StepOptions(self.members & options)

    def union(self, others: Iterable[StepOptions]) -> StepOptions:
        """Return the union with all others. It is cheap if they add nothing, as most do."""
        members = self.members
        for other in others:
            if not other.members <= members:
                members |= other.members
        return StepOptions(members)


PLAIN = StepOptions()
# Everything that changes which token is chosen. Log-probabilities cost more and are separate.
SAMPLING = StepOptions(frozenset({StepOption.FILTERS, StepOption.PENALTIES}))
UNMASKED = frozenset(StepOption) - {StepOption.GRAMMAR}
# Options compiled at start; programs for the others are compiled on demand.
ALL = StepOptions(frozenset({*SAMPLING, StepOption.LOGPROBS}))
