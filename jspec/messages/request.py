"""What a user asks for and what comes back: frozen, picklable, and free of jax.

`SamplingParams` uses SGLang's field names. Validation happens here, once, where input enters.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jspec.config.peer_parameters import PEER_PARAMETERS, meant_parameter
from jspec.errors import RequestError, shown, unknown_field
from jspec.messages.features import Feature, StepFeatures
from jspec.messages.grammar import Grammar, GrammarSource, ReasoningMarks, check_grammar, grammar_of
from jspec.messages.sampling_fields import (
    Biases,
    Flag,
    Integer,
    Integers,
    Number,
    Row,
    SamplingTable,
    Source,
    Switch,
    Texts,
    features_of,
    sampled,
    table_of,
)
from jspec.messages.seeds import MAX_SEED
from jspec.messages.verified_tree import JudgedTree

DEFAULT_NEW_TOKENS = 128  # SGLang's
DEFAULT_VERSION = "default"  # of the weights, SGLang's name
MAX_MASKED_STOP_IDS = 16  # of a row, while fewer than min_new_tokens are out
# What one request may carry: matching costs nothing beyond, but building what matches does.
MAX_STOP_STRINGS = 256
MAX_STOP_CHARS = 8192  # of all stop strings together
MAX_STOP_IDS = 4096
MAX_STOP_REGEXES, MAX_STOP_REGEX_CHARS = 16, 1024  # each costs time for every character
GRAMMAR = Source(262144)
SCHEMA, TAG = replace(GRAMMAR, as_json=("object", "boolean")), replace(GRAMMAR, as_json=("object",))
MAX_CHOICES = 128  # n
MAX_BIASES = 300  # ids of logit_bias, OpenAI's limit; the device has room for this many a row
# What of log-probabilities a step's output has room for, for each token.
MAX_TOP_LOGPROBS = 20  # OpenAI's limit
MAX_LOGPROB_IDS = 32  # of token_ids_logprob


MAX_INT = 2**31 - 1  # token ids and lengths are i32 on the device


# How a parameter reaches the device where its value is not sent as it is: (request, V) -> value.


def _vocab_size(vocab_size: int) -> int:
    """The neutral top_k, and an id that no token has."""
    return vocab_size


def _kept_ids(request: Request, vocab_size: int) -> int:
    top_k = request.sampling.top_k
    return vocab_size if top_k < 0 else min(top_k, vocab_size)


def _seed_words(request: Request, _: int) -> tuple[int, int]:
    """High and low word of the final seed, not of the `sampling_seed` that was asked for."""
    return request.seed >> 32, request.seed & 0xFFFFFFFF


def _masked_ids(request: Request, _: int) -> tuple[int, ...]:
    """Nothing is masked without a minimum length, and then the host alone knows what ends a row."""
    return request.stop_ids if request.sampling.min_new_tokens else ()


def _biases(request: Request, _: int) -> np.ndarray:
    """i32[n, 2]: each id and the bits of its bias."""
    pairs = request.sampling.logit_bias
    ids = np.array([token_id for token_id, _ in pairs], np.int32)
    biases = np.array([bias for _, bias in pairs], np.float32)
    return np.stack([ids, biases.view(np.int32)], axis=1)


def _logprob_start(request: Request, _: int) -> int:
    """The first prompt token whose log-probability is asked for; beyond every prompt for none."""
    sampling = request.sampling
    return sampling.logprob_start_len if sampling.wants_prompt_logprobs else MAX_INT


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled and when it stops.

    Each field is a line of SAMPLING_FIELDS: its default, what it accepts, what the device gets.

    max_new_tokens: None is DEFAULT_NEW_TOKENS, or what the context leaves of them. 0 emits nothing:
        the prompt is run, for its log-probabilities or for the prefix cache.
    min_new_tokens: neither a stop token nor a stop string or regex counts among so many tokens.
    temperature: 0 means greedy; any other value divides the logits before filtering.
    top_k (-1 or 0 keeps all), top_p, min_p: applied jointly, to one and the same distribution.
    repetition_penalty: logits of tokens in prompt or output are divided by it, negative ones
        multiplied (Keskar et al., 2019); first.
    frequency_penalty, presence_penalty: subtracted from logits of tokens already in the output.
    logit_bias: (token id, number) pairs, added to the logits of those tokens; comes last.
    sampling_seed: 64 bits, a negative one by its two's complement; None draws one from the
        operating system when the request enters.
    stop: strings that end the text (trimmed from it), at most MAX_STOP_STRINGS of MAX_STOP_CHARS
        characters together; stop_token_ids: ids that end it, at most MAX_STOP_IDS.
    stop_regex: regular expressions (text/stop/stop_regex.py); the text ends with the first match.
    no_stop_trim: what ended the text stays in it, a stop token if it has text.
    skip_special_tokens: special tokens have no text; the one that ends the text never has any.
    return_logprob: log-probabilities of the output, of the raw logits (before penalties, bias,
        temperature, filters). The others of the name are of effect only with it.
    logprob_start_len: of the prompt's tokens from this one on, too; -1: of none.
    top_logprobs_num: of the so many likeliest tokens as well.
    token_ids_logprob: of these tokens as well.
    return_hidden_states: the target's last hidden states, after its final norm.
    return_draft_trees: what each verification drafted (slower: nothing overlaps).
    json_schema (a JSON object or its text), regex, ebnf (GBNF or Lark), structural_tag: one of them
        at most; the output is a text of that grammar, unless its length ends it.
    speculative: false accepts no draft: the same text, one token a step; for comparisons.
    """

    max_new_tokens: int | None = sampled(None, Integer(0, MAX_INT), openai="max_tokens")
    min_new_tokens: int = sampled(
        0, Integer(0), openai="min_tokens", needs=Feature.PENALTIES, row=Row(np.int32)
    )
    temperature: float = sampled(1.0, Number(0, 100), row=Row(np.float32))
    top_k: int = sampled(
        -1,
        Integer(-1, expected="-1 or 0 (keep all) or at least 1, an integer"),
        needs=Feature.FILTERS,
        row=Row(np.int32, neutral=_vocab_size, encode=_kept_ids),
    )
    top_p: float = sampled(
        1.0, Number(0, 1, with_low=False), needs=Feature.FILTERS, row=Row(np.float32, neutral=1)
    )
    min_p: float = sampled(0.0, Number(0, 1), needs=Feature.FILTERS, row=Row(np.float32))
    frequency_penalty: float = sampled(
        0.0, Number(-2, 2), needs=Feature.PENALTIES, row=Row(np.float32)
    )
    presence_penalty: float = sampled(
        0.0, Number(-2, 2), needs=Feature.PENALTIES, row=Row(np.float32)
    )
    repetition_penalty: float = sampled(
        1.0,
        Number(0, 2, with_low=False),
        needs=Feature.PENALTIES,
        row=Row(np.float32, neutral=1),
    )
    logit_bias: tuple[tuple[int, float], ...] = sampled(
        (),
        Biases(Integer(0, MAX_INT), Number(-100, 100), MAX_BIASES),
        needs=Feature.PENALTIES,
        row=Row(  # neutral: of no token
            np.int32, (MAX_BIASES, 2), neutral=_vocab_size, encode=_biases
        ),
    )
    sampling_seed: int | None = sampled(
        None,
        Integer(-(2**63), MAX_SEED),
        openai="seed",
        row=Row(np.uint32, (2,), encode=_seed_words, name="seed"),
    )
    ignore_eos: bool = sampled(False, Flag())
    stop: tuple[str, ...] = sampled((), Texts(MAX_STOP_STRINGS, MAX_STOP_CHARS))
    stop_regex: tuple[str, ...] = sampled((), Texts(MAX_STOP_REGEXES, MAX_STOP_REGEX_CHARS))
    stop_token_ids: tuple[int, ...] = sampled(
        (),
        Integers(Integer(0, MAX_INT), MAX_STOP_IDS),
        row=Row(
            np.int32,
            (MAX_MASKED_STOP_IDS,),
            neutral=_vocab_size,  # no token
            encode=_masked_ids,
            name="stop_ids",
        ),
    )
    no_stop_trim: bool = sampled(False, Flag())
    skip_special_tokens: bool = sampled(True, Flag())
    n: int = sampled(1, Integer(1, MAX_CHOICES))
    return_logprob: bool = sampled(False, Flag(), needs=Feature.LOGPROBS)
    logprob_start_len: int = sampled(
        -1,
        Integer(-1, MAX_INT),
        row=Row(np.int32, neutral=MAX_INT, encode=_logprob_start, name="logprob_start"),
    )
    top_logprobs_num: int = sampled(0, Integer(0, MAX_TOP_LOGPROBS))
    token_ids_logprob: tuple[int, ...] = sampled(
        (),
        Integers(Integer(0, MAX_INT), MAX_LOGPROB_IDS),
        row=Row(np.int32, (MAX_LOGPROB_IDS,), neutral=_vocab_size, name="logprob_ids"),
    )
    return_hidden_states: bool = sampled(False, Flag(), needs=Feature.HIDDEN)
    return_draft_trees: bool = sampled(False, Flag(), needs=Feature.GRAMMAR)
    json_schema: str | None = sampled(None, SCHEMA, needs=Feature.GRAMMAR)
    regex: str | None = sampled(None, GRAMMAR, needs=Feature.GRAMMAR)
    ebnf: str | None = sampled(None, GRAMMAR, needs=Feature.GRAMMAR)
    structural_tag: str | None = sampled(None, TAG, needs=Feature.GRAMMAR)
    speculative: bool = sampled(True, Switch(), row=Row(np.int32, neutral=1))
    # stop_token_ids again, to look an id up: made once for all n sequences.
    stop_id_set: frozenset[int] = field(init=False, repr=False, compare=False, default=frozenset())

    def __new__(cls, *_: Any, **named: Any) -> SamplingParams:
        """Raises TypeError for a name that it does not have, with what is meant: Python's own says
        nothing of that."""
        known = [parameter.name for parameter in table_of(cls)]
        for name in named:
            if name not in known:
                meant = meant_parameter(name, known)
                hint = f"; did you mean {meant}?" if meant else ""
                raise TypeError(f"{cls.__name__}() got an unexpected argument {name!r}{hint}")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for parameter in table_of(type(self)):
            given = getattr(self, parameter.name)
            if given is parameter.default:  # most are, and need no look
                continue
            value = parameter.read(given)  # one stop string, an object
            object.__setattr__(self, parameter.name, value)
            parameter.check(value)
        check_grammar(self, ignore_eos=self.ignore_eos)
        if self.min_new_tokens > self.wanted_tokens:
            raise RequestError(
                f"min_new_tokens is {self.min_new_tokens}; expected at most max_new_tokens, which "
                f"is {self.wanted_tokens}"
            )
        if self.top_k == 0:  # vLLM's word for it; equal settings need equal programs
            object.__setattr__(self, "top_k", -1)
        object.__setattr__(self, "stop_id_set", frozenset(self.stop_token_ids))

    @property
    def grammar(self) -> GrammarSource | None:
        """The grammar that the output follows."""
        return grammar_of(self)

    @classmethod
    def from_mapping(
        cls, values: Mapping[str, Any], *, defaults: Mapping[str, Any] | None = None
    ) -> SamplingParams:
        """Builds params from a JSON object. A field this version does not implement is an error.

        defaults: of fields that `values` does not have, or has as null. Raises RequestError naming
        the field and, for a near miss, the closest known name.
        """
        if not isinstance(values, Mapping):
            raise RequestError(
                f"sampling_params is {shown(values)}; expected fields and their values"
            )
        known = {parameter.name: parameter for parameter in table_of(cls)}
        for name in values:
            if name not in known:
                hint = PEER_PARAMETERS.get(name, "")
                raise RequestError(
                    unknown_field("sampling_params", str(name), set(known), hint=hint)
                )
        given = {name: value for name, value in values.items() if value is not None}
        whole = {**(defaults or {}), **given}
        return cls(**{name: known[name].read(value) for name, value in whole.items()})

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.return_logprob and self.logprob_start_len >= 0

    @property
    def wanted_tokens(self) -> int:
        """max_new_tokens, or its default."""
        return DEFAULT_NEW_TOKENS if self.max_new_tokens is None else self.max_new_tokens

    @property
    def features(self) -> StepFeatures:
        """What a step must have for this row; computed at each call."""
        return features_of(self, table_of(type(self)))


