"""Requests and their results: frozen, picklable, without jax. `text.intake` checks what depends on
the model, `scheduler.pages.budget` what depends on the engine's limits."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jspec.config.peer_parameters import PEER_PARAMETERS, meant_parameter
from jspec.errors import RequestError, shown_json, unknown_field
from jspec.messages.adapter import Adapter
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
    sampled,
    table_of,
)
from jspec.messages.seeds import MAX_SEED
from jspec.messages.step_options import StepOption, StepOptions
from jspec.messages.verified_tree import VerifiedTree

DEFAULT_NEW_TOKENS = 128  # SGLang's
DEFAULT_VERSION = "default"  # SGLang's name of the initial weights
MAX_MASKED_STOP_IDS = 16  # stop ids masked in a row until it has min_new_tokens
# Limits of one request. Matching stays cheap beyond them, but building the automaton does not.
MAX_STOP_STRINGS = 256
MAX_STOP_CHARS = 8192  # of all stop strings together
MAX_STOP_IDS = 4096
MAX_STOP_REGEXES, MAX_STOP_REGEX_CHARS = 16, 1024  # each is run on every character
GRAMMAR = Source(262144)
SCHEMA, TAG = replace(GRAMMAR, as_json=("object", "boolean")), replace(GRAMMAR, as_json=("object",))
MAX_CHOICES = 128  # n
MAX_BIASES = 300  # of logit_bias: OpenAI's limit, and the device's size of a row
# Log-probabilities per token in a step's output.
MAX_TOP_LOGPROBS = 20  # OpenAI's limit
MAX_LOGPROB_IDS = 32  # of token_ids_logprob


MAX_INT = 2**31 - 1  # token ids and lengths are i32 on the device


# Encoders of parameters whose value is not sent as is: (request, V) -> value.


def _vocab_size(vocab_size: int) -> int:
    return vocab_size


def _kept_ids(request: Request, vocab_size: int) -> int:
    top_k = request.sampling.top_k
    return vocab_size if top_k < 0 else min(top_k, vocab_size)


def _seed_words(request: Request, _: int) -> tuple[int, int]:
    """Return the high and low word of the request's final seed (not `sampling_seed`)."""
    return request.seed >> 32, request.seed & 0xFFFFFFFF


def _masked_ids(request: Request, _: int) -> tuple[int, ...]:
    """Return the stop ids to mask. Only a minimum length masks them; the host ends rows."""
    return request.stop_ids if request.sampling.min_new_tokens else ()


def _biases(request: Request, _: int) -> np.ndarray:
    pairs = request.sampling.logit_bias
    ids = np.array([token_id for token_id, _ in pairs], np.int32)
    biases = np.array([bias for _, bias in pairs], np.float32)
    return np.stack([ids, biases.view(np.int32)], axis=1)


