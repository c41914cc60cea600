"""Declaration of an argument as a dataclass field, which gives its check, flag, help and docs."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any, TypeVar

from jspec.config.peer_flags import advice
from jspec.errors import ConfigError

T = TypeVar("T")
_METADATA = "argument"
TEXTS = "tuple[str, ...]"  # a type: several words of a flag
_FLAG = re.compile(r"--([a-z-]+)")
_WORDS = re.compile("[-_]")
NEAR_NAME = 0.7  # minimum similarity of a suggested name: stop must not match tp
# Also gs:/b/c, to which pathlib changes gs://b/c.
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|(gs|s3|hf|file|https?):", re.IGNORECASE)

AT_START = (  # of compile_at_start
    "Programs compiled before serving. first: the minimum for all requests without "
    "grammars, draft trees or hidden states. common: all programs for such requests at "
    "the given S/K/N. all: also those for grammars, draft trees, hidden states and "
    "adaptive shapes; nothing is compiled later. With first and common the rest is "
    "compiled while serving, for grammars, draft trees and hidden states at the first "
    "request that needs them. auto: common if at most 11 programs, else first"
)
SGLANG_ATTENTION = (  # SGLang's names of kernels
    *("aiter", "ascend", "cutlass_mla", "dual_chunk_flash_attn", "fa3", "fa4", "flashinfer"),
    *("flashmla", "flex_attention", "intel_amx", "torch_native", "triton", "trtllm_mha"),
    *("trtllm_mla", "wave"),
)
SGLANG_GRAMMARS = dict.fromkeys(("xgrammar", "outlines"), "llguidance")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shorthand:
    flag: str
    value: bool | int | str
    text: str


RECORDS_EXPERTS = Shorthand(
    flag="--enable-expert-distribution-metrics",
    value="stat",
    text="Same as --expert-distribution-recorder-mode stat",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """Metadata of a field, in addition to its name, type and default."""

    text: str
    group: str
    aliases: tuple[str, ...] = ()  # other names of its flag
    choices: tuple[str, ...] = ()  # all its values
    translated: Mapping[str, str] = field(default_factory=dict)  # other servers' values to ours
    replaced: Mapping[str, str] = field(default_factory=dict)  # the same, with a warning
    low: float | None = None
    high: float | None = None
    above: float | None = None  # an excluded lower bound
    expected: str = ""  # for errors, if the bounds do not express it
    is_local: bool = False  # it names something on this machine
    is_model: bool = False  # a directory, which "" cannot be
    is_fetched: bool = False  # gs:// is fetched (engine/weights, engine/programs)
    shorthands: tuple[Shorthand, ...] = ()  # flags that set it without a value


def argument(default: Any, text: str, group: str, **more: Any) -> Any:
    return field(default=default, metadata={_METADATA: Argument(text=text, group=group, **more)})


def argument_of(declared: Field[Any]) -> Argument:
    found: Argument = declared.metadata[_METADATA]
    return found


def type_of(declared: Field[Any]) -> str:
    """Return the field's type without None: 'bool', 'int', 'float', 'str' or TEXTS."""
    return str(declared.type).removesuffix(" | None")


def check_arguments(given: Any) -> None:
    """Raise ConfigError for the first field with an invalid value; None is valid as the default.

    Paths in text fields become strings, and lists tuples, even in a frozen dataclass.
    """
    for declared in fields(given):
        value = getattr(given, declared.name)
        if isinstance(value, list) and type_of(declared) == TEXTS:
            value = tuple(value)
            object.__setattr__(given, declared.name, value)
        if isinstance(value, os.PathLike) and type_of(declared) == "str":
            value = os.fspath(value)
            object.__setattr__(given, declared.name, value)
        if value is not None or declared.default is not None:
            _check(declared.name, value, type_of(declared), argument_of(declared))


