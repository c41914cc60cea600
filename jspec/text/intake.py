"""Intake: turns user input into Requests with tokenized prompts, checked ids and fixed seeds. Text
that is too long for any tokenization is refused before it is tokenized."""

from __future__ import annotations

import difflib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from jspec.errors import ContextLengthError, RequestError, shown_json
from jspec.messages.adapter import LORA_NAMES, Adapter, no_adapter
from jspec.messages.grammar import ReasoningMarks
from jspec.messages.plain_values import is_array, listed, plain, plain_items
from jspec.messages.request import (
    MAX_CHOICES,
    MAX_MASKED_STOP_IDS,
    Request,
    SamplingParams,
)
from jspec.messages.sampling_fields import Integer
from jspec.messages.seeds import DRAWN_BITS, MAX_SEED, choice_seed
from jspec.text.calls.thinking import marks_after, prompt_end
from jspec.text.stop.stop_matcher import StopAutomaton
from jspec.text.template.chat_messages import check_messages
from jspec.text.template.chat_templates import ChatTemplates
from jspec.text.tokenizer.tokenizer import Tokenizer

MAX_PRIORITY = 2**31 - 1
PRIORITY = Integer(
    -MAX_PRIORITY, MAX_PRIORITY, expected=f"an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}"
)
NO_TOKENIZER = "the engine has no tokenizer (skip_tokenizer_init); expected"
Params = Mapping[str, Any] | SamplingParams | None
Ids = Sequence[int] | npt.NDArray[np.integer[Any]]


class LogprobOptions(TypedDict, total=False):
    """Parameters of SGLang's `generate` outside sampling_params, for all prompts of a call."""

    return_logprob: bool
    logprob_start_len: int
    top_logprobs_num: int
    token_ids_logprob: Sequence[int]
    return_text_in_logprobs: bool  # each entry includes its token's text
    return_hidden_states: bool


