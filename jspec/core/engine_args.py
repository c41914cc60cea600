"""What a user may set on an engine, under SGLang's names, and how the unset ones resolve.

Host only. What depends on the device or on a checkpoint (dtype, memory, context) is resolved by
`engine.memory`; this module resolves what follows from the arguments alone.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from jspec.core.config import Algorithm, SpeculativeConfig
from jspec.core.errors import ConfigError

DEFAULT_SPEC = (3, 1, 4)
DTYPES = ("auto", "float32", "bfloat16", "float16")
ATTENTION_BACKENDS = ("auto", "xla", "pallas")
LOAD_FORMATS = ("auto", "dummy")
COMPILE_AT_START = ("auto", "first", "all")
MODEL_PATHS = ("model_path", "tokenizer_path", "speculative_draft_model_path")
PATHS = (*MODEL_PATHS, "compilation_cache_dir")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
MAX_MATCH_WINDOW = 64  # compares of the whole context a step, unrolled


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs:
    """Arguments of `jspec.Engine`; None means "let jspec choose".

    model_path: a Hugging Face directory; None serves the bundled pair, with EAGLE3 unless
        `speculative_algorithm` says otherwise.
    speculative_algorithm: "EAGLE3", "NGRAM", "STANDALONE" or "NONE"; a model path without it
        decodes plainly.
    speculative_draft_model_path: an EAGLE-3 head or, for STANDALONE, a language model with the
        target's vocabulary.
    speculative_num_steps, speculative_eagle_topk, speculative_num_draft_tokens: S/K/N, 3/1/4 if
        unset; one that is left out follows from the others where it can.
    speculative_draft_rope_theta: overrides the draft checkpoint's rope theta.
    speculative_draft_noise: False drafts plain top-k instead of with shared noise (same text,
        fewer accepted drafts; for measurements).
    speculative_ngram_min_match_window_size, speculative_ngram_max_match_window_size: tokens at a
        row's end that must, and that may, have occurred before, for NGRAM to propose what followed.
    speculative_ngram_external_corpus_path: token ids that NGRAM looks up where the row itself has
        nothing: a .npy array, or text of ids between white space; at most
        speculative_ngram_external_corpus_max_tokens of them.
    simulate_acceptance: every verification emits this many tokens on average, bonus included,
        whatever the target chose, at the cost of real steps; for measurements, the text means
        nothing.
    load_format: "auto" reads safetensors; "dummy" makes random weights on the devices, at the
        shapes of config.json.
    skip_tokenizer_init: no tokenizer; token ids in, token ids out.
    dtype: "auto" is float32 on a CPU, bfloat16 elsewhere.
    attention_backend: "xla" runs anywhere, "pallas" are the platform's own kernels; "auto" takes
        those on a TPU, and on a Hopper GPU where they serve model and dtype.
    max_queued_requests: sequences that may wait, and that a call of generate() feeds at once; 128,
        or max_running_requests if that is more.
    max_total_tokens: tokens that the KV pool holds, whole pages; the scratch of drafts is
        extra. mem_fraction_static: share of a device's
        memory for weights and pool together, if max_total_tokens is unset.
    disable_radix_cache: keep no KV behind a finished request for those that begin alike; the text
        is the same either way.
    overlap_depth: steps dispatched ahead of the one being read, 0 to 2; every depth gives the
        same tokens.
    num_continuous_decode_steps: verifications of one dispatched step; the host then has less to do
        for each, tokens arrive in lumps, and work behind a row's end is wasted. Same tokens.
    random_seed: makes requests without a sampling_seed reproducible in order of arrival.
    compilation_cache_dir: where compiled programs are kept; "" keeps none.
    compile_at_start: "first" serves as soon as the few programs are there that can run everything,
        and swaps in the others, which fit better, as they come; "all" waits for all, as a
        measurement of speed must; "auto" waits for all if they are few (8).
    """

    model_path: str | None = None
    tokenizer_path: str | None = None
    speculative_algorithm: str | None = None
    speculative_draft_model_path: str | None = None
    speculative_num_steps: int | None = None
    speculative_eagle_topk: int | None = None
    speculative_num_draft_tokens: int | None = None
    speculative_draft_rope_theta: float | None = None
    speculative_draft_noise: bool = True
    speculative_ngram_min_match_window_size: int = 1
    speculative_ngram_max_match_window_size: int = 12
    speculative_ngram_external_corpus_path: str | None = None
    speculative_ngram_external_corpus_max_tokens: int = 10_000_000
    simulate_acceptance: float | None = None
    load_format: str = "auto"
    skip_tokenizer_init: bool = False
    dtype: str = "auto"
    attention_backend: str = "auto"
    page_size: int | None = None
    max_running_requests: int | None = None
    max_queued_requests: int | None = None
    context_length: int | None = None
    max_total_tokens: int | None = None
    mem_fraction_static: float = 0.85
    chunked_prefill_size: int | None = None
    tp_size: int = 1
    overlap_depth: int = 1
    num_continuous_decode_steps: int = 1
    random_seed: int | None = None
    disable_radix_cache: bool = False
    compilation_cache_dir: str | None = None
    compile_at_start: str = "auto"

    def __post_init__(self) -> None:
        for name in MODEL_PATHS:
            _check_path(name, getattr(self, name))
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        _check_choice("load_format", self.load_format, LOAD_FORMATS)
        _check_choice("compile_at_start", self.compile_at_start, COMPILE_AT_START)
        for name in ("page_size", "max_running_requests", "context_length", "max_total_tokens"):
            _check_positive(name, getattr(self, name))
        _check_positive("chunked_prefill_size", self.chunked_prefill_size)
        _check_positive("max_queued_requests", self.max_queued_requests)
        _check_positive("tp_size", self.tp_size)
        # Rounds are unrolled: a program of more would compile for minutes and gain nothing.
        _check_integer(
            "num_continuous_decode_steps", self.num_continuous_decode_steps, low=1, high=16
        )
        _check_integer("overlap_depth", self.overlap_depth, low=0, high=2)
        if self.random_seed is not None:
            _check_integer("random_seed", self.random_seed, low=-(2**63), high=2**64 - 1)
        for name in PATHS:
            _check_local(name, getattr(self, name))
        theta = self.speculative_draft_rope_theta
        if theta is not None and not (isinstance(theta, int | float) and theta > 0):
            raise ConfigError(
                f"speculative_draft_rope_theta is {theta!r}; expected a number above 0"
            )
        if not 0.0 < self.mem_fraction_static <= 1.0:
            raise ConfigError(
                f"mem_fraction_static is {self.mem_fraction_static}; expected a number in (0, 1]"
            )
        self._check_drafter()
        self.speculative  # noqa: B018  (an impossible S/K/N is refused here, not later)

    def _check_drafter(self) -> None:
        """What the algorithm needs to be given, and what it must not be."""
        algorithm, path = self.algorithm, self.speculative_draft_model_path
        if algorithm.drafting.has_model and not self.uses_bundled_draft:
            if path is None:
                raise ConfigError(
                    f"speculative_algorithm is {algorithm.value}; expected "
                    f"speculative_draft_model_path too"
                )
        elif path is not None:
            because = (
                "the bundled target has its own draft"
                if self.model_path is None
                else f"speculative_algorithm is {algorithm.value}"
            )
            raise ConfigError(
                f"speculative_draft_model_path is {path!r}, but {because}; expected it unset"
            )
        least, most = "min_match_window_size", "max_match_window_size"
        longest = self.speculative_ngram_max_match_window_size
        _check_integer(f"speculative_ngram_{most}", longest, low=1, high=MAX_MATCH_WINDOW)
        shortest = self.speculative_ngram_min_match_window_size
        _check_integer(f"speculative_ngram_{least}", shortest, low=1, high=longest)
        name = "speculative_ngram_external_corpus_max_tokens"
        _check_integer(name, getattr(self, name), low=2, high=2**31 - 1)
        corpus = self.speculative_ngram_external_corpus_path
        if corpus is not None and algorithm is not Algorithm.NGRAM:
            raise ConfigError(
                f"speculative_ngram_external_corpus_path is {corpus!r}, but speculative_algorithm "
                f"is {algorithm.value}; expected it unset"
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> EngineArgs:
        """Raises ConfigError for a name that is not an argument, suggesting the nearest one."""
        for name in values:
            if name not in cls.names():
                near = difflib.get_close_matches(name, cls.names(), n=1, cutoff=0.0)
                raise ConfigError(f"unknown engine argument {name!r}; did you mean {near[0]!r}?")
        return cls(**values)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm in force. Raises ConfigError for a name that is not implemented."""
        name = self.speculative_algorithm
        if name is None:
            return Algorithm.EAGLE3 if self.model_path is None else Algorithm.NONE
        _check_choice("speculative_algorithm", name, tuple(a.value for a in Algorithm))
        return Algorithm(name)

    @property
    def uses_bundled_draft(self) -> bool:
        """Whether the draft is the EAGLE-3 head that the bundled target brings along."""
        return self.model_path is None and self.algorithm is Algorithm.EAGLE3

    @property
    def speculative(self) -> SpeculativeConfig:
        """S/K/N in force. Raises ConfigError for an impossible one."""
        given = {
            "speculative_num_steps": self.speculative_num_steps,
            "speculative_eagle_topk": self.speculative_eagle_topk,
            "speculative_num_draft_tokens": self.speculative_num_draft_tokens,
        }
        for name, value in given.items():
            _check_positive(name, value)
        if self.algorithm is Algorithm.NONE:
            unset = {**given, "simulate_acceptance": self.simulate_acceptance}
            for name, found in unset.items():
                if found is not None:
                    raise ConfigError(
                        f"{name} is {found}, but speculative_algorithm is NONE; expected it unset"
                    )
            return SpeculativeConfig.plain()
        steps, topk, nodes = given.values()
        topk = DEFAULT_SPEC[1] if topk is None else topk
        if steps is None:
            steps = DEFAULT_SPEC[0]
            if self.algorithm is Algorithm.NGRAM and topk == 1 and nodes is not None:
                steps = max(nodes - 1, 1)  # as SGLang's flags have it, which say only N
        if nodes is None:
            pool = self.algorithm.drafting.num_candidates(steps, topk)
            nodes = steps + 1 if topk == 1 else min(1 + pool, max(topk * 4, steps + 1))
        return SpeculativeConfig(
            algorithm=self.algorithm,
            num_steps=steps,
            topk=topk,
            num_draft_tokens=nodes,
            simulate_acceptance=self.simulate_acceptance,
        )


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}; expected one of {', '.join(choices)}")


def _check_local(name: str, value: str | None) -> None:
    """A directory's name is taken as it is: gs://b/c would be a directory called `gs:`."""
    if value is not None and _SCHEME.match(str(value)):
        raise ConfigError(
            f"{name} is {value!r}; expected a directory of this machine: remote paths are not "
            "read, so copy it here first, or mount it and name the mount"
        )


def _check_path(name: str, value: object) -> None:
    """An empty path would be the directory that the process happens to run in."""
    if value is None:
        return
    if not isinstance(value, str | os.PathLike) or not str(value).strip():
        raise ConfigError(f"{name} is {value!r}; expected a directory, or leave it out")


def _check_integer(name: str, value: object, *, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} is {value!r}; expected an integer from {low} to {high}")


def _check_positive(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} is {value!r}; expected an integer of at least 1")
