"""From what a user sends to Requests: text becomes ids, a seed is fixed, ids are checked.

It knows the vocabulary and nothing of queues or sizes: whether a request fits is the scheduler's.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.core.errors import RequestError
from jspec.core.request import Request, SamplingParams, choice_seed
from jspec.text.stop_matcher import StopAutomaton
from jspec.text.tokenizer import Tokenizer

NO_TOKENIZER = "the engine has no tokenizer (skip_tokenizer_init); expected"
Params = Mapping[str, Any] | SamplingParams | None


class Intake:
    """Makes Requests. `random_seed` makes those without a sampling_seed follow from their order.

    tokenizer: None takes ids only, and refuses prompts as text and stop strings.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        random_seed: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._random_seed = random_seed
        self._arrivals = itertools.count()
        self._names = itertools.count()
        self._latest: tuple[tuple[str, ...], StopAutomaton] = ((), StopAutomaton.from_strings(()))

    def requests(
        self,
        prompt: str | None = None,
        input_ids: Sequence[int] | None = None,
        sampling_params: Params = None,
        *,
        request_id: str | None = None,
        extra_key: str | None = None,
    ) -> tuple[Request, ...]:
        """The n Requests of one prompt, tokenized and seeded. Raises RequestError.

        extra_key: requests with different ones share no cached prefix.
        """
        sampling = (
            sampling_params
            if isinstance(sampling_params, SamplingParams)
            else SamplingParams.from_mapping({} if sampling_params is None else sampling_params)
        )
        ids = self._prompt_ids(prompt, input_ids)
        self._check_ids("stop_token_ids", sampling.stop_token_ids)
        if self._tokenizer is None and sampling.stop:
            raise RequestError(f"stop is {sampling.stop!r}; {NO_TOKENIZER} stop_token_ids")
        name = request_id if request_id is not None else f"jspec-{next(self._names)}"
        seed = self._seed(sampling)
        automaton = self._automaton(sampling.stop)
        return tuple(
            Request(
                request_id=name if i == 0 else f"{name}-{i}",
                prompt_ids=ids,
                sampling=sampling,
                seed=choice_seed(seed, i),
                eos_token_ids=self._eos_token_ids,
                stop_matching=automaton,
                extra_key=extra_key,
            )
            for i in range(sampling.n)
        )

    def _automaton(self, stop: tuple[str, ...]) -> StopAutomaton:
        """One for all choices of a prompt, and for all prompts of a call that stop alike."""
        latest, automaton = self._latest  # one read: other threads make requests too
        if latest != stop:
            automaton = StopAutomaton.from_strings(stop)
            self._latest = stop, automaton
        return automaton

    def _prompt_ids(self, prompt: str | None, input_ids: Sequence[int] | None) -> tuple[int, ...]:
        if (prompt is None) == (input_ids is None):
            raise RequestError("expected exactly one of prompt (text) and input_ids")
        if prompt is not None:
            if not isinstance(prompt, str):
                raise RequestError(f"prompt is {type(prompt).__name__}; expected text")
            if self._tokenizer is None:
                raise RequestError(f"the prompt is text; {NO_TOKENIZER} input_ids")
            ids = self._tokenizer.encode(prompt)
            if not ids:
                raise RequestError("the prompt is empty; expected at least one token")
            return ids
        assert input_ids is not None
        self._check_ids("input_ids", input_ids)
        return tuple(input_ids)

    def _check_ids(self, name: str, token_ids: Sequence[int]) -> None:
        """Raises for the first that is no id. Prompts are long, and wait for this: all are checked
        at once, and one by one only where something is odd."""
        if len(token_ids) == 0 or (
            set(map(type, token_ids)) == {int}
            and min(token_ids) >= 0
            and max(token_ids) < self._vocab_size
        ):
            return
        for token_id in token_ids:
            is_id = isinstance(token_id, int) and not isinstance(token_id, bool)
            if not is_id or not 0 <= token_id < self._vocab_size:
                raise RequestError(
                    f"{name} holds {token_id!r}; expected ids from 0 to {self._vocab_size - 1}"
                )

    def _seed(self, sampling: SamplingParams) -> int:
        """The request's final seed: its own, or fresh entropy, or random_seed's next."""
        arrival = next(self._arrivals)
        if sampling.sampling_seed is not None:
            return sampling.sampling_seed
        if self._random_seed is not None:
            return choice_seed(self._random_seed & (2**64 - 1), arrival + 1)
        return int.from_bytes(os.urandom(8), "little")
