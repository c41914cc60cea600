"""Engine arguments under SGLang's names, each declared once; `resolved_config` fills them in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from jspec.config.arguments import (
    AT_START,
    RECORDS_EXPERTS,
    SGLANG_ATTENTION,
    SGLANG_GRAMMARS,
    Shorthand,
    argument,
    check_arguments,
    of_names,
    unset_error,
)
from jspec.config.drafting import ALGORITHMS, ALIASES
from jspec.config.expert_placement import TRIVIAL
from jspec.config.hosts import check_hosts
from jspec.config.limits import Algorithm, PriorityOrder, SpeculativeConfig
from jspec.config.lora_paths import as_texts, check_loras, named_paths
from jspec.config.parallel import check_parallel
from jspec.errors import ConfigError
from jspec.spec.lora_spec import MAX_LORAS
from jspec.spec.weight_format import QUANTIZATIONS

_NGRAM = "speculative_ngram"
MAX_MATCH_WINDOW = 64  # comparisons of the whole context per step, unrolled
_MODEL, _SPECULATION, _MEMORY = "Model", "Speculation", "Memory and scheduling"
_FETCHED = {"is_local": True, "is_fetched": True}
_CHECKPOINT = {**_FETCHED, "is_model": True}
_QUANTIZATION = {
    "choices": (*QUANTIZATIONS, "none", "compressed-tensors", "fbgemm_fp8", "modelopt", "mxfp4"),
    "translated": {"w8a8_fp8": "fp8", "modelopt_fp8": "modelopt", "unquant": "none"},
}
_GRAMMARS = {"choices": ("llguidance", "none"), "replaced": SGLANG_GRAMMARS}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs:
    """Arguments of `jspec.Engine`; None lets jspec choose. Raises ConfigError if invalid."""

    model_path: str | None = argument(
        None,
        "Target model: a directory, gs://bucket/path, or org/name[@revision] of the Hugging "
        "Face Hub; unset: the bundled pair",
        _MODEL,
        aliases=("--model",),
        **_CHECKPOINT,
    )
    tokenizer_path: str | None = argument(
        None,
        "Tokenizer, in the same forms; unset: the target's",
        _MODEL,
        **_CHECKPOINT,
    )
    dtype: str = argument(
        "auto",
        "Data type of weights and activations: auto (float32 on a CPU, else bfloat16), float32, "
        "bfloat16, float16",
        _MODEL,
        choices=("auto", "float32", "bfloat16", "float16"),
        translated={"half": "float16", "float": "float32"},
    )
    kv_cache_dtype: str = argument(
        "auto",
        "Data type of the KV cache, of target and draft: fp8_e4m3 (half the bytes of bfloat16, "
        "with the checkpoint's k_scale and v_scale, else 1), bfloat16, or auto (fp8_e4m3 if "
        "config.json has an FP8 kv_cache_scheme, else --dtype)",
        _MODEL,
        choices=("auto", "fp8_e4m3", "bfloat16"),
        translated={"fp8": "fp8_e4m3", "bf16": "bfloat16"},
    )
    context_length: int | None = argument(
        None,
        "Maximum tokens of prompt and output together, at most the model's; unset: the model's",
        _MODEL,
        low=1,
    )
    load_format: str = argument(
        "auto",
        "auto (safetensors), or dummy (random weights in the shapes of config.json)",
        _MODEL,
        choices=("auto", "dummy"),
        translated={"safetensors": "auto"},
    )
    quantization: str | None = argument(
        None,
        "Weights: fp8 or w8a8_int8 (quantizes a checkpoint of 16 or 32 bits while loading), none "
        "(unpacks a quantized one), or the checkpoint's own method; unset: as the checkpoint has "
        "them",
        _MODEL,
        **_QUANTIZATION,
    )
    skip_tokenizer_init: bool = argument(
        False, "Run without a tokenizer: token ids in, token ids out", _MODEL
    )
    chat_template: str | None = argument(
        None,
        "Jinja file with the chat template; unset: the model's own",
        _MODEL,
        is_local=True,
        is_model=True,
    )
    sampling_defaults: str = argument(
        "model",
        "Source of sampling parameters that a request leaves unset: model "
        "(generation_config.json) or openai (temperature 1, no filters)",
        _MODEL,
        choices=("model", "openai"),
    )
    max_thinking_tokens: int | None = argument(
        None,
        "Most tokens of reasoning of requests that set no budget of their own; unset: no limit",
        _MODEL,
        low=0,
        expected="a number of tokens, 0 or more",
    )
    tp_size: int = argument(
        1,
        "Number of devices for tensor parallelism",
        _MODEL,
        aliases=("--tp", "--tensor-parallel-size"),
        low=1,
    )
    dp_size: int = argument(
        1,
        "Number of data ranks: each has slots, pages and a prefix cache of its own on --tp-size "
        "devices, and all run the same step at once. Weights are copied to each",
        _MODEL,
        aliases=("--data-parallel-size",),
        low=1,
    )
    enable_dp_attention: bool = argument(
        False,
        "Split the --tp-size devices into --dp-size data ranks, instead of multiplying both",
        _MODEL,
    )
    ep_size: int = argument(
        1,
        "Groups of the --tp-size devices, each with its own experts of an MoE; the devices of a "
        "group share each expert, and those of a data rank the rest of the model",
        _MODEL,
        aliases=("--ep", "--expert-parallel-size"),
        low=1,
    )
    ep_num_redundant_experts: int = argument(
        0,
        "Copies of experts in addition to the model's, in each layer, with --ep-size",
        _MODEL,
        low=0,
    )
    init_expert_location: str = argument(
        TRIVIAL,
        "Which devices have which experts: trivial (the model's order), or a JSON file with "
        "physical_to_logical_map, or with the logical_count that is to be balanced",
        _MODEL,
        is_local=True,
    )
    expert_distribution_recorder_mode: str | None = argument(
        None,
        "stat: count the tokens of each expert, for /metrics and "
        "/dump_expert_distribution_record; unset: nothing is counted",
        _MODEL,
        choices=("stat",),
        shorthands=(RECORDS_EXPERTS,),
    )
    nnodes: int | None = argument(
        None,
        "Number of hosts that run this engine together, one command each; unset: 1, or those of "
        "a TPU slice",
        _MODEL,
        low=1,
    )
    node_rank: int | None = argument(
        None,
        "This host, from 0 to --nnodes - 1; host 0 has HTTP, the others follow it; unset: 0",
        _MODEL,
        low=0,
    )
    dist_init_addr: str | None = argument(
        None,
        "HOST:PORT at which host 0 awaits the others; PORT + 1 is used too",
        _MODEL,
        aliases=("--nccl-init-addr",),
    )
    dist_timeout: float = argument(
        600.0,
        "Seconds that hosts wait for each other, at a start and after a failure",
        _MODEL,
        above=0,
        expected="seconds, more than 0",
    )
    disable_custom_all_reduce: bool = argument(
        False,
        "Add over the devices by collectives alone, not by GPU kernels that write peers' memory",
        _MODEL,
    )
    random_seed: int | None = argument(
        None,
        "Base seed that makes requests without a seed reproducible in arrival order",
        _MODEL,
        low=-(2**63),
        high=2**64 - 1,
    )
    compilation_cache_dir: str | None = argument(
        None,
        'Directory or gs://bucket/path for compiled programs; "" keeps none',
        _MODEL,
        **_FETCHED,
    )
    enable_lora: bool = argument(
        False, "Serve LoRA adapters of the target; follows from --lora-paths", _MODEL
    )
    lora_paths: tuple[str, ...] = argument(
        (),
        'LoRA adapters to load at the start: NAME=PATH, PATH, or {"lora_name": NAME, "lora_path": '
        "PATH}; a directory in peft's layout, or its other forms of --model-path",
        _MODEL,
    )
    max_loras_per_batch: int = argument(
        MAX_LORAS, "Maximum LoRA adapters that are loaded", _MODEL, low=1, high=MAX_LORAS
    )
    max_lora_rank: int | None = argument(
        None,
        "Largest rank of LoRA adapters; unset: the largest of --lora-paths",
        _MODEL,
        low=1,
        high=1024,
    )
    lora_target_modules: tuple[str, ...] = argument(
        (),
        "Modules that LoRA adapters may change (q_proj ...), or all; unset: those of --lora-paths, "
        "or all",
        _MODEL,
    )
    speculative_algorithm: str | None = argument(
        None,
        "Draft algorithm: EAGLE (EAGLE-1 and EAGLE-2), EAGLE3, NGRAM, STANDALONE, NEXTN (the "
        "target's own layers for multi-token prediction; also EAGLE with "
        "--enable-multi-layer-eagle), DFLASH or DSPARK (a block in one forward; the checkpoint "
        "decides which), FROZEN_KV_MTP (a Gemma 4 assistant) or NONE; unset: EAGLE3 for the "
        "bundled pair, else NONE",
        _SPECULATION,
    )
    enable_multi_layer_eagle: bool = argument(
        False, "Use a separate layer for each draft step (with EAGLE or NEXTN)", _SPECULATION
    )
    speculative_draft_model_path: str | None = argument(
        None,
        "Draft model: an EAGLE head, a block drafter, a language model (STANDALONE), or NEXTN "
        "layers that are not in the target's checkpoint; the bundled target has its own for "
        "EAGLE, EAGLE3, NEXTN and STANDALONE",
        _SPECULATION,
        aliases=("--speculative-draft-model",),
        **_CHECKPOINT,
    )
    speculative_draft_model_quantization: str | None = argument(
        None, "The same for the draft model's weights", _SPECULATION, **_QUANTIZATION
    )
    speculative_num_steps: int | None = argument(
        None, "S: draft levels (3; 7 for a block drafter)", _SPECULATION, low=1
    )
    speculative_eagle_topk: int | None = argument(
        None, "K: branches per level (1)", _SPECULATION, low=1
    )
    speculative_num_draft_tokens: int | None = argument(
        None, "N: tree nodes verified, root included (4)", _SPECULATION, low=1
    )
    speculative_adaptive: bool = argument(
        False,
        "Choose S/K/N of each step by measured acceptance and cost, up to the given S/K/N",
        _SPECULATION,
    )
    speculative_adaptive_config: str | None = argument(
        None,
        'It chooses from the levels in a JSON file: {"candidate_steps": [0, 1, 3]}',
        _SPECULATION,
        is_local=True,
    )
    speculative_draft_rope_theta: float | None = argument(
        None, "Override the draft head's RoPE theta", _SPECULATION, above=0
    )
    speculative_token_map: str | None = argument(
        None,
        "File with the token ids that a head which shares the target's lm_head may draft "
        "(FR-Spec): .json, .npy, .safetensors or .pt",
        _SPECULATION,
        is_local=True,
    )
    speculative_draft_noise: bool = argument(
        True,
        "Draft plain top-k without the target's noise: the same text, fewer accepted drafts; "
        "for measurements",
        _SPECULATION,
    )
    speculative_lookup: str | None = argument(
        None,
        "Also draft with a lookup in the request's own text, in the same tree as the draft model: "
        "ngram",
        _SPECULATION,
        choices=("ngram",),
    )
    speculative_ngram_min_match_window_size: int = argument(
        1,
        "Minimum number of trailing tokens that must occur earlier for NGRAM, or a lookup, to "
        "draft what followed them",
        _SPECULATION,
    )
    speculative_ngram_max_match_window_size: int = argument(
        12,
        "Maximum number of trailing tokens that NGRAM, or a lookup, matches",
        _SPECULATION,
        low=1,
        high=MAX_MATCH_WINDOW,
    )
    speculative_ngram_external_corpus_path: str | None = argument(
        None,
        "Corpus that NGRAM searches if the row itself has no match: a text file, a directory "
        'of them, .jsonl with a "text" field, or token ids (.npy, or a text file of integers)',
        _SPECULATION,
        is_local=True,
    )
    speculative_ngram_external_corpus_max_tokens: int = argument(
        10_000_000, "Maximum tokens read from that corpus", _SPECULATION, low=2, high=2**31 - 1
    )
    simulate_acceptance: float | None = argument(
        None,
        "Emit this many tokens per verification on average, 1 to S + 1, whatever the target "
        "chose; for speed measurements only, the text is meaningless",
        _SPECULATION,
        expected="a number from 1 to S + 1, tokens emitted a verification, bonus included",
    )
    engine_process: bool = argument(
        False, "Run the device loop in a separate process and restart it if it exits", _MEMORY
    )
    mem_fraction_static: float = argument(
        0.85,
        "Fraction of device memory for weights and KV cache if --max-total-tokens is unset",
        _MEMORY,
        above=0,
        high=1,
    )
    max_total_tokens: int | None = argument(
        None,
        "Size of the KV pool of a data rank in tokens, drafts not counted; unset: as memory allows",
        _MEMORY,
        low=1,
    )
    page_size: int | None = argument(
        None,
        "Tokens per KV page (64 with a TPU's or Hopper's kernels, 128 on a v7x, else 16)",
        _MEMORY,
        low=1,
    )
    max_running_requests: int | None = argument(
        None,
        "Maximum sequences decoded together, rounded up to equal parts for the data ranks (of each "
        "8 on a CPU, else 48)",
        _MEMORY,
        low=1,
    )
    max_queued_requests: int | None = argument(
        None,
        "Maximum sequences that wait, and that one call of generate() submits at once; "
        "beyond: 503 (1024, at least --max-running-requests)",
        _MEMORY,
        low=1,
    )
    chunked_prefill_size: int | None = argument(
        None,
        "Maximum prompt tokens per step (256 on a CPU, 8192 on an H200, else 2048)",
        _MEMORY,
        low=1,
    )
    enable_priority_scheduling: bool = argument(
        False, "Schedule requests with a higher `priority` first, with aging", _MEMORY
    )
    schedule_low_priority_values_first: bool = argument(
        False, "With --enable-priority-scheduling: schedule lower values first, as in vLLM", _MEMORY
    )
    queue_time_limit: float | None = argument(
        None,
        "Maximum seconds that a request waits before it first runs; beyond: 503; unset: no limit",
        _MEMORY,
        above=0,
        expected="seconds, more than 0",
    )
    prefill_budget_tokens: int | None = argument(
        None,
        "Prompt tokens computed between two decode steps, up to twelve times as many in a "
        "burst (a quarter of --chunked-prefill-size; all of it on a CPU)",
        _MEMORY,
        low=1,
    )
    prefill_budget_ms: float | None = argument(
        None,
        "Milliseconds of prefill between two decode steps, instead of tokens, estimated from "
        "the last prefills; also limits bursts",
        _MEMORY,
        above=0,
    )
    prefill_max_requests: int | None = argument(
        None, "Maximum prompts per prefill step (4 on a CPU, else 16)", _MEMORY, low=1
    )
    overlap_depth: int = argument(
        1,
        "Steps dispatched ahead of the one being read, 0 to 3; the tokens are the same",
        _MEMORY,
        low=0,
        high=3,
        shorthands=(
            Shorthand(flag="--disable-overlap-schedule", value=0, text="Same as --overlap-depth 0"),
        ),
    )
    disable_radix_cache: bool = argument(
        False,
        "Disable the prefix cache: pages are freed with their request and every prompt is "
        "computed in full",
        _MEMORY,
    )
    disable_cascade_attn: bool = argument(
        False, "Read shared prefixes separately for each row", _MEMORY
    )
    disable_logprobs: bool = argument(
        False,
        "Refuse requests for log-probabilities; compiles two programs fewer",
        _MEMORY,
    )
    # Rounds are unrolled: programs with more rounds compile for minutes and are not faster.
    num_continuous_decode_steps: int = argument(
        1,
        "Decode rounds per dispatch; output arrives in larger chunks",
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
        "xla, pallas (the platform's own kernels), or auto (pallas on a TPU, and on a Hopper "
        "GPU if it supports model and dtype); SGLang's names mean auto",
        _MEMORY,
        choices=("auto", "xla", "pallas"),
        replaced=dict.fromkeys(SGLANG_ATTENTION, "auto"),
    )
    grammar_backend: str = argument(
        "llguidance", "llguidance, or none: grammars are refused", _MODEL, **_GRAMMARS
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "lora_paths", as_texts(self.lora_paths))
        check_arguments(self)
        check_parallel(self)
        check_loras(self)
        if self.schedule_low_priority_values_first and not self.enable_priority_scheduling:
            raise ConfigError(
                "schedule_low_priority_values_first is True, but enable_priority_scheduling is "
                "False; expected both"
            )
        self._check_drafter()
        check_hosts(self)
        self.speculative  # noqa: B018  (an impossible S/K/N is refused here, not later)

    def _check_drafter(self) -> None:
        algorithm, path = self.algorithm, self.speculative_draft_model_path
        if algorithm.has_model and self.bundled_draft is None:
            in_target = algorithm.in_target and self.model_path is not None
            if path is None and not in_target:
                needed = "model_path" if algorithm.in_target else "draft_model_path"
                raise ConfigError(
                    f"speculative_algorithm is {self.speculative_algorithm}; expected "
                    f"{'speculative_' * (needed != 'model_path')}{needed} too"
                )
        elif path is not None:
            raise unset_error("speculative_draft_model_path", path, algorithm.name)
        of_draft = self.speculative_draft_model_quantization
        if of_draft is not None and not algorithm.has_model:
            raise unset_error("speculative_draft_model_quantization", of_draft, algorithm.name)
        token_map = self.speculative_token_map
        if token_map is not None and not (
            algorithm.has_model and algorithm != Algorithm.STANDALONE
        ):
            raise unset_error("speculative_token_map", token_map, algorithm.name)
        name = f"{_NGRAM}_min_match_window_size"
        shortest, longest = getattr(self, name), self.speculative_ngram_max_match_window_size
        if not 1 <= shortest <= longest:
            raise ConfigError(f"{name} is {shortest!r}; expected an integer from 1 to {longest}")
        if self.speculative_lookup is not None and not algorithm.has_model:
            raise unset_error("speculative_lookup", self.speculative_lookup, algorithm.name)
        corpus = self.speculative_ngram_external_corpus_path
        if corpus is not None and algorithm != Algorithm.NGRAM:
            raise unset_error(f"{_NGRAM}_external_corpus_path", corpus, algorithm.name)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> EngineArgs:
        return of_names(cls, values)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))

    @property
    def rank_size(self) -> int:
        """Devices of one data rank, over which it is tensor-parallel."""
        return self.tp_size // self.dp_size if self.enable_dp_attention else self.tp_size

    @property
    def expert_ranks(self) -> int:
        """Data ranks that share the experts of an MoE; 1: each has all of them."""
        return self.dp_size if self.enable_dp_attention and self.ep_size > 1 else 1

    @property
    def expert_spares(self) -> int | None:
        """Physical experts in addition to the model's; None: they are in the model's order."""
        spares = self.ep_num_redundant_experts
        return None if self.init_expert_location == TRIVIAL and not spares else spares

    @property
    def algorithm(self) -> Algorithm:
        """The requested algorithm. Raises ConfigError for an unknown name."""
        name = self.speculative_algorithm
        if name is None:
            return Algorithm.EAGLE3 if self.model_path is None else Algorithm.NONE
        known = dict(ALGORITHMS)
        multi_layer = known.pop(Algorithm.MULTI_LAYER_EAGLE.name)
        if self.enable_multi_layer_eagle:
            if name not in ("EAGLE", "NEXTN"):
                raise ConfigError(
                    f"enable_multi_layer_eagle is True, but speculative_algorithm is {name!r}; "
                    f"expected EAGLE or NEXTN with it"
                )
            return multi_layer
        name = ALIASES.get(name, name)
        if name not in known:
            raise ConfigError(
                f"speculative_algorithm is {name!r}; expected one of {', '.join(known)}"
            )
        return known[name]

    @property
    def has_loras(self) -> bool:
        return self.enable_lora or bool(self.lora_paths)

    @property
    def named_lora_paths(self) -> tuple[tuple[str, str], ...]:
        """The (name, path) of each of `lora_paths`. Raises ConfigError."""
        return named_paths(self.lora_paths)

    @property
    def priority_order(self) -> PriorityOrder:
        if not self.enable_priority_scheduling:
            return PriorityOrder.OFF
        is_low = self.schedule_low_priority_values_first
        return PriorityOrder.LOW_FIRST if is_low else PriorityOrder.HIGH_FIRST

    @property
    def bundled_draft(self) -> str | None:
        """Folder of the bundled target's draft, if it is used."""
        is_named = self.model_path is not None or self.speculative_draft_model_path is not None
        return None if is_named else self.algorithm.bundled_draft

    @property
    def speculative(self) -> SpeculativeConfig:
        """S/K/N in force. Raises ConfigError for invalid ones."""
        names = ("num_steps", "eagle_topk", "num_draft_tokens")
        given = {f"speculative_{name}": getattr(self, f"speculative_{name}") for name in names}
        if self.algorithm == Algorithm.NONE:
            for name, found in given.items():
                if found is not None:
                    raise ConfigError(
                        f"{name} is {found}, but speculative_algorithm is NONE; expected it unset"
                    )
            return SpeculativeConfig(simulate_acceptance=self.simulate_acceptance)
        has_lookup = self.speculative_lookup is not None
        steps, topk, nodes = self.algorithm.filled_in(*given.values(), lookup=has_lookup)
        return SpeculativeConfig(
            algorithm=self.algorithm,
            num_steps=steps,
            topk=topk,
            num_draft_tokens=nodes,
            simulate_acceptance=self.simulate_acceptance,
            lookup=has_lookup,
        )