def _check(name: str, value: object, kind: str, argument: Argument) -> None:
    if argument.is_model and not (isinstance(value, str) and value.strip()):
        raise ConfigError(f"{name} is {value!r}; expected a directory, or leave it out")
    is_fetched = argument.is_fetched and str(value).startswith("gs://")
    if argument.is_local and not is_fetched and _SCHEME.match(str(value)):
        # Otherwise gs://b/c would be a directory called `gs:`.
        other = ", gs://bucket/path" * argument.is_fetched
        other += ", or org/name of Hugging Face's hub" * (argument.is_fetched and argument.is_model)
        raise ConfigError(
            f"{name} is {value!r}; expected a directory of this machine{other}: such remote paths "
            "are not read, so copy it here first, or mount it and name the mount"
        )
    if argument.choices and value not in argument.choices:
        raise ConfigError(f"{name} is {value!r}; expected one of {', '.join(argument.choices)}")
    if kind == "str" and not isinstance(value, str):
        raise ConfigError(f"{name} is {value!r}; expected text")
    if kind == TEXTS and not (isinstance(value, tuple) and all(map(_is_text, value))):
        raise ConfigError(f"{name} is {value!r}; expected a list of texts")
    if kind == "bool" and not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; expected true or false")
    if kind in ("int", "float") and not _is_within(value, kind, argument):
        raise ConfigError(
            f"{name} is {value!r}; expected {argument.expected or _bounds(kind, argument)}"
        )


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_within(value: object, kind: str, argument: Argument) -> bool:
    allowed = int if kind == "int" else int | float
    if isinstance(value, bool) or not isinstance(value, allowed) or not math.isfinite(value):
        return False
    return (
        (argument.low is None or value >= argument.low)
        and (argument.high is None or value <= argument.high)
        and (argument.above is None or value > argument.above)
    )


def _bounds(kind: str, argument: Argument) -> str:
    noun = "an integer" if kind == "int" else "a number"
    if argument.above is not None:
        if argument.high is not None:
            return f"{noun} in ({argument.above:g}, {argument.high:g}]"
        return f"{noun} above {argument.above:g}"
    if argument.low is None:
        return noun if kind == "int" else "a finite number"
    if argument.high is None:
        return f"{noun} of at least {argument.low}"
    return f"{noun} from {argument.low} to {argument.high}"


def of_names(declared: type[T], values: Mapping[str, Any]) -> T:
    """Build from a mapping. Raises ConfigError for an unknown name, with a suggestion."""
    known = {each.name for each in fields(declared)}  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise ConfigError(f"unknown engine argument {name!r}{meant_argument(name, declared)}")
    return declared(**values)


def meant_argument(name: str, *declared: type[Any]) -> str:
    """Return the suggestion that completes a message about an unknown name, or "".

        tensor_parallel_size → "; did you mean 'tp_size'?"
        gpu_memory_utilization → ": write mem_fraction_static"

    declared: dataclasses of arguments. Aliases of flags and vLLM's names are known too.
    """
    flag, known = f"--{name.replace('_', '-')}", [each for cls in declared for each in fields(cls)]
    for each in known:
        argument = argument_of(each)
        if flag in argument.aliases:
            return f"; did you mean {each.name!r}?"
        for short in argument.shorthands:
            if flag == short.flag:
                return f": write {each.name}={short.value!r}"
    if instead := advice(flag):
        return f": {_FLAG.sub(lambda found: found[1].replace('-', '_'), instead)}"
    near = near_name(name, [each.name for each in known])
    return f"; did you mean {near!r}?" if near else ""


def near_name(name: str, known: Sequence[str]) -> str:
    """Return the closest name in `known`, or else the only one that contains all of its words.

    pagesize → page_size, max_queued → max_queued_requests, num_steps → "" (two contain it)
    """
    near = difflib.get_close_matches(name, known, n=1, cutoff=NEAR_NAME)
    words = set(_WORDS.split(name))
    whole = {each for each in known if words <= set(_WORDS.split(each))}
    return near[0] if near else whole.pop() if len(whole) == 1 else ""


def unset_error(name: str, value: object, algorithm: str) -> ConfigError:
    return ConfigError(
        f"{name} is {value!r}, but speculative_algorithm is {algorithm}; expected it unset"
    )
