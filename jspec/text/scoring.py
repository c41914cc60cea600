"""Scoring: the probabilities of given tokens as the next one after a query and an item (SGLang)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jspec.errors import RequestError, shown_json
from jspec.messages.plain_values import is_array, listed, plain_items
from jspec.messages.request import MAX_LOGPROB_IDS, SamplingParams
from jspec.text.intake import Prompt

MAX_LABELS = 1024
# Characters or ids in all prompts of a call together; the query is repeated in each.
MAX_JOINED = 2**25
Text = str | Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreCall:
    """A checked call. A prompt with more than MAX_LOGPROB_IDS labels is sent several times."""

    prompts: tuple[str | tuple[int, ...], ...]  # one per item
    label_token_ids: tuple[int, ...]
    apply_softmax: bool

    @classmethod
    def of(
        cls,
        query: Any,
        items: Any,
        label_token_ids: Any,
        *,
        apply_softmax: bool = False,
        item_first: bool = False,
    ) -> ScoreCall:
        """Check a call. query, items: texts or token ids, to be joined. Raises RequestError."""
        is_text = isinstance(query, str)
        if is_text and isinstance(items, str):
            items = [items]
        head = query if is_text else _ids("query is", query)
        items = list(items) if is_array(items) else items
        if not isinstance(items, list | tuple) or not items:
            raise RequestError(
                f"items is {shown_json(items)}; expected texts, or lists of token ids, one at least"
            )
        tails = [_text(item) if is_text else _ids("items holds", item) for item in items]
        labels = _ids("label_token_ids is", label_token_ids)
        if not 1 <= len(labels) <= MAX_LABELS:
            raise RequestError(
                f"label_token_ids has {len(labels)} ids; expected from 1 to {MAX_LABELS}"
            )
        _check_length(head, tails)
        return cls(
            prompts=tuple(
                _joined(tail, head) if item_first else _joined(head, tail) for tail in tails
            ),
            label_token_ids=labels,
            apply_softmax=apply_softmax,
        )

    @property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        labels = self.label_token_ids
        steps = range(0, len(labels), MAX_LOGPROB_IDS)
        return tuple(labels[i : i + MAX_LOGPROB_IDS] for i in steps)

    def as_prompts(self) -> list[Prompt]:
        sampling = tuple(
            SamplingParams(
                max_new_tokens=1,
                temperature=0.0,
                ignore_eos=True,
                return_logprob=True,
                token_ids_logprob=part,
            )
            for part in self.parts
        )
        return [
            Prompt(text=prompt, sampling=each)
            if isinstance(prompt, str)
            else Prompt(input_ids=prompt, sampling=each)
            for prompt in self.prompts
            for each in sampling
        ]

    def scores(self, logprobs: Sequence[Sequence[float]]) -> list[list[float]]:
        """Return one list per prompt, one score per label. logprobs: one list per request."""
        count = len(self.parts)
        rows = (
            [x for part in logprobs[i : i + count] for x in part]
            for i in range(0, len(logprobs), count)
        )
        return [_softmax(row) if self.apply_softmax else list(map(math.exp, row)) for row in rows]


@contextmanager
def label_names() -> Iterator[None]:
    """Rename token_ids_logprob to the client's label_token_ids in a RequestError."""
    try:
        yield
    except RequestError as error:
        message = str(error).replace("token_ids_logprob", "label_token_ids")
        raise RequestError(message) from None


def watched_of(answer: Mapping[str, Any]) -> list[float]:
    (first,) = answer["meta_info"]["output_token_ids_logprobs"]
    return [entry[0] for entry in first]


def _check_length(head: Text, tails: Sequence[Text]) -> None:
    length = len(head) * len(tails) + sum(map(len, tails))
    if length > MAX_JOINED:
        unit = "characters" if isinstance(head, str) else "token ids"
        raise RequestError(
            f"query and {len(tails)} items make {length}; expected at most {MAX_JOINED} {unit} in "
            "all prompts together"
        )


def _joined(first: Any, second: Any) -> Any:
    return first + second


def _text(item: Any) -> str:
    if not isinstance(item, str):
        raise RequestError(f"items holds {shown_json(item)}; expected texts, as query is one")
    return item


def _ids(what: str, value: Any) -> tuple[int, ...]:
    name = what.split(" ", 1)[0]
    value = listed(value)
    if not isinstance(value, list | tuple):
        raise RequestError(
            f"{what} {shown_json(value)}; expected token ids"
            + ("" if name == "label_token_ids" else ", or query and items as texts")
        )
    ids = plain_items(value)
    for item in ids:
        if isinstance(item, bool) or not isinstance(item, int):
            raise RequestError(f"{name} holds {shown_json(item)}; expected token ids (integers)")
    return ids


def _softmax(logprobs: Sequence[float]) -> list[float]:
    top = max(logprobs)
    powers = [math.exp(x - top) for x in logprobs]
    total = sum(powers)
    return [power / total for power in powers]
