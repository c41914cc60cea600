"""What a client gets back, as SGLang's JSON: text, output_ids and meta_info.

All counters derive from committed chunks. Field names and formulas are SGLang's (0.5.10, 0.5.13
and 0.5.23 differ in names; all are emitted); `acceptance_length` is jspec's own definition.
"""

from __future__ import annotations

from typing import Any

from jspec.core.request import DEFAULT_VERSION, FinishReason, SpecCounters, StreamChunk


class Completion:
    """One sequence so far: all chunks up to now, folded. Adding one costs what the chunk holds."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.output_ids: list[int] = []
        self.finish: FinishReason | None = None
        self.prompt_tokens = 0
        self.num_retractions = 0
        self.cached_tokens = 0
        self.weight_version = DEFAULT_VERSION
        self.counters = SpecCounters()
        self.texts: list[str] = []

    def add(self, chunk: StreamChunk) -> None:
        self.texts.append(chunk.text)
        self.output_ids += chunk.new_ids
        self.finish = chunk.finish
        self.prompt_tokens = chunk.prompt_tokens
        self.num_retractions = chunk.num_retractions
        self.cached_tokens = chunk.cached_tokens
        self.weight_version = chunk.weight_version
        self.counters = chunk.counters

    @property
    def text(self) -> str:
        """All of it, joined where it is asked for."""
        if len(self.texts) != 1:
            self.texts[:] = ["".join(self.texts)]
        return self.texts[0]

    def to_json(self, *, e2e_latency: float | None = None) -> dict[str, Any]:
        """SGLang's response object; speculation fields only once finished and verified."""
        return {
            "text": self.text,
            "output_ids": list(self.output_ids),
            "meta_info": self.meta_info(e2e_latency=e2e_latency),
        }

    def meta_info(self, *, e2e_latency: float | None = None) -> dict[str, Any]:
        """What `to_json` says beside text and ids."""
        meta: dict[str, Any] = {
            "id": self.request_id,
            "finish_reason": None if self.finish is None else self.finish.to_json(),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": len(self.output_ids),
            "cached_tokens": self.cached_tokens,
            "weight_version": self.weight_version,
            "num_retractions": self.num_retractions,
        }
        if e2e_latency is not None:
            meta["e2e_latency"] = e2e_latency
        if self.finish is not None and self.counters.verify_ct > 0:
            meta |= spec_fields(self.counters, completion_tokens=len(self.output_ids))
        return meta


def spec_fields(counters: SpecCounters, *, completion_tokens: int) -> dict[str, Any]:
    """SGLang's speculation fields under all the names its clients read."""
    rate = counters.num_accepted / counters.num_proposed if counters.num_proposed else 0.0
    histogram = list(counters.accept_histogram)
    return {
        "spec_verify_ct": counters.verify_ct,
        "spec_accept_length": completion_tokens / counters.verify_ct,
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
