"""What a user may set on an engine, under SGLang's names; None where jspec shall choose.

Host only, and from the arguments alone. A field is declared once: its check, its flag and its row
in docs/flags.md come from it. What follows from checkpoint and devices: `config.resolved_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from jspec.config.arguments import (
    AT_START,
    SGLANG_ATTENTION,
    SGLANG_GRAMMARS,
    Shorthand,
    argument,
    check_arguments,
    of_names,
    unset_error,
)
from jspec.config.limits import Algorithm, PriorityOrder, SpeculativeConfig
from jspec.errors import ConfigError

_NGRAM = "speculative_ngram"
MAX_MATCH_WINDOW = 64  # compares of the whole context a step, unrolled
_MODEL, _SPECULATION, _MEMORY = "Model", "Speculation", "Memory and scheduling"
_FETCHED = {"is_local": True, "is_fetched": True}
_CHECKPOINT = {**_FETCHED, "is_model": True}
_GRAMMARS = {"choices": ("llguidance", "none"), "replaced": SGLANG_GRAMMARS}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs:
    """Arguments of `jspec.Engine`; None means "let jspec choose". Each says what it does.

    Raises ConfigError for a value that its field refuses, or that contradicts another.
    """

    model_path: str | None = argument(
        None,
        "Directory of the target, gs://bucket/path, or org/name[@revision] of Hugging Face's hub; "
        "unset: the bundled pair",
        _MODEL,
        aliases=("--model",),
        **_CHECKPOINT,
    )
    tokenizer_path: str | None = argument(
        None,
        "Where the tokenizer is, likewise; unset: the target's",
        _MODEL,
        **_CHECKPOINT,
    )
    dtype: str = argument(
        "auto",
        "Of weights, activations and KV: auto (float32 on a CPU, else bfloat16), float32, "
        "bfloat16, float16",
        _MODEL,
        choices=("auto", "float32", "bfloat16", "float16"),
        translated={"half": "float16", "float": "float32"},
    )
    context_length: int | None = argument(
        None,
        "Most tokens of prompt and output, at most the model's; unset: the model's",
        _MODEL,
        low=1,
    )
    load_format: str = argument(
        "auto",
        "auto (safetensors), or dummy: random weights at the shapes of config.json",
        _MODEL,
        choices=("auto", "dummy"),
        translated={"safetensors": "auto"},
    )
    skip_tokenizer_init: bool = argument(False, "No tokenizer: token ids in, token ids out", _MODEL)
    chat_template: str | None = argument(
        None,
        "File with the chats' Jinja template; unset: the model's own",
        _MODEL,
        is_local=True,
        is_model=True,
    )
    sampling_defaults: str = argument(
        "model",
        "model: as generation_config.json says where a request names nothing; openai: temperature "
        "1, no filters",
        _MODEL,
        choices=("model", "openai"),
    )
    tp_size: int = argument(
        1,
        "Devices that share the model",
        _MODEL,
        aliases=("--tp", "--tensor-parallel-size"),
        low=1,
    )
    random_seed: int | None = argument(
        None,
        "Makes requests without a seed reproducible in arrival order",
        _MODEL,
        low=-(2**63),
        high=2**64 - 1,
    )
    compilation_cache_dir: str | None = argument(
        None, 'Directory or gs://b/path of compiled programs; "" keeps none', _MODEL, **_FETCHED
    )
    speculative_algorithm: str | None = argument(
        None,
        "EAGLE (EAGLE-1 and EAGLE-2), EAGLE3, NGRAM, STANDALONE, NEXTN (the target's own layers "
        "for multi-token prediction; also EAGLE with --enable-multi-layer-eagle) or NONE; unset: "
        "EAGLE3 for the bundled pair, else NONE",
        _SPECULATION,
    )
    enable_multi_layer_eagle: bool = argument(
        False, "With EAGLE or NEXTN: a layer of its own a step", _SPECULATION
    )
    speculative_draft_model_path: str | None = argument(
        None,
        "Directory of the EAGLE head, of the language model that drafts (STANDALONE), or of the "
        "layers that are not in the target's (NEXTN); the bundled target has some of its own for "
        "EAGLE, EAGLE3 and NEXTN",
        _SPECULATION,
        aliases=("--speculative-draft-model",),
        **_CHECKPOINT,
    )
    speculative_num_steps: int | None = argument(None, "S: draft levels (3)", _SPECULATION, low=1)
    speculative_eagle_topk: int | None = argument(
        None, "K: branches a level (1)", _SPECULATION, low=1
    )
    speculative_num_draft_tokens: int | None = argument(
        None, "N: tree nodes verified, root included (4)", _SPECULATION, low=1
    )
    speculative_adaptive: bool = argument(
        False, "Chooses each step's shape by what it accepts and costs, S/K/N at most", _SPECULATION
    )
    speculative_adaptive_config: str | None = argument(
        None,
        'It chooses from the levels in a JSON file: {"candidate_steps": [0, 1, 3]}',
        _SPECULATION,
        is_local=True,
    )
    speculative_draft_rope_theta: float | None = argument(
        None, "Overrides the head's rope theta", _SPECULATION, above=0
    )
    speculative_token_map: str | None = argument(
        None,
        "File of the ids that an EAGLE head may draft: .json, .npy, .safetensors or .pt (FR-Spec)",
        _SPECULATION,
        is_local=True,
    )
    speculative_draft_noise: bool = argument(
        True,
        "Drafts plain top-k: the same text, fewer accepted drafts; for measurements",
        _SPECULATION,
    )
    speculative_ngram_min_match_window_size: int = argument(
        1,
        "Tokens at a row's end that must have occurred before, for NGRAM to propose what followed",
        _SPECULATION,
    )
    speculative_ngram_max_match_window_size: int = argument(
        12, "Tokens that it looks for at most", _SPECULATION, low=1, high=MAX_MATCH_WINDOW
    )
    speculative_ngram_external_corpus_path: str | None = argument(
        None,
        "What NGRAM looks up where the row itself has nothing: a text, a directory of texts, "
        '.jsonl with a "text" field, or token ids (.npy, or a text of integers)',
        _SPECULATION,
        is_local=True,
    )
    speculative_ngram_external_corpus_max_tokens: int = argument(
        10_000_000, "Tokens read of it", _SPECULATION, low=2, high=2**31 - 1
    )
    simulate_acceptance: float | None = argument(
        None,
        "Every verification emits this many tokens on average, 1 to S + 1, whatever the target "
        "chose; to measure speed only, the text means nothing",
        _SPECULATION,
        expected="a number from 1 to S + 1, tokens emitted a verification, bonus included",
    )
    engine_process: bool = argument(
        False, "Devices and steps in a process of their own, begun anew if it ends", _MEMORY
    )
    mem_fraction_static: float = argument(
        0.85,
        "Share of a device's memory for weights and KV, if --max-total-tokens is unset",
        _MEMORY,
        above=0,
        high=1,
    )
    max_total_tokens: int | None = argument(
        None,
        "Tokens that the KV pool holds, drafts not counted; unset: what memory allows",
        _MEMORY,
        low=1,
    )
    page_size: int | None = argument(
        None, "Tokens a KV page (64 with a TPU's or Hopper's kernels, else 16)", _MEMORY, low=1
    )
    max_running_requests: int | None = argument(
        None, "Sequences decoded together (8 on a CPU, else 48)", _MEMORY, low=1
    )
    max_queued_requests: int | None = argument(
        None,
        "Sequences that may wait, and that a call of generate() feeds at once; beyond: 503 "
        "(1024, or as many as run)",
        _MEMORY,
        low=1,
    )
    chunked_prefill_size: int | None = argument(
        None,
        "Most prompt tokens of a step (256 on a CPU, 8192 on an H200, else 2048)",
        _MEMORY,
        low=1,
    )
    enable_priority_scheduling: bool = argument(
        False, "Requests with a higher `priority` go first; nobody waits for ever", _MEMORY
    )
    schedule_low_priority_values_first: bool = argument(
        False, "With it: those with a lower one do, as in vLLM", _MEMORY
    )
    queue_time_limit: float | None = argument(
        None,
        "Seconds that a request may wait before it first runs; beyond: 503. Unset: any number",
        _MEMORY,
        above=0,
        expected="seconds, more than 0",
    )
    prefill_budget_tokens: int | None = argument(
        None,
        "Prompt tokens computed between two decode steps while rows decode, up to twelve times as "
        "many in a burst (a quarter of --chunked-prefill-size; all of it on a CPU)",
        _MEMORY,
        low=1,
    )
    prefill_budget_ms: float | None = argument(
        None,
        "Milliseconds instead of tokens: that prompts take between two decode steps, in bursts "
        "too, by what the last ones took",
        _MEMORY,
        above=0,
    )
    prefill_max_requests: int | None = argument(
        None, "Most prompts of a prefill step (4 on a CPU, else 16)", _MEMORY, low=1
    )
    overlap_depth: int = argument(
        1,
        "Steps dispatched before the one being read, 0 to 3: the same tokens",
        _MEMORY,
        low=0,
        high=3,
        shorthands=(
            Shorthand(
                flag="--disable-overlap-schedule", value=0, text="The same as --overlap-depth 0"
            ),
        ),
    )
    disable_radix_cache: bool = argument(
        False,
        "No prefix cache: pages are freed with their request, and every prompt is computed whole",
        _MEMORY,
    )
    disable_cascade_attn: bool = argument(False, "Shared prefixes are read row by row", _MEMORY)
    disable_logprobs: bool = argument(
        False,
        "No log-probabilities: requests for them are refused, and two programs fewer are compiled",
        _MEMORY,
    )
    # Rounds are unrolled: a program of more would compile for minutes and gain nothing.
    num_continuous_decode_steps: int = argument(
        1,
        "Verifications of one dispatched decode step, see below: the same text in lumps",
        _MEMORY,
        low=1,
        high=16,
    )
    compile_at_start: str = argument(
        "auto",
        AT_START,
        _MEMORY,
        choices=("auto", "first", "common", "all"),
    )
    attention_backend: str = argument(
        "auto",
        "xla, pallas (the platform's own kernels), or auto: those on a TPU, and on a Hopper GPU "
        "where they serve model and dtype; SGLang's names mean auto",
        _MEMORY,
        choices=("auto", "xla", "pallas"),
        replaced=dict.fromkeys(SGLANG_ATTENTION, "auto"),
    )
    grammar_backend: str = argument(
        "llguidance", "llguidance, or none: grammars are refused", _MODEL, **_GRAMMARS
    )

    def __post_init__(self) -> None:
        check_arguments(self)
        if self.schedule_low_priority_values_first and not self.enable_priority_scheduling:
            raise ConfigError(
                "schedule_low_priority_values_first is True, but enable_priority_scheduling is "
                "False; expected both"
            )
        self._check_drafter()
        self.speculative  # noqa: B018  (an impossible S/K/N is refused here, not later)

    def _check_drafter(self) -> None:
        """What the algorithm needs to be given, and what it must not be."""
        algorithm, path = self.algorithm, self.speculative_draft_model_path
        if algorithm.drafting.has_model and self.bundled_draft is None:
            in_target = algorithm.drafting.in_target and self.model_path is not None
            if path is None and not in_target:
                needed = "model_path" if algorithm.drafting.in_target else "draft_model_path"
                raise ConfigError(
                    f"speculative_algorithm is {self.speculative_algorithm}; expected "
                    f"{'speculative_' * (needed != 'model_path')}{needed} too"
                )
        elif path is not None:
            raise unset_error("speculative_draft_model_path", path, algorithm.value)
        token_map = self.speculative_token_map
        if token_map is not None and algorithm is not Algorithm.EAGLE:
            hint = " (an EAGLE-3 head has a map of its own)" * (algorithm is Algorithm.EAGLE3)
            raise unset_error("speculative_token_map", token_map, algorithm.value, hint=hint)
        name = f"{_NGRAM}_min_match_window_size"
        shortest, longest = getattr(self, name), self.speculative_ngram_max_match_window_size
        if not 1 <= shortest <= longest:
            raise ConfigError(f"{name} is {shortest!r}; expected an integer from 1 to {longest}")
        corpus = self.speculative_ngram_external_corpus_path
        if corpus is not None and algorithm is not Algorithm.NGRAM:
            raise unset_error(f"{_NGRAM}_external_corpus_path", corpus, algorithm.value)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> EngineArgs:
        """Raises ConfigError for a name that is not an argument, suggesting the nearest one."""
        return of_names(cls, values)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm asked for; a checkpoint's own layers decide between NEXTN and
        MULTI_LAYER_EAGLE (`ResolvedConfig.algorithm`).

        Raises ConfigError for a name that is not implemented.
        """
        name = self.speculative_algorithm
        if name is None:
            return Algorithm.EAGLE3 if self.model_path is None else Algorithm.NONE
        known = {algorithm.value: algorithm for algorithm in Algorithm}
        multi_layer = known.pop(Algorithm.MULTI_LAYER_EAGLE.value)
        if self.enable_multi_layer_eagle:
            if name not in ("EAGLE", "NEXTN"):
                raise ConfigError(
                    f"enable_multi_layer_eagle is True, but speculative_algorithm is {name!r}; "
                    f"expected EAGLE or NEXTN with it"
                )
            return multi_layer
        if name not in known:
            raise ConfigError(
                f"speculative_algorithm is {name!r}; expected one of {', '.join(known)}"
            )
        return known[name]

    @property
    def priority_order(self) -> PriorityOrder:
        """Whose request goes first."""
        if not self.enable_priority_scheduling:
            return PriorityOrder.OFF
        is_low = self.schedule_low_priority_values_first
        return PriorityOrder.LOW_FIRST if is_low else PriorityOrder.HIGH_FIRST

    @property
    def bundled_draft(self) -> str | None:
        """The folder of the bundled target's own draft, where that is the one; see Algorithm."""
        is_named = self.model_path is not None or self.speculative_draft_model_path is not None
        return None if is_named else self.algorithm.bundled_draft

    @property
    def speculative(self) -> SpeculativeConfig:
        """S/K/N in force. Raises ConfigError for an impossible one."""
        names = ("num_steps", "eagle_topk", "num_draft_tokens")
        given = {f"speculative_{name}": getattr(self, f"speculative_{name}") for name in names}
        if self.algorithm is Algorithm.NONE:
            for name, found in given.items():
                if found is not None:
                    raise ConfigError(
                        f"{name} is {found}, but speculative_algorithm is NONE; expected it unset"
                    )
            return SpeculativeConfig(simulate_acceptance=self.simulate_acceptance)
        steps, topk, nodes = self.algorithm.filled_in(*given.values())
        return SpeculativeConfig(
            algorithm=self.algorithm,
            num_steps=steps,
            topk=topk,
            num_draft_tokens=nodes,
            simulate_acceptance=self.simulate_acceptance,
        )
