"""Every flag of `jspec serve`, in one table: SGLang's names, and what jspec does with each.

A row is implemented, accepted (one warning: it changes nothing here), or refused with the reason,
unless it holds one of its neutral values. Parsing, TOML and the docs all read this table.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

FlagValue = bool | int | float | str | None


class FlagClass(enum.Enum):
    IMPLEMENTED = "implemented"
    ACCEPTED = "accepted"
    REFUSED = "refused"


class FlagKind(enum.Enum):
    """What follows the flag. SWITCH: nothing. MANY: any number of words."""

    SWITCH = "switch"
    INT = "int"
    FLOAT = "float"
    TEXT = "text"
    MANY = "many"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One row. names: the flag and its aliases. text: what it does, or why it does nothing.

    argument: the engine or server argument that an implemented flag sets; `const` is what a SWITCH
    sets it to. is_primary: the row that describes the argument (another may set it too).
    neutral: values with which a refused flag is allowed. aliases: values translated on the way in.
    """

    names: tuple[str, ...]
    kind: FlagKind
    flag_class: FlagClass
    text: str
    argument: str = ""
    const: FlagValue = True
    is_primary: bool = True
    neutral: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.names[0]


def _sets(name: str, kind: FlagKind, text: str, *aliases: str, argument: str = "") -> Flag:
    return Flag(
        names=(name, *aliases),
        kind=kind,
        flag_class=FlagClass.IMPLEMENTED,
        text=text,
        argument=argument or name.removeprefix("--").replace("-", "_"),
    )


def _warns(name: str, kind: FlagKind, text: str, *aliases: str) -> Flag:
    return Flag(names=(name, *aliases), kind=kind, flag_class=FlagClass.ACCEPTED, text=text)


def _refused(
    name: str, kind: FlagKind, text: str, *aliases: str, neutral: tuple[str, ...] = ()
) -> Flag:
    return Flag(
        names=(name, *aliases),
        kind=kind,
        flag_class=FlagClass.REFUSED,
        text=text,
        neutral=neutral,
    )


_SWITCH, _INT, _FLOAT, _TEXT, _MANY = FlagKind
_EXACT = (
    "a draft is accepted exactly when it equals the target's own token; anything looser changes "
    "the distribution, and sharing noise under a p/q rule would bias it"
)
_ONE_HOST = "one process on one host serves; use --tp-size for its devices"
_NO_ADAPTER = "LoRA is not implemented"
_SGLANG_ATTENTION = (
    *("aiter", "ascend", "cutlass_mla", "dual_chunk_flash_attn", "fa3", "fa4", "flashinfer"),
    *("flashmla", "flex_attention", "intel_amx", "torch_native", "triton", "trtllm_mha"),
    *("trtllm_mla", "wave"),
)
_NGRAM_TREE = "the tree is the continuations of the K best matches (--speculative-eagle-topk)"
_NGRAM_LOOKUP = "every row is searched whole, and nothing is kept beside it"
_ATTENTION = "jspec chooses its attention kernel by platform"

