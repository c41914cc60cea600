"""What a user asks for and what comes back: frozen, picklable, and free of jax.

`SamplingParams` uses SGLang's field names. Validation happens here, once, where input enters.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from jspec.core.errors import RequestError

DEFAULT_NEW_TOKENS = 128  # SGLang's
MAX_SEED = 2**64 - 1
MAX_INT = 2**31 - 1  # token ids and lengths are i32 on the device
# The device masks stop tokens while fewer than min_new_tokens are out; one row holds this many.
MAX_MASKED_STOP_IDS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled and when it stops.

    max_new_tokens: None is DEFAULT_NEW_TOKENS, or what the context leaves of them.
    temperature: 0 means greedy; any other value divides the logits before filtering.
    top_k (-1 keeps all), top_p, min_p: applied jointly, to one and the same distribution.
    frequency_penalty, presence_penalty: subtracted from logits of tokens already in the output.
    sampling_seed: 64 bits; None draws one from the operating system when the request enters.
    stop: strings that end the text (trimmed from it); stop_token_ids: ids that end it.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    sampling_seed: int | None = None
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1

    def __post_init__(self) -> None:
        _check_int("max_new_tokens", self.wanted_tokens, low=1, high=MAX_INT)
        _check_int("min_new_tokens", self.min_new_tokens, low=0)
        if self.min_new_tokens > self.wanted_tokens:
            raise RequestError(
                f"min_new_tokens is {self.min_new_tokens}; expected at most max_new_tokens, which "
                f"is {self.wanted_tokens}"
            )
        _check_float("temperature", self.temperature, low=0.0, high=100.0)
        _check_int("top_k", self.top_k, low=-1)
        if self.top_k == 0:
            raise RequestError("top_k is 0; expected -1 (keep all) or at least 1")
        _check_float("top_p", self.top_p, low=0.0, high=1.0)
        if self.top_p == 0.0:
            raise RequestError("top_p is 0; expected a number in (0, 1]")
        _check_float("min_p", self.min_p, low=0.0, high=1.0)
        _check_float("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        _check_float("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        if self.sampling_seed is not None:
            _check_int("sampling_seed", self.sampling_seed, low=0, high=MAX_SEED)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos is {self.ignore_eos!r}; expected true or false")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop holds {text!r}; expected non-empty strings")
        for token_id in self.stop_token_ids:
            _check_int("stop_token_ids", token_id, low=0, high=MAX_INT)
        _check_int("n", self.n, low=1, high=128)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Builds params from a JSON object. A field this version does not implement is an error.

        Raises RequestError naming the field and, for a near miss, the closest known name.
        """
        if not isinstance(values, Mapping):
            raise RequestError(f"sampling_params is {values!r}; expected fields and their values")
        known = {f.name for f in fields(cls)}
        for name in values:
            if name not in known:
                raise RequestError(unknown_field("sampling_params", name, known))
        cleaned = {k: v for k, v in values.items() if v is not None}
        if isinstance(cleaned.get("stop"), str):
            cleaned["stop"] = (cleaned["stop"],)
        for name in ("stop", "stop_token_ids"):
            if name in cleaned:
                if not isinstance(cleaned[name], list | tuple):
                    raise RequestError(f"{name} is {cleaned[name]!r}; expected a list")
                cleaned[name] = tuple(cleaned[name])
        return cls(**cleaned)

    @property
    def wanted_tokens(self) -> int:
        """max_new_tokens, or its default."""
        return DEFAULT_NEW_TOKENS if self.max_new_tokens is None else self.max_new_tokens

    @property
    def needs_full_sampling(self) -> bool:
        """Whether the row needs filters, penalties or a minimum length (the `full` programs)."""
        return (
            self.top_k > 0
            or self.top_p < 1.0
            or self.min_p > 0.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
            or self.min_new_tokens > 0
        )


