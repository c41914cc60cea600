"""Responses in SGLang's JSON: text, output_ids and meta_info.

Field names and formulas are those of SGLang 0.5.10 to 0.5.23; where the versions differ, all names
are sent. `acceptance_length` is jspec's own definition.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jspec.messages.request import (
    DEFAULT_VERSION,
    FinishReason,
    PromptToken,
    Request,
    SamplingParams,
    SpecCounters,
    StreamChunk,
    TokenLogprob,
)

LOGPROB_LISTS = ("token_logprobs", "top_logprobs", "token_ids_logprobs")
TokenText = Callable[[int], str]
SpecTokens = Callable[[StreamChunk], list[dict[str, Any]]]
# Lists of meta_info that grow with every token.
GROWING = frozenset(
    {
        *(f"{of}_{which}" for of in ("output", "input") for which in LOGPROB_LISTS),
        "draft_trees",
    }
)


@dataclass(frozen=True, slots=True)
class Sent:
    ids: int = 0
    trees: int = 0
    prompt_ids: int = 0
    spec_tokens: int = 0


NOTHING_SENT = Sent()


class LogprobForm:
    """Writes log-probabilities in SGLang's form, [log-probability, id, text or null]."""

    def __init__(self, sampling: SamplingParams, *, token_text: TokenText | None = None) -> None:
        self._sampling = sampling
        self._token_text = token_text

    @classmethod
    def of(cls, sampling: SamplingParams, *, token_text: TokenText | None) -> LogprobForm | None:
        return cls(sampling, token_text=token_text) if sampling.return_logprob else None

    def fields(
        self,
        output_ids: Sequence[int],
        of_output: Sequence[TokenLogprob],
        of_prompt: Sequence[PromptToken],
    ) -> dict[str, Any]:
        sampling = self._sampling
        outputs = list(zip(output_ids, of_output, strict=False))
        found: dict[str, Any] = {"output_token_logprobs": self._chosen(outputs)}
        found["output_token_logprobs_length"] = len(outputs)
        if sampling.top_logprobs_num:
            found["output_top_logprobs"] = self._tops(outputs)
        if sampling.token_ids_logprob:
            found["output_token_ids_logprobs"] = self._watched(outputs)
        found["input_token_logprobs"] = self._chosen(of_prompt)
        if sampling.top_logprobs_num:
            found["input_top_logprobs"] = self._tops(of_prompt)
        if sampling.token_ids_logprob:
            found["input_token_ids_logprobs"] = self._watched(of_prompt)
        return found

    def _entry(self, logprob: float | None, token_id: int) -> list[Any]:
        text = None if self._token_text is None else self._token_text(token_id)
        return [logprob, token_id, text]

    def _chosen(self, tokens: Sequence[PromptToken]) -> list[Any]:
        return [
            self._entry(None if known is None else known.logprob, token_id)
            for token_id, known in tokens
        ]

    def _tops(self, tokens: Sequence[PromptToken]) -> list[Any]:
        return [
            None if known is None else [self._entry(*pair) for pair in known.top]
            for _, known in tokens
        ]

    def _watched(self, tokens: Sequence[PromptToken]) -> list[Any]:
        ids = self._sampling.token_ids_logprob
        return [
            None if known is None else list(map(self._entry, known.watched, ids))
            for _, known in tokens
        ]