MODEL_FLAGS = (
    _sets("--model-path", _TEXT, "Directory of the target; unset: the bundled pair", "--model"),
    _sets("--tokenizer-path", _TEXT, "Directory of the tokenizer; unset: the target's"),
    Flag(
        names=("--dtype",),
        kind=_TEXT,
        flag_class=FlagClass.IMPLEMENTED,
        text="auto (float32 on a CPU, else bfloat16), float32, bfloat16, float16",
        argument="dtype",
        aliases={"half": "float16", "float": "float32"},
    ),
    _sets(
        "--context-length",
        _INT,
        "Most tokens of prompt and output, at most the model's; unset: the model's",
    ),
    Flag(
        names=("--load-format",),
        kind=_TEXT,
        flag_class=FlagClass.IMPLEMENTED,
        text="auto (safetensors), or dummy: random weights at the shapes of config.json",
        argument="load_format",
        aliases={"safetensors": "auto"},
    ),
    _sets("--skip-tokenizer-init", _SWITCH, "No tokenizer: token ids in, token ids out"),
    _sets("--tp-size", _INT, "Devices that share the model", "--tp", "--tensor-parallel-size"),
    _sets("--random-seed", _INT, "Makes requests without a seed reproducible in arrival order"),
    _sets("--compilation-cache-dir", _TEXT, 'Where compiled programs are kept; "" keeps none'),
    _warns("--trust-remote-code", _SWITCH, "jspec never runs code from a checkpoint"),
    _warns("--tokenizer-mode", _TEXT, "there is one tokenizer, the fast one"),
    _warns("--device", _TEXT, "JAX chooses; set JAX_PLATFORMS instead"),
    _refused("--quantization", _TEXT, "quantized weights are not implemented", neutral=("none",)),
    _refused("--kv-cache-dtype", _TEXT, "the KV cache has the model's dtype", neutral=("auto",)),
    _refused("--revision", _TEXT, "models are directories; nothing is downloaded"),
    _refused("--chat-template", _TEXT, "/v1/chat/completions is not served yet"),
    _refused("--is-embedding", _SWITCH, "only generation is served"),
    _refused("--lora-paths", _MANY, _NO_ADAPTER),
    _refused("--enable-lora", _SWITCH, _NO_ADAPTER),
    _refused("--grammar-backend", _TEXT, "grammars are not implemented", neutral=("none",)),
    _refused("--reasoning-parser", _TEXT, "/v1/chat/completions is not served yet"),
    _refused("--tool-call-parser", _TEXT, "/v1/chat/completions is not served yet"),
)

SPECULATIVE_FLAGS = (
    _sets(
        "--speculative-algorithm",
        _TEXT,
        "EAGLE3, NGRAM, STANDALONE or NONE; unset: EAGLE3 for the bundled pair",
    ),
    _sets(
        "--speculative-draft-model-path",
        _TEXT,
        "Directory of the EAGLE-3 head, or of the language model that drafts (STANDALONE)",
        "--speculative-draft-model",
    ),
    _sets("--speculative-num-steps", _INT, "S: draft levels (3)"),
    _sets("--speculative-eagle-topk", _INT, "K: branches a level (1)"),
    _sets("--speculative-num-draft-tokens", _INT, "N: tree nodes verified, root included (4)"),
    _sets("--speculative-draft-rope-theta", _FLOAT, "Overrides the head's rope theta"),
    Flag(
        names=("--disable-speculative-draft-noise",),
        kind=_SWITCH,
        flag_class=FlagClass.IMPLEMENTED,
        text="Drafts plain top-k: the same text, fewer accepted drafts; for measurements",
        argument="speculative_draft_noise",
        const=False,
    ),
    _sets(
        "--speculative-ngram-min-match-window-size",
        _INT,
        "Tokens at a row's end that must have occurred before, for NGRAM to propose what followed "
        "(1)",
    ),
    _sets(
        "--speculative-ngram-max-match-window-size", _INT, "Tokens that it looks for at most (12)"
    ),
    _sets(
        "--speculative-ngram-external-corpus-path",
        _TEXT,
        "Token ids (.npy, or text) that NGRAM looks up where the row itself has nothing",
    ),
    _sets("--speculative-ngram-external-corpus-max-tokens", _INT, "Ids read of it (10000000)"),
    _sets(
        "--simulate-acceptance",
        _FLOAT,
        "Every verification emits this many tokens on average, 1 to S + 1, whatever the target "
        "chose; to measure speed only, the text means nothing",
    ),
    _refused("--speculative-accept-threshold-single", _FLOAT, _EXACT, neutral=("1", "1.0")),
    _refused("--speculative-accept-threshold-acc", _FLOAT, _EXACT, neutral=("1", "1.0")),
    _refused("--speculative-use-rejection-sampling", _SWITCH, _EXACT),
    _refused("--speculative-use-block-verification", _SWITCH, _EXACT),
    _refused("--speculative-token-map", _TEXT, "an EAGLE-3 head brings its own vocabulary (d2t)"),
    _refused(
        "--speculative-draft-model-quantization",
        _TEXT,
        "quantized weights are not implemented",
        neutral=("none",),
    ),
    _refused("--speculative-draft-model-revision", _TEXT, "nothing is downloaded"),
    _refused("--speculative-draft-window-size", _INT, "the draft attends to the whole context"),
    _refused("--speculative-draft-sink-size", _INT, "the draft attends to the whole context"),
    _refused("--enable-multi-layer-eagle", _SWITCH, "multi-layer drafts are not implemented"),
    _refused("--speculative-adaptive", _SWITCH, "S/K/N are fixed at start"),
    _refused("--speculative-adaptive-config", _TEXT, "S/K/N are fixed at start"),
    _warns("--speculative-ngram-min-bfs-breadth", _INT, _NGRAM_TREE),
    _warns("--speculative-ngram-max-bfs-breadth", _INT, _NGRAM_TREE),
    _warns("--speculative-ngram-match-type", _TEXT, _NGRAM_TREE),
    _warns("--speculative-ngram-max-trie-depth", _INT, _NGRAM_LOOKUP),
    _warns("--speculative-ngram-capacity", _INT, _NGRAM_LOOKUP),
    _warns("--speculative-ngram-external-sam-budget", _INT, _NGRAM_LOOKUP),
    _warns("--speculative-attention-mode", _TEXT, "one kernel serves prefill and verification"),
    _warns("--speculative-draft-attention-backend", _TEXT, _ATTENTION),
)

