"""Frozen configuration, by composition. Nothing here knows a file format or jax.

`config_io` reads these from TOML and from Hugging Face `config.json`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from jspec.core import shapes
from jspec.core.errors import ConfigError


class Algorithm(enum.Enum):
    """How drafts are made; the values are SGLang's `speculative_algorithm`."""

    NONE = "NONE"
    EAGLE3 = "EAGLE3"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """S/K/N: num_steps levels, topk branches a level, num_draft_tokens nodes, root included.

    Plain decoding is 0/1/1: a tree of one node. simulate_acceptance: for measurements of speed,
    every verification emits this many tokens on average, whatever the target chose; the text is
    then not the model's.
    """

    algorithm: Algorithm = Algorithm.NONE
    num_steps: int = 0
    topk: int = 1
    num_draft_tokens: int = 1
    simulate_acceptance: float | None = None

    def __post_init__(self) -> None:
        spec = f"S/K/N = {self.num_steps}/{self.topk}/{self.num_draft_tokens}"
        if self.algorithm is Algorithm.NONE:
            if (self.num_steps, self.topk, self.num_draft_tokens) != (0, 1, 1):
                raise ConfigError(f"{spec} without a draft model; expected 0/1/1")
            if self.simulate_acceptance is not None:
                raise ConfigError(
                    f"simulate_acceptance is {self.simulate_acceptance}, but "
                    f"speculative_algorithm is NONE; expected it unset"
                )
            return
        if self.num_steps < 1:
            raise ConfigError(f"speculative_num_steps is {self.num_steps}; expected at least 1")
        if self.topk < 1:
            raise ConfigError(f"speculative_eagle_topk is {self.topk}; expected at least 1")
        if self.topk == 1 and self.num_draft_tokens != self.num_steps + 1:
            raise ConfigError(
                f"{spec}: a chain (K = 1) verifies its S drafts and the root, so "
                f"speculative_num_draft_tokens must be {self.num_steps + 1}"
            )
        most = 1 + self.pool_size
        if not 2 <= self.num_draft_tokens <= most:
            raise ConfigError(
                f"{spec}: the tree has K + (S-1)*K*K = {self.pool_size} candidates, so "
                f"speculative_num_draft_tokens must be from 2 to {most}"
            )
        self._check_simulation()

    def _check_simulation(self) -> None:
        value, most = self.simulate_acceptance, self.max_emitted
        if value is None:
            return
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 1.0 <= value <= most:  # NaN is not
            raise ConfigError(
                f"simulate_acceptance is {value!r}; expected a number from 1 to S + 1 = {most}, "
                f"tokens emitted a verification, bonus included"
            )

    @classmethod
    def plain(cls) -> SpeculativeConfig:
        return cls()

    @property
    def pool_size(self) -> int:
        """Candidates of the draft tree: K at level 1 and K*K at each later level."""
        return self.topk + max(self.num_steps - 1, 0) * self.topk * self.topk

    @property
    def max_emitted(self) -> int:
        """M = S + 1."""
        return shapes.max_emitted(self.num_steps)

    @property
    def num_scratch_rows(self) -> int:
        return shapes.num_scratch_rows(self.num_steps, self.topk, self.num_draft_tokens)

    def reserved_tokens(self, committed: int, *, unread_rounds: int) -> int:
        """Positions that a row must own for its next round (see core.shapes)."""
        return shapes.reserved_tokens(
            committed,
            unread_rounds=unread_rounds,
            num_steps=self.num_steps,
            topk=self.topk,
            num_draft_tokens=self.num_draft_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeLimits:
    """Static sizes of one engine: what the host may plan and what the device has compiled.

    num_slots counts usable rows (the dummy slot 0 is extra); num_pages counts usable pages (the
    dummy page 0 is extra). decode_buckets and prefill_buckets ascend: B and T of the programs.
    num_rounds: verifications of one decode step, one behind the other without the host.
    """

    spec: SpeculativeConfig
    num_slots: int
    num_pages: int
    page_size: int
    context_length: int
    decode_buckets: tuple[int, ...]
    prefill_buckets: tuple[int, ...]
    prefill_rows: int
    overlap_depth: int = 1
    num_rounds: int = 1
    max_queued_requests: int = 128

    def __post_init__(self) -> None:
        if not 0 <= self.overlap_depth <= 2:
            raise ConfigError(f"overlap_depth is {self.overlap_depth}; expected 0, 1 or 2")
        if self.page_size < 1:
            raise ConfigError(f"page_size is {self.page_size}; expected at least 1")
        if isinstance(self.num_rounds, bool) or not isinstance(self.num_rounds, int):
            raise ConfigError(f"num_rounds is {self.num_rounds!r}; expected an integer")
        if self.num_rounds < 1:
            raise ConfigError(f"num_rounds is {self.num_rounds}; expected at least 1")
        reserved = self.spec.reserved_tokens(1, unread_rounds=self.overlap_depth)
        least = shapes.num_pages(reserved, self.page_size)
        if self.num_pages < least:
            raise ConfigError(
                f"max_total_tokens gives {self.num_pages} pages of {self.page_size} tokens; "
                f"one request needs at least {least} pages"
            )
        if self.decode_buckets[-1] != self.num_slots:
            raise ConfigError(
                f"decode buckets {self.decode_buckets} must end at max_running_requests "
                f"{self.num_slots}"
            )

    @property
    def chunk_size(self) -> int:
        """Most prefill tokens of one step (`chunked_prefill_size`)."""
        return self.prefill_buckets[-1]

    @property
    def pages_per_row(self) -> int:
        """P: width of the page table; holds the context and the scratch behind it, or the pool.

        And what the later rounds of a step may write behind a row's end: nothing is reserved for
        them (`budget.pages_for_decode`), so they are on page 0, but no index leaves the table.
        """
        widest = self.reserved_tokens_at_most(self.context_length)
        behind_end = (self.num_rounds - 1) * self.spec.max_emitted
        in_pool = self.num_pages + shapes.num_pages(behind_end, self.page_size)
        return min(shapes.num_pages(widest, self.page_size), in_pool)

    @property
    def grants_per_row(self) -> int:
        """Most page grants that one row can need in one decode step."""
        return shapes.num_pages(self.reserved_tokens_at_most(0), self.page_size) + 1

    def reserved_tokens_at_most(self, committed: int) -> int:
        """Positions behind which no round writes: the last one of a step, the others unread."""
        unread = (self.overlap_depth + 1) * self.num_rounds - 1
        return self.spec.reserved_tokens(committed, unread_rounds=unread)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding. `factor` > 1 selects llama3 scaling (Llama 3.1's `rope_scaling`)."""

    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerConfig:
    """Shape of a Llama-like decoder stack: E, H, G, D and the rest, in Hugging Face's terms."""

    vocab_size: int  # V
    hidden_size: int  # E
    intermediate_size: int
    num_layers: int
    num_heads: int  # H
    num_kv_heads: int  # G
    head_dim: int  # D
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    max_position: int = 2048
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads is {self.num_heads}; expected a multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}; expected an even number")


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config:
    """An EAGLE-3 head: one layer as wide as `layer`, fed by three of the target's layers.

    aux_layer_ids: the target's residual stream is captured at the INPUT of these layers; an id
    equal to the number of layers means the residual after the last one.
    draft_vocab_size: U. norm_before_residual: the residual is hidden_norm(h) instead of h.
    """

    layer: TransformerConfig  # vocab_size is the target's V, num_layers is 1
    draft_vocab_size: int
    target_hidden_size: int
    aux_layer_ids: tuple[int, ...]
    norm_before_residual: bool = False

    def __post_init__(self) -> None:
        if len(set(self.aux_layer_ids)) != len(self.aux_layer_ids) or list(
            self.aux_layer_ids
        ) != sorted(self.aux_layer_ids):
            raise ConfigError(f"aux layer ids are {self.aux_layer_ids}; expected them to ascend")

    @staticmethod
    def default_aux_layer_ids(num_layers: int) -> tuple[int, int, int]:
        """The captures before layers 2, L // 2 and L - 3 (SafeAILab/EAGLE).

        Raises ConfigError below 7 layers, where the three are not distinct and ordered.
        """
        ids = (2, num_layers // 2, num_layers - 3)
        if not ids[0] < ids[1] < ids[2]:
            raise ConfigError(
                f"a target of {num_layers} layers has no default EAGLE-3 layers (2, L//2, L-3 "
                f"gives {ids}); expected eagle_aux_hidden_state_layer_ids in the draft's config"
            )
        return ids