class Completion:
    """The accumulated chunks of one sequence. `add` takes time linear in the chunk."""

    def __init__(
        self,
        request_id: str,
        *,
        logprobs: LogprobForm | None = None,
        seed: int | None = None,
        token_text: TokenText | None = None,  # of draft trees
        spec_tokens: SpecTokens | None = None,  # splits a chunk's text by origin
        started: float | None = None,  # start of latencies; None: now
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.request_id = request_id
        self.draft_trees: list[dict[str, Any]] = []
        self._token_text = token_text
        self.seed = seed
        self.logprob_form = logprobs
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[PromptToken] = []
        self.hidden_states: list[np.ndarray] = []
        self.output_ids: list[int] = []
        self.finish: FinishReason | None = None
        self.prompt_tokens = self.reasoning_tokens = 0  # an endpoint sets the latter
        self.num_retractions = 0
        self.cached_tokens = 0
        self.weight_version = DEFAULT_VERSION
        self.counters = SpecCounters()
        self.texts: list[str] = []
        self._new_texts: list[str] = []
        self._sent = NOTHING_SENT
        self._split_text = spec_tokens
        self._spec_tokens: list[dict[str, Any]] = []
        self._clock = clock
        self.started = clock() if started is None else started
        self.first_token = self.last_token = 0.0  # arrival times; 0 until then

    @classmethod
    def of(
        cls,
        request: Request,
        *,
        token_text: TokenText | None = None,
        node_text: TokenText | None = None,
        spec_tokens: SpecTokens | None = None,
        started: float | None = None,
    ) -> Completion:
        """Build an empty completion. node_text: the token_text of draft trees only."""
        return cls(
            request.request_id,
            logprobs=LogprobForm.of(request.sampling, token_text=token_text),
            seed=request.seed,
            token_text=node_text or token_text,
            spec_tokens=spec_tokens,
            started=started,
        )

    def add(self, chunk: StreamChunk) -> None:
        if chunk.new_ids:
            self.last_token = self._clock()
            self.first_token = self.first_token or self.last_token
        if self._split_text is not None:
            self._spec_tokens += self._split_text(chunk)
        self.texts.append(chunk.text)
        self._new_texts.append(chunk.text)
        if chunk.draft_tree is not None:
            self._add_tree(chunk)
        self.output_ids += chunk.new_ids
        self.finish = chunk.finish
        self.prompt_tokens = chunk.prompt_tokens
        self.num_retractions = chunk.num_retractions
        self.cached_tokens = chunk.cached_tokens
        self.weight_version = chunk.weight_version
        self.counters = chunk.counters
        self.logprobs += chunk.logprobs
        self.prompt_logprobs += chunk.prompt_logprobs
        self.hidden_states += chunk.hidden_states

    def _add_tree(self, chunk: StreamChunk) -> None:
        tree = chunk.draft_tree
        assert tree is not None
        record: dict[str, Any] = {"step": chunk.counters.verify_ct, "first": len(self.output_ids)}
        record |= {"ids": list(tree.ids), "parents": list(tree.parents)}
        record["accepted"] = list(tree.accepted)
        if self._token_text is not None:
            record["texts"] = list(map(self._token_text, tree.ids))
        self.draft_trees.append(record)

    @property
    def text(self) -> str:
        if len(self.texts) != 1:
            self.texts[:] = ["".join(self.texts)]
        return self.texts[0]

    @property
    def num_new_ids(self) -> int:
        return len(self.output_ids) - self._sent.ids

    def take(self) -> tuple[str, Sent]:
        """Return the text since the last call, and what had been sent before it."""
        text, sent = "".join(self._new_texts), self._sent
        self._new_texts.clear()
        self._sent = Sent(
            ids=len(self.output_ids),
            trees=len(self.draft_trees),
            prompt_ids=len(self.prompt_logprobs),
            spec_tokens=len(self._spec_tokens),
        )
        return text, sent

    def spec_tokens(self, *, sent: Sent = NOTHING_SENT) -> list[dict[str, Any]] | None:
        return None if self._split_text is None else self._spec_tokens[sent.spec_tokens :]

    def to_json(self) -> dict[str, Any]:
        body = {
            "text": self.text,
            "output_ids": list(self.output_ids),
            "meta_info": self.meta_info(),
        }
        pieces = self.spec_tokens()
        return body if pieces is None else {**body, "spec_tokens": pieces}

    def meta_info(self, *, sent: Sent = NOTHING_SENT) -> dict[str, Any]:
        """Return meta_info. The lists named in GROWING omit what was already sent (`sent`).

        Speculation fields are included once the sequence has finished, or with spec_tokens, if it
        has verifications.
        """
        meta: dict[str, Any] = {
            "id": self.request_id,
            "finish_reason": None if self.finish is None else self.finish.to_json(),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": len(self.output_ids),
            "cached_tokens": self.cached_tokens,
            "reasoning_tokens": self.reasoning_tokens,
            "weight_version": self.weight_version,
            "num_retractions": self.num_retractions,
        }
        if self.seed is not None:
            meta["sampling_seed"] = self.seed
        meta["e2e_latency"] = self._clock() - self.started
        if self.logprob_form is not None:
            ids, known = self.output_ids[sent.ids :], self.logprobs[sent.ids :]
            of_prompt = self.prompt_logprobs[sent.prompt_ids :]
            meta |= self.logprob_form.fields(ids, known, of_prompt)
        if self.finish is not None and self.hidden_states:  # a stream has them in its last event
            meta["hidden_states"] = [rows.tolist() for rows in self.hidden_states]
        if self.draft_trees:
            meta["draft_trees"] = self.draft_trees[sent.trees :]
        is_told = self.finish is not None or self._split_text is not None
        if is_told and self.counters.verify_ct > 0:
            meta |= spec_fields(self.counters, completion_tokens=len(self.output_ids))
        return meta


def spec_fields(counters: SpecCounters, *, completion_tokens: int) -> dict[str, Any]:
    """Return SGLang's speculation fields under all names that its clients read.

    spec_accept_length is completion tokens per verification, without the tokens of plain steps. A
    verification that was not truncated emitted its accepted drafts and one more token.
    """
    of_verifications = min(completion_tokens, 1 + counters.num_accepted + counters.full_verify_ct)
    rate = counters.num_accepted / counters.num_proposed if counters.num_proposed else 0.0
    histogram = list(counters.accept_histogram)
    return {
        "spec_verify_ct": counters.verify_ct,
        "spec_accept_length": of_verifications / counters.verify_ct,
        "spec_accept_rate": rate,
        "spec_num_correct_drafts": counters.num_accepted,
        "spec_num_proposed_drafts": counters.num_proposed,
        "spec_correct_drafts_histogram": histogram,
        "spec_accepted_drafts": counters.num_accepted,
        "spec_proposed_drafts": counters.num_proposed,
        "spec_accept_histogram": histogram,
        "spec_accept_token_num": counters.num_accepted,
        "spec_draft_token_num": counters.num_proposed,
        "acceptance_length": counters.acceptance_length,
    }