MEMORY_FLAGS = (
    _sets("--mem-fraction-static", _FLOAT, "Share of a device's memory for weights and KV (0.85)"),
    _sets(
        "--max-total-tokens",
        _INT,
        "Tokens that the KV pool holds, drafts not counted; unset: what memory allows",
    ),
    _sets("--page-size", _INT, "Tokens a KV page (64 with a TPU's or Hopper's kernels, else 16)"),
    _sets("--max-running-requests", _INT, "Sequences decoded together (8 on a CPU, else 48)"),
    _sets(
        "--max-queued-requests",
        _INT,
        "Sequences that may wait; beyond: 503 (128, or as many as run)",
    ),
    _sets(
        "--chunked-prefill-size",
        _INT,
        "Most prompt tokens of a step (256 on a CPU, 8192 on an H200, else 2048)",
    ),
    _sets("--overlap-depth", _INT, "Steps dispatched before the one being read: 0, 1 or 2 (1)"),
    Flag(
        names=("--disable-overlap-schedule",),
        kind=_SWITCH,
        flag_class=FlagClass.IMPLEMENTED,
        text="The same as --overlap-depth 0",
        argument="overlap_depth",
        const=0,
        is_primary=False,
    ),
    _sets(
        "--num-continuous-decode-steps",
        _INT,
        "Verifications of one dispatched decode step, see below: the same text in lumps (1)",
    ),
    _sets(
        "--compile-at-start",
        _TEXT,
        "all, first (what serves everything; the rest while serving), or auto: all if few (auto)",
    ),
    _sets(
        "--disable-radix-cache",
        _SWITCH,
        "No prefix cache: pages are freed with their request, and every prompt is computed whole",
    ),
    _warns("--schedule-policy", _TEXT, "requests run in order of arrival"),
    _warns("--schedule-conservativeness", _FLOAT, "pages are reserved ahead; nothing is guessed"),
    _warns("--max-prefill-tokens", _INT, "--chunked-prefill-size bounds a step"),
    _warns("--enable-mixed-chunk", _SWITCH, "prefill chunks and decode steps alternate"),
    _warns("--disable-cuda-graph", _SWITCH, "every step is one compiled program anyway"),
    _warns("--disable-cuda-graph-padding", _SWITCH, "batches are padded to compiled sizes"),
    _warns("--cuda-graph-max-bs", _INT, "--max-running-requests decides what is compiled"),
    _warns("--cuda-graph-bs", _MANY, "--max-running-requests decides what is compiled"),
    _warns("--enable-torch-compile", _SWITCH, "every step is compiled by XLA"),
    _warns("--torch-compile-max-bs", _INT, "every step is compiled by XLA"),
    Flag(
        names=("--attention-backend",),
        kind=_TEXT,
        flag_class=FlagClass.IMPLEMENTED,
        text="auto, xla, or pallas (the platform's own kernels); SGLang's names mean auto",
        argument="attention_backend",
        aliases=dict.fromkeys(_SGLANG_ATTENTION, "auto"),
    ),
    _warns("--prefill-attention-backend", _TEXT, _ATTENTION),
    _warns("--decode-attention-backend", _TEXT, _ATTENTION),
    _warns("--sampling-backend", _TEXT, "there is one sampler, the same on every platform"),
    _refused(
        "--enable-deterministic-inference",
        _SWITCH,
        "a seed fixes the text in float32 alone: in bfloat16 rounding depends on the batch",
    ),
    _warns("--disable-custom-all-reduce", _SWITCH, "XLA chooses the collectives"),
    _warns("--watchdog-timeout", _FLOAT, "a dead loop ends its streams with an error at once"),
    _refused("--cpu-offload-gb", _FLOAT, "weights stay on the device", neutral=("0", "0.0")),
    _refused("--enable-hierarchical-cache", _SWITCH, "the prefix cache is on the device alone"),
    _refused("--dp-size", _INT, _ONE_HOST, "--data-parallel-size", neutral=("1",)),
    _refused("--pp-size", _INT, _ONE_HOST, "--pipeline-parallel-size", neutral=("1",)),
    _refused("--ep-size", _INT, _ONE_HOST, "--expert-parallel-size", neutral=("1",)),
    _refused("--nnodes", _INT, _ONE_HOST, neutral=("1",)),
    _refused("--node-rank", _INT, _ONE_HOST, neutral=("0",)),
    _refused("--dist-init-addr", _TEXT, _ONE_HOST),
    _refused("--enable-dp-attention", _SWITCH, _ONE_HOST),
    _refused(
        "--disaggregation-mode", _TEXT, "prefill and decode share a process", neutral=("null",)
    ),
)