SAMPLING_FIELDS: SamplingTable = table_of(SamplingParams)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to generate, as the scheduler sees it: ids in, a seed fixed, nothing optional.

    `seed` is final: a request with n choices enters as n Requests whose seeds are
    hash(sampling_seed, i); one without a seed got its entropy before this object was built.
    stop_matching: what the text made of `sampling.stop`, one for all n; None: not made yet.
    extra_key: requests with different ones share no cached prefix.
    grammar: what was made of `sampling.grammar`, one for all n; None: not made yet.
    reasoning: what may stand in front of the grammar's text; None: nothing.
    shown_ids: special tokens that have text also where `skip_special_tokens` is set.
    priority: who goes first, where priorities are on (`ServeLimits.priority_order`).
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    eos_token_ids: tuple[int, ...] = ()
    stop_matching: Any = field(default=None, repr=False, compare=False)
    grammar: Grammar | None = field(default=None, repr=False, compare=False)
    reasoning: ReasoningMarks | None = None
    shown_ids: frozenset[int] = frozenset()
    extra_key: str | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.priority, int) or isinstance(self.priority, bool):
            raise RequestError(f"priority is {shown(self.priority)}; expected an integer")
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

    def ends_with(self, token_id: int) -> bool:
        """Whether this id is one of `stop_ids`; costs the same however many there are."""
        sampling = self.sampling
        is_eos = not sampling.ignore_eos and token_id in self.eos_token_ids
        return is_eos or token_id in sampling.stop_id_set

    def shows(self, token_id: int) -> bool:
        """Whether this id, which ends the request, has text: its own stop ids, if not trimmed."""
        return self.sampling.no_stop_trim and token_id not in self.eos_token_ids


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


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """What is known of one token: its log-probability, the likeliest tokens' and their ids, and
    those of the request's token_ids_logprob."""

    logprob: float
    top: tuple[tuple[float, int], ...] = ()
    watched: tuple[float, ...] = ()


# An id of a prompt, and what is known of it.
PromptToken = tuple[int, TokenLogprob | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamChunk:
    """What one round added to one request; the last chunk carries the finish reason.

    new_ids: ids that this round emitted, after the cut. num_accepted of them (from the front) were
    accepted drafts; the rest is the target's own. text: the new text, never half a character.
    cached_tokens: of the prompt, found in the prefix cache. weight_version: of the last fill's.
    logprobs: of new_ids, if asked for. prompt_logprobs: of the prompt's ids from logprob_start_len
    on, with the first chunk; None for the very first token, of which nothing is known.
    hidden_states: f32[E] of what chose each of new_ids, if asked for; in the place of the first
    token's f32[prompt, E], of the prompt. draft_tree: what was judged, if asked for.
    """

    request_id: str
    new_ids: tuple[int, ...]
    num_accepted: int
    text: str
    finish: FinishReason | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    num_retractions: int = 0
    cached_tokens: int = 0
    weight_version: str = DEFAULT_VERSION
    counters: SpecCounters = field(default_factory=SpecCounters)
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[PromptToken, ...] = ()
    hidden_states: tuple[np.ndarray, ...] = field(default=(), compare=False)
    draft_tree: JudgedTree | None = None
