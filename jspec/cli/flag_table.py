"""Table of all `jspec serve` flags: SGLang's names, and jspec's treatment of each: implemented (a
field of EngineArgs or ServerArgs), or declared here as without effect or refused with the
reason."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from jspec.config.arguments import TEXTS, argument_of, type_of
from jspec.config.engine_args import EngineArgs
from jspec.server.server_args import ServerArgs

FlagValue = bool | int | float | str | None


class FlagClass(enum.Enum):
    IMPLEMENTED = "implemented"
    ACCEPTED = "accepted"
    REFUSED = "refused"


class FlagKind(enum.Enum):
    """Type of the flag's value. A SWITCH has none, MANY takes any number of words."""

    SWITCH = "switch"
    INT = "int"
    FLOAT = "float"
    TEXT = "text"
    MANY = "many"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    names: tuple[str, ...]
    kind: FlagKind
    flag_class: FlagClass
    text: str
    argument: str = ""  # the argument that the flag sets; a SWITCH sets it to `const`
    const: FlagValue = True
    is_primary: bool = True  # describes the argument; others may set it too
    neutral: tuple[str, ...] = ()  # values with which a refused flag is allowed
    aliases: Mapping[str, str] = field(default_factory=dict)
    replaced: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.names[0]


def flags_of(declared: Field[Any]) -> Iterator[Flag]:
    """Yield the flag that sets an argument, and its shorthands."""
    argument, kind = argument_of(declared), FlagKind(_KINDS[type_of(declared)])
    name, text, default = declared.name, argument.text, declared.default
    if kind in (FlagKind.INT, FlagKind.FLOAT) and default is not None:
        text += f" ({default})" if kind is FlagKind.INT else f" ({default:g})"
    is_off_switch = default is True
    yield Flag(
        names=(
            f"--{'disable-' if is_off_switch else ''}{name.replace('_', '-')}",
            *argument.aliases,
        ),
        kind=kind,
        flag_class=FlagClass.IMPLEMENTED,
        text=text,
        argument=name,
        const=not is_off_switch,
        aliases=argument.translated,
        replaced=argument.replaced,
    )
    for short in argument.shorthands:
        yield Flag(
            names=(short.flag,),
            kind=FlagKind.SWITCH,
            flag_class=FlagClass.IMPLEMENTED,
            text=short.text,
            argument=name,
            const=short.value,
            is_primary=False,
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
_KINDS = {"bool": "switch", "int": "int", "float": "float", "str": "text", TEXTS: "many"}
_EXACT = (
    "a draft is accepted only if it equals the target's own token; a looser rule changes "
    "the distribution, and a p/q rule with shared noise would bias it"
)
_ONE_HOST = "jspec serves from one process on one host; use --tp-size for its devices"
_NGRAM_TREE = "the tree has the continuations of the K best matches (--speculative-eagle-topk)"
_NGRAM_LOOKUP = "each row is searched in full; there is no other index"
_ATTENTION = "jspec chooses its attention kernel by platform"

_OTHER_MODEL = (
    _warns("--trust-remote-code", _SWITCH, "jspec never runs code from a checkpoint"),
    _warns("--tokenizer-mode", _TEXT, "there is only the fast tokenizer"),
    _warns("--device", _TEXT, "JAX chooses the device; set JAX_PLATFORMS instead"),
    _refused("--revision", _TEXT, "write --model-path org/name@REVISION"),
    _refused("--is-embedding", _SWITCH, "only generation is served"),
    _warns("--lora-backend", _TEXT, "one dense product computes all adapters"),
    _warns("--max-loaded-loras", _INT, "as many are loaded as --max-loras-per-batch allows"),
    _warns("--lora-eviction-policy", _TEXT, "adapters stay until they are unloaded"),
)

_OTHER_SPECULATIVE = (
    _refused("--speculative-accept-threshold-single", _FLOAT, _EXACT, neutral=("1", "1.0")),
    _refused("--speculative-accept-threshold-acc", _FLOAT, _EXACT, neutral=("1", "1.0")),
    _refused("--speculative-use-rejection-sampling", _SWITCH, _EXACT),
    _refused("--speculative-use-block-verification", _SWITCH, _EXACT),
    _refused(
        "--speculative-draft-model-revision",
        _TEXT,
        "write --speculative-draft-model-path org/name@REVISION",
    ),
    _refused("--speculative-draft-window-size", _INT, "the draft attends to the whole context"),
    _refused("--speculative-draft-sink-size", _INT, "the draft attends to the whole context"),
    _warns("--speculative-ngram-min-bfs-breadth", _INT, _NGRAM_TREE),
    _warns("--speculative-ngram-max-bfs-breadth", _INT, _NGRAM_TREE),
    _refused(
        "--speculative-ngram-match-type",
        _TEXT,
        "matches are ranked by length, then recency; continuations are not counted",
        neutral=("bfs",),
    ),
    _warns("--speculative-ngram-max-trie-depth", _INT, _NGRAM_LOOKUP),
    _warns("--speculative-ngram-capacity", _INT, _NGRAM_LOOKUP),
    _warns("--speculative-ngram-external-sam-budget", _INT, _NGRAM_LOOKUP),
    _warns("--speculative-attention-mode", _TEXT, "one kernel serves prefill and verification"),
    _warns("--speculative-draft-attention-backend", _TEXT, _ATTENTION),
)

_OTHER_MEMORY = (
    _warns("--schedule-policy", _TEXT, "requests run in order of arrival"),
    _warns("--schedule-conservativeness", _FLOAT, "pages are reserved ahead; nothing is guessed"),
    _warns(
        "--max-prefill-tokens", _INT, "--prefill-budget-tokens limits prefill between decode steps"
    ),
    _warns(
        "--enable-mixed-chunk",
        _SWITCH,
        "--prefill-budget-tokens limits prefill between decode steps",
    ),
    _warns("--disable-cuda-graph", _SWITCH, "every step is one compiled program anyway"),
    _warns("--disable-cuda-graph-padding", _SWITCH, "batches are padded to compiled sizes"),
    _warns(
        "--cuda-graph-max-bs", _INT, "--max-running-requests determines the compiled batch sizes"
    ),
    _warns("--cuda-graph-bs", _MANY, "--max-running-requests determines the compiled batch sizes"),
    _warns("--enable-torch-compile", _SWITCH, "every step is compiled by XLA"),
    _warns("--torch-compile-max-bs", _INT, "every step is compiled by XLA"),
    _warns("--prefill-attention-backend", _TEXT, _ATTENTION),
    _warns("--decode-attention-backend", _TEXT, _ATTENTION),
    _warns("--sampling-backend", _TEXT, "there is one sampler, the same on every platform"),
    _refused(
        "--enable-deterministic-inference",
        _SWITCH,
        "a seed fixes the text only in float32; in bfloat16 rounding depends on the batch",
    ),
    _warns(
        "--watchdog-timeout", _FLOAT, "if the loop fails, its streams end with an error at once"
    ),
    _refused("--cpu-offload-gb", _FLOAT, "weights stay on the device", neutral=("0", "0.0")),
    _refused("--enable-hierarchical-cache", _SWITCH, "the prefix cache is on the device only"),
    _refused("--pp-size", _INT, _ONE_HOST, "--pipeline-parallel-size", neutral=("1",)),
    _refused(
        "--disaggregation-mode", _TEXT, "prefill and decode share a process", neutral=("null",)
    ),
)

_STAYS = "experts stay where --init-expert-location puts them; restart with another file"
_OTHER_EXPERTS = (
    _refused("--enable-eplb", _SWITCH, _STAYS),
    _warns("--moe-a2a-backend", _TEXT, "one all-reduce adds up the experts' outputs"),
    _warns("--moe-runner-backend", _TEXT, "jspec chooses the kernels of experts by platform"),
)

_OTHER_SERVER = (
    _warns("--enable-metrics", _SWITCH, "/metrics is always enabled"),
    _warns("--enable-metrics-for-all-schedulers", _SWITCH, "there is one scheduler"),
    _warns("--decode-log-interval", _INT, "jspec logs at fixed intervals; use --log-interval"),
    _warns("--log-level-http", _TEXT, "--log-level applies to both"),
    _warns("--log-requests-level", _INT, "log lines have route, status and seconds, never text"),
    _warns("--show-time-cost", _SWITCH, "start-up times are always shown"),
    _warns(
        "--skip-server-warmup", _SWITCH, "use --compile-at-start all, which compiles every program"
    ),
    _warns("--enable-cache-report", _SWITCH, "cached_tokens is always reported"),
    _warns("--tokenizer-worker-num", _INT, "one process tokenizes"),
    _refused("--admin-api-key", _TEXT, "there are no admin endpoints"),
    _refused("--root-path", _TEXT, "the server answers at /"),
    _refused("--enable-custom-logit-processor", _SWITCH, "requests cannot run code"),
    _warns(
        "--enable-return-hidden-states",
        _SWITCH,
        "every request may ask for them; --compile-at-start controls when their programs are "
        "compiled",
    ),
    _refused(
        "--verify-fraction",
        _FLOAT,
        "a server does not score its answers again; run jspec verify with the same flags",
        neutral=("0", "0.0"),
    ),
    _refused("--json-model-override-args", _TEXT, "edit config.json instead", neutral=("{}",)),
)

_OTHERS: Mapping[str, tuple[Flag, ...]] = {
    "Model": _OTHER_MODEL,
    "Speculation": _OTHER_SPECULATIVE,
    "Memory and scheduling": (*_OTHER_MEMORY, *_OTHER_EXPERTS),
    "Server": _OTHER_SERVER,
}
_ARGUMENTS = (*fields(EngineArgs), *fields(ServerArgs))
GROUPS: Mapping[str, tuple[Flag, ...]] = {
    title: (
        *(
            flag
            for declared in _ARGUMENTS
            if argument_of(declared).group == title
            for flag in flags_of(declared)
        ),
        *others,
    )
    for title, others in _OTHERS.items()
}
FLAGS: tuple[Flag, ...] = tuple(flag for group in GROUPS.values() for flag in group)