def _logprob_start(request: Request, _: int) -> int:
    """Return the first prompt token with a log-probability, or MAX_INT."""
    sampling = request.sampling
    return sampling.logprob_start_len if sampling.wants_prompt_logprobs else MAX_INT


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping of one request; the fields have SGLang's names.

    SAMPLING_FIELDS has each field's default, accepted values and device encoding.

        max_new_tokens: None is DEFAULT_NEW_TOKENS, or less if the context is full. 0 runs only the
            prompt, for its log-probabilities or for the prefix cache
        min_new_tokens: minimum output length; stop tokens, strings and regexes are ignored before
        temperature: 0 is greedy; other values divide the logits before filtering
        top_k, top_p, min_p: applied jointly to the same distribution; top_k -1 or 0 keeps all
        repetition_penalty: divides the logits of tokens in prompt or output, or multiplies
            negative ones (Keskar et al., 2019); applied first
        frequency_penalty, presence_penalty: subtracted from the logits of tokens in the output
        logit_bias: (token id, bias) pairs, added to the logits last
        sampling_seed: 64 bits, negative values in two's complement; None: a random seed
        stop: strings that end the text and are trimmed from it
        stop_regex: regular expressions (text/stop/stop_regex.py); the first match ends the text
        no_stop_trim: keep the stop string, or the text of the stop token
        skip_special_tokens: omit special tokens from the text; the final one is always omitted
        return_logprob: return log-probabilities of the output, from the logits before penalties,
            bias, temperature and filters. The other logprob fields need it
        logprob_start_len: include the prompt from this token on; -1: no prompt tokens
        top_logprobs_num: include this many of the most likely tokens
        token_ids_logprob: include these tokens
        return_hidden_states: return the target's last hidden states, after its final norm
        return_draft_trees: return the tree of each verification (slower: steps do not overlap)
        max_thinking_tokens: maximum tokens between <think> and </think>, after which only the end
            mark is allowed; None: no limit
        json_schema (a JSON object or its text), regex, ebnf (GBNF or Lark), structural_tag: the
            output follows this grammar unless its length ends it; at most one of them
        speculative: false accepts no drafts, for comparisons: the same text, one token per step
    """

    max_new_tokens: int | None = sampled(None, Integer(0, MAX_INT), openai="max_tokens")
    min_new_tokens: int = sampled(
        0, Integer(0), openai="min_tokens", needs=StepOption.PENALTIES, row=Row(np.int32)
    )
    temperature: float = sampled(1.0, Number(0, 100), row=Row(np.float32))
    top_k: int = sampled(
        -1,
        Integer(-1, expected="-1 or 0 (keep all) or at least 1, an integer"),
        needs=StepOption.FILTERS,
        row=Row(np.int32, neutral=_vocab_size, encode=_kept_ids),
    )
    top_p: float = sampled(
        1.0, Number(0, 1, with_low=False), needs=StepOption.FILTERS, row=Row(np.float32, neutral=1)
    )
    min_p: float = sampled(0.0, Number(0, 1), needs=StepOption.FILTERS, row=Row(np.float32))
    frequency_penalty: float = sampled(
        0.0, Number(-2, 2), needs=StepOption.PENALTIES, row=Row(np.float32)
    )
    presence_penalty: float = sampled(
        0.0, Number(-2, 2), needs=StepOption.PENALTIES, row=Row(np.float32)
    )
    repetition_penalty: float = sampled(
        1.0,
        Number(0, 2, with_low=False),
        needs=StepOption.PENALTIES,
        row=Row(np.float32, neutral=1),
    )
    logit_bias: tuple[tuple[int, float], ...] = sampled(
        (),
        Biases(Integer(0, MAX_INT), Number(-100, 100), MAX_BIASES),
        needs=StepOption.PENALTIES,
        row=Row(  # neutral: no token
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
    return_logprob: bool = sampled(False, Flag(), needs=StepOption.LOGPROBS)
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
    return_hidden_states: bool = sampled(False, Flag(), needs=StepOption.HIDDEN)
    return_draft_trees: bool = sampled(False, Flag(), needs=StepOption.GRAMMAR)
    max_thinking_tokens: int | None = sampled(
        None, Integer(0, MAX_INT), openai="thinking_token_budget", needs=StepOption.GRAMMAR
    )
    json_schema: str | None = sampled(None, SCHEMA, needs=StepOption.GRAMMAR)
    regex: str | None = sampled(None, GRAMMAR, needs=StepOption.GRAMMAR)
    ebnf: str | None = sampled(None, GRAMMAR, needs=StepOption.GRAMMAR)
    structural_tag: str | None = sampled(None, TAG, needs=StepOption.GRAMMAR)
    speculative: bool = sampled(True, Switch(), row=Row(np.int32, neutral=1))
    # stop_token_ids as a set, built once for all n sequences.
    stop_id_set: frozenset[int] = field(init=False, repr=False, compare=False, default=frozenset())

    def __new__(cls, *_: Any, **named: Any) -> SamplingParams:
        """Raise TypeError for an unknown argument, and suggest the intended one."""
        known = [parameter.name for parameter in SAMPLING_FIELDS]
        for name in named:
            if name not in known:
                meant = meant_parameter(name, known)
                hint = f"; did you mean {meant}?" if meant else ""
                raise TypeError(f"{cls.__name__}() got an unexpected argument {name!r}{hint}")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for parameter in SAMPLING_FIELDS:
            given = getattr(self, parameter.name)
            if given is parameter.default:  # true for most; skips the checks
                continue
            value = parameter.read(given)  # e.g. one stop string, a JSON object
            object.__setattr__(self, parameter.name, value)
            parameter.check(value)
        check_grammar(self, ignore_eos=self.ignore_eos)
        if self.min_new_tokens > self.wanted_tokens:
            raise RequestError(
                f"min_new_tokens is {self.min_new_tokens}; expected at most max_new_tokens, which "
                f"is {self.wanted_tokens}"
            )
        if self.top_k == 0:  # vLLM's spelling; equal settings need equal programs
            object.__setattr__(self, "top_k", -1)
        object.__setattr__(self, "stop_id_set", frozenset(self.stop_token_ids))

    @property
    def grammar(self) -> GrammarSource | None:
        return grammar_of(self)

    @classmethod
    def from_mapping(
        cls, values: Mapping[str, Any], *, defaults: Mapping[str, Any] | None = None
    ) -> SamplingParams:
        """Build params from a JSON object; `defaults` replace missing and null fields.

        Raises RequestError for an unknown field, with the closest known name.
        """
        if not isinstance(values, Mapping):
            raise RequestError(
                f"sampling_params is {shown_json(values)}; expected fields and their values"
            )
        known = {parameter.name for parameter in SAMPLING_FIELDS}
        for name in values:
            if name not in known:
                hint = PEER_PARAMETERS.get(name, "")
                raise RequestError(unknown_field("sampling_params", str(name), known, hint=hint))
        given = {name: value for name, value in values.items() if value is not None}
        whole = {**(defaults or {}), **given}
        return cls(**whole)

    def stop_ids(self, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
        eos = () if self.ignore_eos else eos_token_ids
        return tuple(dict.fromkeys((*eos, *self.stop_token_ids)))

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.return_logprob and self.logprob_start_len >= 0

    @property
    def wanted_tokens(self) -> int:
        return DEFAULT_NEW_TOKENS if self.max_new_tokens is None else self.max_new_tokens

    @property
    def options(self) -> StepOptions:
        return StepOptions(
            frozenset(
                parameter.needs
                for parameter in SAMPLING_FIELDS
                if parameter.needs is not None
                and getattr(self, parameter.name) != parameter.default
            )
        )


SAMPLING_FIELDS: SamplingTable = table_of(SamplingParams)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to generate; each of n choices is a Request."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int  # final; that of choice i of n is hash(sampling_seed, i)
    eos_token_ids: tuple[int, ...] = ()
    # Made from `sampling` once for all n choices; None until then.
    stop_matching: Any = field(default=None, repr=False, compare=False)
    grammar: Grammar | None = field(default=None, repr=False, compare=False)
    reasoning: ReasoningMarks | None = None  # marks of reasoning before the answer
    shown_ids: frozenset[int] = frozenset()  # special tokens that always have text
    extra_key: str | None = None  # requests with different keys share no cached prefix
    priority: int = 0  # used if priorities are on (`SchedulingLimits.priority_order`)
    caller: str | None = None  # user for fair sharing of slots; None: the call itself
    lora: Adapter | None = None  # of the target; None: the model itself
    # Output of an engine that was lost; text and finish reason continue as if it had not been.
    former_ids: tuple[int, ...] = ()

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self.sampling.stop_ids(self.eos_token_ids)

    def ends_with(self, token_id: int) -> bool:
        sampling = self.sampling
        is_eos = not sampling.ignore_eos and token_id in self.eos_token_ids
        return is_eos or token_id in sampling.stop_id_set

    def shows(self, token_id: int) -> bool:
        return self.sampling.no_stop_trim and token_id not in self.eos_token_ids


class FinishKind(enum.Enum):
    """Kind of a sequence's end; the value is SGLang's finish_reason type."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishReason:
    kind: FinishKind
    matched: str | int | None = None  # stop string or token id of a STOP
    message: str | None = None  # of an ABORT
    length: int | None = None

    def to_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {"type": self.kind.value}
        for name in ("matched", "length", "message"):
            if getattr(self, name) is not None:
                out[name] = getattr(self, name)
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecCounters:
    """Speculation counters of one sequence, from committed steps only."""

    verify_ct: int = 0
    num_accepted: int = 0
    num_proposed: int = 0
    accept_histogram: tuple[int, ...] = ()  # entry i: verifications that accepted i drafts, 0 to S
    full_verify_ct: int = 0
    full_num_emitted: int = 0

    @property
    def acceptance_length(self) -> float:
        """Mean num_emitted per verification, bonus included, without a truncated last step."""
        return self.full_num_emitted / self.full_verify_ct if self.full_verify_ct else 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities at one token: its own, the top tokens' with ids, the watched ids'."""

    logprob: float
    top: tuple[tuple[float, int], ...] = ()
    watched: tuple[float, ...] = ()


# A prompt token's id and log-probabilities.
PromptToken = tuple[int, TokenLogprob | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamChunk:
    """The output that one round added to a request; the last chunk has the finish reason."""

    request_id: str
    new_ids: tuple[int, ...]  # after truncation; the first num_accepted were drafts
    num_accepted: int
    text: str  # without partial characters
    finish: FinishReason | None = None
    prompt_tokens: int = 0
    num_retractions: int = 0
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    weight_version: str = DEFAULT_VERSION  # of the last prefill
    counters: SpecCounters = field(default_factory=SpecCounters)
    logprobs: tuple[TokenLogprob, ...] = ()  # of new_ids, if requested
    prompt_logprobs: tuple[PromptToken, ...] = ()  # in the first chunk; token 0 has None
    # If requested: f32[E] that chose each of new_ids; for the first one f32[prompt, E].
    hidden_states: tuple[np.ndarray, ...] = field(default=(), compare=False)
    draft_tree: VerifiedTree | None = None  # if requested
