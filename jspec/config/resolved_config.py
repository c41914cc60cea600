"""The resolved configuration that an engine is built from."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from jspec.config.drafting import ALGORITHMS
from jspec.config.engine_args import EngineArgs
from jspec.config.expert_placement import LayerMap
from jspec.config.limits import Algorithm, SpeculativeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig(EngineArgs):
    """Engine arguments with all choices made, and the values that follow from them.

    No value is "auto". A remaining None is a value: the checkpoint's rope theta, no corpus, nothing
    simulated, no seed; max_total_tokens is None until the pool is made. compilation_cache_dir is ""
    if programs are not kept.
    """

    model_path: str
    tokenizer_path: str  # a directory even if no tokenizer is loaded
    context_length: int
    speculative_algorithm: str  # the flag's name
    speculative_num_steps: int
    speculative_eagle_topk: int
    speculative_num_draft_tokens: int
    page_size: int
    max_running_requests: int
    max_queued_requests: int
    chunked_prefill_size: int
    drafts_as: str  # algorithm in force, which may depend on the checkpoint
    prefill_budget_tokens: int
    kernels: str  # name in `pallas_kernels.bundles.OPS`
    column_major: bool  # weights are column-major where the kernels can read this
    decode_buckets: tuple[int, ...]  # B, ascending
    prefill_buckets: tuple[int, ...]  # T, ascending
    prefill_rows: int  # most rows of a prefill step
    other_shapes: tuple[SpeculativeConfig, ...] = ()  # of a decode step besides S/K/N
    expert_map: tuple[LayerMap, ...] = ()  # the logical expert of each physical one, by layer

    def __post_init__(self) -> None:
        """Skip EngineArgs' checks, which its source passed; without a drafter S/K/N is 0/1/1."""

    @property
    def logprobs(self) -> bool:
        return not self.disable_logprobs

    @property
    def algorithm(self) -> Algorithm:
        return ALGORITHMS[self.drafts_as]

    @property
    def speculative(self) -> SpeculativeConfig:
        return SpeculativeConfig(
            algorithm=self.algorithm,
            num_steps=self.speculative_num_steps,
            topk=self.speculative_eagle_topk,
            num_draft_tokens=self.speculative_num_draft_tokens,
            simulate_acceptance=self.simulate_acceptance,
            lookup=self.speculative_lookup is not None,
        )

    def values(self) -> dict[str, Any]:
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        del found["expert_map"]  # thousands of numbers
        return {**found, "other_shapes": tuple(map(str, self.other_shapes))}