def unknown_field(where: str, name: str, known: set[str], *, hint: str = "") -> str:
    """The message for a field that is not in `known`.

    hint: what was meant, if that is known; else the nearest name is suggested.
    """
    import difflib

    if not hint:
        hint = "".join(repr(near) for near in difflib.get_close_matches(name, sorted(known), n=1))
    did_you_mean = f"did you mean {hint}? " if hint else ""
    return f"{where} has the unknown field {name!r}; {did_you_mean}expected one of {sorted(known)}"


def _check_int(name: str, value: object, *, low: int, high: int | None = None) -> None:
    expected = f"an integer of at least {low}" + ("" if high is None else f" and at most {high}")
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} is {value!r}; expected {expected}")
    if value < low or (high is not None and value > high):
        raise RequestError(f"{name} is {value}; expected {expected}")


def _check_float(name: str, value: object, *, low: float, high: float) -> None:
    expected = f"a number from {low:g} to {high:g}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} is {value!r}; expected {expected}")
    if not low <= value <= high:  # NaN is not
        raise RequestError(f"{name} is {value}; expected {expected}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to generate, as the scheduler sees it: ids in, a seed fixed, nothing optional.

    `seed` is final: a request with n choices enters as n Requests whose seeds are
    hash(sampling_seed, i); one without a seed got its entropy before this object was built.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.sampling.min_new_tokens and len(self.stop_ids) > MAX_MASKED_STOP_IDS:
            raise RequestError(
                f"min_new_tokens is {self.sampling.min_new_tokens} with {len(self.stop_ids)} stop "
                f"token ids (EOS included); expected at most {MAX_MASKED_STOP_IDS} of them"
            )

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end this request: its own and, unless ignored, the model's EOS."""
        eos = () if self.sampling.ignore_eos else self.eos_token_ids
        return tuple(dict.fromkeys((*eos, *self.sampling.stop_token_ids)))


def choice_seed(seed: int, choice: int) -> int:
    """hash(seed, i): the seed of choice i; choice 0 keeps the request's own seed.

    SplitMix64's finaliser (Steele, Lea and Flood, 2014) over seed + i * its increment.
    """
    if choice == 0:
        return seed
    mask = MAX_SEED
    x = (seed + choice * 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


class FinishKind(enum.Enum):
    """Why a sequence ended; the value is SGLang's finish_reason type."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishReason:
    """`matched` is the stop string or stop token id that ended a STOP; `message` says why ABORT."""

    kind: FinishKind
    matched: str | int | None = None
    message: str | None = None
    length: int | None = None

    def to_json(self) -> dict[str, Any]:
        """SGLang's `meta_info.finish_reason`."""
        out: dict[str, Any] = {"type": self.kind.value}
        for name in ("matched", "length", "message"):
            if getattr(self, name) is not None:
                out[name] = getattr(self, name)
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecCounters:
    """What speculation did for one sequence; derived from committed steps only.

    accept_histogram[i] counts verifications that accepted i drafts (length S + 1).
    `acceptance_length` excludes prefill's token and the last, truncated step.
    """

    verify_ct: int = 0
    num_accepted: int = 0
    num_proposed: int = 0
    accept_histogram: tuple[int, ...] = ()
    full_verify_ct: int = 0
    full_num_emitted: int = 0

    @property
    def acceptance_length(self) -> float:
        """Mean num_emitted per verification, bonus included, truncated last step excluded."""
        return self.full_num_emitted / self.full_verify_ct if self.full_verify_ct else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamChunk:
    """What one round added to one request; the last chunk carries the finish reason.

    new_ids: ids that this round emitted, after the cut. num_accepted of them (from the front) were
    accepted drafts; the rest is the target's own. text: the new text, never half a character.
    """

    request_id: str
    new_ids: tuple[int, ...]
    num_accepted: int
    text: str
    finish: FinishReason | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    num_retractions: int = 0
    counters: SpecCounters = field(default_factory=SpecCounters)