SERVER_FLAGS = (
    _sets("--host", _TEXT, "Address to listen on (127.0.0.1)"),
    _sets("--port", _INT, "Port to listen on; 0 takes a free one (30000)"),
    _sets("--served-model-name", _TEXT, "The id in /v1/models; unset: the model path's last part"),
    _sets("--api-key", _TEXT, 'Asked for as "Authorization: Bearer KEY" or "X-API-Key: KEY"'),
    _sets("--log-level", _TEXT, "debug, info, warning, error or critical (info)"),
    _sets("--log-interval", _FLOAT, "Seconds between decode lines in the log; 0: none (5)"),
    Flag(
        names=("--incremental-streaming-output",),
        kind=_SWITCH,
        flag_class=FlagClass.IMPLEMENTED,
        text="/generate streams deltas instead of all text so far",
        argument="incremental_streaming_output",
    ),
    _sets("--stream-interval", _INT, "Tokens between two events of a stream, at least (1)"),
    _sets("--max-request-bytes", _INT, "Largest request body (33554432)"),
    _warns("--enable-metrics", _SWITCH, "/metrics is always there"),
    _warns("--enable-metrics-for-all-schedulers", _SWITCH, "there is one scheduler"),
    _warns("--decode-log-interval", _INT, "jspec logs by the clock: --log-interval"),
    _warns("--log-level-http", _TEXT, "--log-level serves both"),
    _warns("--log-requests", _SWITCH, "requests are not logged"),
    _warns("--log-requests-level", _INT, "requests are not logged"),
    _warns("--show-time-cost", _SWITCH, "start-up times are always shown"),
    _warns("--skip-server-warmup", _SWITCH, "nothing is compiled when a request comes"),
    _warns("--enable-cache-report", _SWITCH, "cached_tokens is always reported"),
    _warns("--tokenizer-worker-num", _INT, "one process tokenizes"),
    _refused("--admin-api-key", _TEXT, "there are no admin endpoints"),
    _refused("--root-path", _TEXT, "the server answers at /"),
    _refused("--ssl-keyfile", _TEXT, "put a proxy in front for TLS"),
    _refused("--ssl-certfile", _TEXT, "put a proxy in front for TLS"),
    _refused("--enable-custom-logit-processor", _SWITCH, "no code is run for a request"),
    _refused("--enable-return-hidden-states", _SWITCH, "hidden states stay on the device"),
    _refused("--json-model-override-args", _TEXT, "edit config.json instead", neutral=("{}",)),
)

GROUPS: Mapping[str, tuple[Flag, ...]] = {
    "Model": MODEL_FLAGS,
    "Speculation": SPECULATIVE_FLAGS,
    "Memory and scheduling": MEMORY_FLAGS,
    "Server": SERVER_FLAGS,
}
FLAGS: tuple[Flag, ...] = tuple(flag for group in GROUPS.values() for flag in group)
