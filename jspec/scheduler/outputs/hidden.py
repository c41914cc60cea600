"""Hidden states of one sequence between steps and chunks, like `logprobs`."""

from __future__ import annotations

import numpy as np

from jspec.messages.plan import RoundResult, StepPlan
from jspec.messages.request import Request


class SequenceHidden:
    __slots__ = ("_is_prompt_out", "_is_wanted", "_num_known", "_of_prompt", "_of_round", "_total")

    def __init__(self, request: Request) -> None:
        self._is_wanted = request.sampling.return_hidden_states
        self._is_prompt_out = not self._is_wanted or bool(request.former_ids)
        self._total = len(request.prompt_ids)
        self._num_known = 0
        self._of_prompt: list[np.ndarray] = []
        self._of_round: tuple[np.ndarray, ...] = ()

    @property
    def computed_from(self) -> int | None:
        """First token whose state is unknown and must be computed, not cached; else None."""
        return None if self._is_prompt_out else self._num_known

    def take(self, plan: StepPlan, row: int, result: RoundResult) -> None:
        if not self._is_wanted or result.hidden is None:
            return
        self._of_round = tuple(result.hidden[row, : int(result.num_emitted[row])].copy())
        if self._is_prompt_out or not plan.chunks or result.prompt_hidden is None:
            return
        chunk = plan.chunks[row]
        begin, end = self._num_known, min(chunk.start + len(chunk.token_ids), self._total)
        if begin < end:
            first = sum(len(other.token_ids) for other in plan.chunks[:row]) - chunk.start
            self._of_prompt.append(result.prompt_hidden[first + begin : first + end].copy())
            self._num_known = end

    def of_ids(self, count: int) -> tuple[np.ndarray, ...]:
        """Return the states of the ids that the cut kept, f32[E] each. The first entry has those of
        the whole prompt, f32[prompt, E], also without an id."""
        found, self._of_round = self._of_round[:count], ()
        if self._is_prompt_out or self._num_known < self._total:
            return found
        of_prompt, self._of_prompt = np.concatenate(self._of_prompt), []
        self._is_prompt_out = True
        return (of_prompt, *found[1:])
