"""Log-probabilities of one sequence between steps and chunks. A round's values wait until its ids
are cut, a prompt's for the first token; after a retraction, known ones are not taken twice."""

from __future__ import annotations

from jspec.messages.plan import RoundResult, StepPlan
from jspec.messages.request import PromptToken, Request, TokenLogprob


class SequenceLogprobs:
    __slots__ = ("_is_prompt_out", "_is_wanted", "_of_prompt", "_of_round", "_request", "_start")

    def __init__(self, request: Request) -> None:
        sampling = request.sampling
        self._request = request
        self._is_wanted = sampling.return_logprob
        # The values of the prompt came with the former ids.
        self._is_prompt_out = not sampling.wants_prompt_logprobs or bool(request.former_ids)
        self._start = min(max(sampling.logprob_start_len, 0), len(request.prompt_ids))
        self._of_round: tuple[TokenLogprob, ...] = ()
        self._of_prompt: list[PromptToken] = []
        if not self._is_prompt_out and self._start == 0:
            self._of_prompt.append((request.prompt_ids[0], None))

    @property
    def computed_from(self) -> int | None:
        """The token before the first unknown value, which must be computed, not cached; or None."""
        return None if self._is_prompt_out else max(self._next_position - 1, 0)

    @property
    def _next_position(self) -> int:
        return self._start + len(self._of_prompt)

    def take(self, plan: StepPlan, row: int, result: RoundResult) -> None:
        if not self._is_wanted or result.logprobs is None:
            return
        sampling = self._request.sampling
        self._of_round = result.logprobs.of_row(row, int(result.num_emitted[row]), sampling)
        if self._is_prompt_out or not plan.chunks or result.prompt_logprobs is None:
            return
        chunk, prompt_ids = plan.chunks[row], self._request.prompt_ids
        first = sum(len(other.token_ids) for other in plan.chunks[:row])
        # The log-probability of a token is in the entry of the token before it.
        end = min(chunk.start + len(chunk.token_ids) + 1, len(prompt_ids))
        begin = self._next_position
        if begin < end:
            offset = first - 1 - chunk.start
            known = result.prompt_logprobs.of_rows(begin + offset, end + offset, sampling)
            self._of_prompt += zip(prompt_ids[begin:end], known, strict=True)

    def of_ids(self, count: int) -> tuple[TokenLogprob, ...]:
        known, self._of_round = self._of_round, ()
        return known[:count]

    def of_prompt(self) -> tuple[PromptToken, ...]:
        if self._is_prompt_out:
            return ()
        known, self._of_prompt, self._is_prompt_out = tuple(self._of_prompt), [], True
        return known