# Known names, for hints about misspelled ones.
GENERATE_NAMES = (
    *("prompt", "sampling_params", "input_ids", *LORA_NAMES),
    *LogprobOptions.__annotations__,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt of a call, as text or input_ids, and the fields of its requests (`Request`)."""

    text: Any = None
    input_ids: Any = None
    sampling: Params = None  # checked parameters, or fields and their values
    request_id: str | None = None  # of its first choice; None: one is made
    extra_key: str | None = None
    priority: int = 0
    caller: str | None = None
    # Marks of reasoning before a grammar or with a budget; None: those of the prompt's end.
    reasoning: ReasoningMarks | None = None
    shown_ids: frozenset[int] = frozenset()
    lora: str | None = None  # the name of a loaded adapter

    @property
    def num_choices(self) -> int:
        """Its n, or 1 if n is invalid."""
        given = self.sampling
        if isinstance(given, SamplingParams):
            return given.n
        n = plain(given.get("n")) if isinstance(given, Mapping) else None
        return n if isinstance(n, int) and 0 < n <= MAX_CHOICES else 1

    @property
    def num_chars(self) -> int:
        stop = self.sampling.stop if isinstance(self.sampling, SamplingParams) else ()
        return (len(self.text) if isinstance(self.text, str) else 0) + sum(map(len, stop))


class Intake:
    def __init__(
        self,
        tokenizer: Tokenizer | None,  # None: accept only ids, no stop strings
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        context_length: int,
        random_seed: int | None = None,  # gives requests without a seed one by their order
        chat_templates: ChatTemplates | None = None,  # None: refuse messages
        defaults: Mapping[str, Any] | None = None,  # of sampling parameters
        find_adapter: Callable[[str], Adapter] = no_adapter,  # or raises RequestError
    ) -> None:
        self.defaults = dict(defaults or {})
        self._find_adapter = find_adapter
        self._tokenizer = tokenizer
        self._context_length = context_length
        self._chat_templates = chat_templates
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._random_seed = random_seed
        self._arrivals = itertools.count()
        self._names = itertools.count()
        self._latest: tuple[tuple[tuple[str, ...], tuple[str, ...]], StopAutomaton]
        self._latest = ((), ()), StopAutomaton.from_strings(())

    def requests(self, prompt: Prompt) -> tuple[Request, ...]:
        ids, sampling = self.read(prompt)
        reasoning = prompt.reasoning
        if sampling.max_thinking_tokens is not None:
            bounded = reasoning or self._reasoning_after(ids)
            if bounded is not None and self._can_open(bounded):
                reasoning = bounded
            else:  # nothing to bound
                sampling = replace(sampling, max_thinking_tokens=None)
        lora = None if prompt.lora is None else self._find_adapter(prompt.lora)
        name = prompt.request_id if prompt.request_id is not None else f"jspec-{next(self._names)}"
        seed = self._seed(sampling)
        automaton = self._automaton(sampling.stop, sampling.stop_regex)
        return tuple(
            Request(
                request_id=name if i == 0 else f"{name}-{i}",
                prompt_ids=ids,
                sampling=sampling,
                seed=choice_seed(seed, i),
                eos_token_ids=self._eos_token_ids,
                stop_matching=automaton,
                extra_key=prompt.extra_key,
                priority=prompt.priority,
                caller=prompt.caller,
                reasoning=reasoning,
                shown_ids=prompt.shown_ids,
                lora=lora,
            )
            for i in range(sampling.n)
        )

    def read(self, prompt: Prompt) -> tuple[tuple[int, ...], SamplingParams]:
        """Return a prompt's ids and parameters, checked. Raises RequestError."""
        sampling = self.sampling(prompt.sampling)
        ids = self._prompt_ids(
            prompt.text, prompt.input_ids, emits_nothing=sampling.max_new_tokens == 0
        )
        self.check_ids("stop_token_ids", sampling.stop_token_ids)
        self.check_ids("logit_bias", [token_id for token_id, _ in sampling.logit_bias])
        self.check_ids("token_ids_logprob", sampling.token_ids_logprob)
        texts = sampling.stop or sampling.stop_regex
        if self._tokenizer is None and texts:
            name = "stop" if sampling.stop else "stop_regex"
            raise RequestError(f"{name} is {shown_json(texts)}; {NO_TOKENIZER} stop_token_ids")
        PRIORITY.check("priority", prompt.priority)
        if prompt.lora is not None:
            self._find_adapter(prompt.lora)
        num_stop_ids = len(sampling.stop_ids(self._eos_token_ids))
        if sampling.min_new_tokens and num_stop_ids > MAX_MASKED_STOP_IDS:
            raise RequestError(
                f"min_new_tokens is {sampling.min_new_tokens} with {num_stop_ids} stop token ids "
                f"(EOS included); expected at most {MAX_MASKED_STOP_IDS} of them"
            )
        return ids, sampling

    def _reasoning_after(self, ids: tuple[int, ...]) -> ReasoningMarks | None:
        if self._tokenizer is None:
            raise RequestError(
                f"max_thinking_tokens is given; {NO_TOKENIZER} none, since marks in the text bound "
                "reasoning"
            )
        return marks_after(prompt_end(ids, self._tokenizer))

    def _can_open(self, marks: ReasoningMarks) -> bool:
        """Return whether reasoning is open, or the model has a token that opens it."""
        assert self._tokenizer is not None  # of a prompt with marks
        return marks.open is None or self._tokenizer.token_to_id(marks.open) is not None

    def _with_logprobs(self, given: Params, **logprobs: Unpack[LogprobOptions]) -> SamplingParams:
        named: dict[str, Any] = {**logprobs}
        for name in named:
            if name not in LogprobOptions.__annotations__:
                near = difflib.get_close_matches(name, GENERATE_NAMES, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise TypeError(f"generate() got an unexpected argument {name!r}{hint}")
        named.pop("return_text_in_logprobs", None)
        return replace(self.sampling(given), **named)

    def sampling(self, given: Params) -> SamplingParams:
        if isinstance(given, SamplingParams):
            return given
        return SamplingParams.from_mapping({} if given is None else given, defaults=self.defaults)

    def prompts(
        self,
        prompt: str | Sequence[str] | None,
        sampling_params: Params | Sequence[Params],
        input_ids: Ids | Sequence[Ids] | None,
        **logprobs: Unpack[LogprobOptions],
    ) -> tuple[list[Prompt], bool]:
        """Return the prompts of a call, not yet tokenized, and True if they were a list."""
        sources: list[dict[str, Any]]
        if input_ids is not None:
            if prompt is not None:
                raise RequestError("expected exactly one of prompt (text) and input_ids")
            if not _is_list(input_ids):
                raise RequestError(
                    f"input_ids is {shown_json(input_ids)}; expected a list of ids or lists"
                )
            is_list = len(input_ids) > 0 and _is_list(input_ids[0])
            rows = list(input_ids) if is_list else [input_ids]
            for row in rows:
                if not _is_list(row):
                    raise RequestError(
                        f"input_ids holds {shown_json(row)}; expected lists of ids alone"
                    )
            sources = [{"input_ids": row} for row in rows]
        else:
            texts, is_list = _texts(prompt)
            sources = [{"text": text} for text in texts]
        if isinstance(sampling_params, Sequence):
            params = list(sampling_params)
        else:
            params = [sampling_params] * len(sources)
        if logprobs:
            params = [self._with_logprobs(own, **logprobs) for own in params]
        if len(params) != len(sources):
            raise RequestError(
                f"{len(params)} sampling_params for {len(sources)} prompts; expected one each"
            )
        prompts = [
            Prompt(**source, sampling=own) for source, own in zip(sources, params, strict=True)
        ]
        return prompts, is_list

    def chat(
        self,
        messages: object,
        sampling_params: Params = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[tuple[int, ...], SamplingParams]:
        """Return a chat's ids and sampling; max_new_tokens defaults to the rest of the context.
        Raises RequestError for messages that are invalid or that the template refuses."""
        checked = check_messages(messages)
        sampling = self.sampling(sampling_params)
        if self._chat_templates is None:
            raise RequestError(
                "the checkpoint has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json); expected one, or --chat-template FILE"
            )
        is_assistants = checked[-1]["role"] == "assistant"
        if continue_final_message and not is_assistants:
            raise RequestError(
                f"continue_final_message is true and the last message is the "
                f"{checked[-1]['role']}'s; expected the assistant's"
            )
        text = self._chat_templates.render(
            checked,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
            tools=tools,
        )
        ids = self.encode(text, add_special_tokens=False)
        if sampling.max_new_tokens is None:
            most = max(self._context_length - len(ids), 1)
            sampling = replace(sampling, max_new_tokens=most)
        return ids, sampling

    def encode(
        self, text: str, *, add_special_tokens: bool = True, emits_nothing: bool = False
    ) -> tuple[int, ...]:
        """Return the ids of a prompt. emits_nothing: no token follows, so the prompt may fill the
        context. Raises RequestError if it is invalid or too long."""
        if self._tokenizer is None:
            raise RequestError(f"the prompt is text; {NO_TOKENIZER} input_ids")
        longest = self._tokenizer.max_chars_per_token
        fewer_than = self._context_length + emits_nothing
        most = None if longest is None else longest * (fewer_than - 1)
        if most is not None and len(text) > most:
            raise ContextLengthError(
                f"the prompt has {len(text)} characters; expected at most {most} (a token stands "
                f"for at most {longest} characters)",
                context_length=self._context_length,
            )
        try:
            ids = self._tokenizer.encode(
                text, add_special_tokens=add_special_tokens, fewer_than=fewer_than
            )
        except ContextLengthError as error:
            raise ContextLengthError(str(error), context_length=self._context_length) from None
        if not ids:
            raise RequestError("the prompt is empty; expected at least one token")
        if (highest := max(ids)) >= self._vocab_size:
            raise RequestError(
                f"the tokenizer makes {highest} of the prompt; expected ids from 0 to "
                f"{self._vocab_size - 1}, the model's: is it another model's tokenizer?"
            )
        return ids

    def _automaton(self, stop: tuple[str, ...], regexes: tuple[str, ...]) -> StopAutomaton:
        latest, automaton = self._latest  # one read: other threads make requests too
        if latest != (stop, regexes):
            automaton = StopAutomaton.from_strings(stop, regexes)
            self._latest = (stop, regexes), automaton
        return automaton

    def _prompt_ids(
        self, prompt: str | None, input_ids: Ids | None, *, emits_nothing: bool
    ) -> tuple[int, ...]:
        if (prompt is None) == (input_ids is None):
            raise RequestError("expected exactly one of prompt (text) and input_ids")
        if prompt is not None:
            if not isinstance(prompt, str):
                raise RequestError(f"prompt is {type(prompt).__name__}; expected text")
            return self.encode(prompt, emits_nothing=emits_nothing)
        assert input_ids is not None
        return self.check_ids("input_ids", input_ids)

    def check_ids(self, name: str, token_ids: Ids) -> tuple[int, ...]:
        """Return the ids as Python integers. Raises RequestError for the first invalid one."""
        found = listed(token_ids)
        if not isinstance(found, Sequence):
            raise RequestError(f"{name} is {shown_json(plain(found))}; expected a list of ids")
        if self._are_known(found):  # all at once, since prompts are long
            return tuple(found)
        ids = plain_items(found)
        for token_id in () if self._are_known(ids) else ids:
            is_id = isinstance(token_id, int) and not isinstance(token_id, bool)
            if not is_id or not 0 <= token_id < self._vocab_size:
                raise RequestError(
                    f"{name} holds {shown_json(token_id)}; expected ids from 0 to "
                    f"{self._vocab_size - 1}"
                )
        return ids

    def _are_known(self, ids: Sequence[Any]) -> bool:
        return len(ids) == 0 or (
            set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < self._vocab_size
        )

    def _seed(self, sampling: SamplingParams) -> int:
        arrival = next(self._arrivals)
        if sampling.sampling_seed is not None:
            return sampling.sampling_seed & MAX_SEED
        if self._random_seed is not None:
            return choice_seed(self._random_seed & MAX_SEED, arrival + 1)
        return int.from_bytes(os.urandom(8), "little") >> 64 - DRAWN_BITS


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) or is_array(value)


def _texts(prompt: str | Sequence[str] | None) -> tuple[list[str | None], bool]:
    if isinstance(prompt, str | bytes) or not isinstance(prompt, Sequence):
        return [prompt], False
    return list(prompt), True


@contextmanager
def in_list(index: int, total: int) -> Iterator[None]:
    """Add the prompt's index in a list to a RequestError."""
    try:
        yield
    except RequestError as error:
        if total == 1:
            raise
        raise type(error)(f"{error} (prompt {index} of {total}, counted from 0)") from None
