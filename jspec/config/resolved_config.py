"""What an engine is built from: its arguments with nothing left open, and what follows."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from jspec.config.engine_args import EngineArgs
from jspec.config.limits import Algorithm, SpeculativeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig(EngineArgs):
    """The arguments as they run, under their own names, and what follows from them.

    `engine.resolving.resolve` makes it, once, before a weight is read. The fields that are named
    again here were open, and no longer are; "auto" is the value of none. Where None is left it is
    a value: no rope theta beside the checkpoint's, no corpus, nothing simulated, no seed;
    and max_total_tokens is None until the pool is made, which takes what the weights leave.

    tokenizer_path is a directory also if no tokenizer is wanted. compilation_cache_dir is "" where
    nothing is kept, also because nothing could be.
    speculative_algorithm is the flag's name; drafts_as is the Algorithm in force, which may be the
    checkpoint's to say.
    kernels: the bundle's name in `pallas_kernels.choose.OPS`. by_columns: whether weights lie by
        columns where its kernels can read them so.
    decode_buckets, prefill_buckets: B and T of the programs, ascending. prefill_rows: most rows of
        a prefill step. other_shapes: what a decode step may be beside S/K/N.
    """

    model_path: str
    tokenizer_path: str
    context_length: int
    speculative_algorithm: str
    speculative_num_steps: int
    speculative_eagle_topk: int
    speculative_num_draft_tokens: int
    page_size: int
    max_running_requests: int
    max_queued_requests: int
    chunked_prefill_size: int
    drafts_as: str
    prefill_budget_tokens: int
    kernels: str
    by_columns: bool
    decode_buckets: tuple[int, ...]
    prefill_buckets: tuple[int, ...]
    prefill_rows: int
    other_shapes: tuple[SpeculativeConfig, ...] = ()

    def __post_init__(self) -> None:
        """What it is made from was checked as EngineArgs; S/K/N is 0/1/1 without a drafter."""

    @property
    def logprobs(self) -> bool:
        """Whether there are programs that say log-probabilities."""
        return not self.disable_logprobs

    @property
    def algorithm(self) -> Algorithm:
        """The one in force, whatever the flag calls it."""
        return Algorithm(self.drafts_as)

    @property
    def speculative(self) -> SpeculativeConfig:
        return SpeculativeConfig(
            algorithm=self.algorithm,
            num_steps=self.speculative_num_steps,
            topk=self.speculative_eagle_topk,
            num_draft_tokens=self.speculative_num_draft_tokens,
            simulate_acceptance=self.simulate_acceptance,
        )

    def values(self) -> dict[str, Any]:
        """Every field by its name, for /server_info and the log."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**found, "other_shapes": tuple(map(str, self.other_shapes))}
