"""What a user may set on an engine, under SGLang's names, and how the unset ones resolve.

Host only. What depends on the device or on a checkpoint (dtype, memory, context) is resolved by
`engine.memory`; this module resolves what follows from the arguments alone.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from jspec.core.config import Algorithm, SpeculativeConfig
from jspec.core.errors import ConfigError

DEFAULT_SPEC = (3, 1, 4)
DTYPES = ("auto", "float32", "bfloat16", "float16")
ATTENTION_BACKENDS = ("auto", "xla", "pallas")
LOAD_FORMATS = ("auto", "dummy")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs:
    """Arguments of `jspec.Engine`; None means "let jspec choose".

    model_path: a Hugging Face directory; None serves the bundled pair, with EAGLE3 unless
        `speculative_algorithm` says otherwise.
    speculative_algorithm: "EAGLE3" or "NONE"; a model path without it decodes plainly.
    speculative_num_steps, speculative_eagle_topk, speculative_num_draft_tokens: S/K/N, 3/1/4 if
        unset; one that is left out follows from the others where it can.
    speculative_draft_rope_theta: overrides the draft checkpoint's rope theta.
    speculative_draft_noise: False drafts plain top-k instead of with shared noise (same text,
        fewer accepted drafts; for measurements).
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
    max_total_tokens: size of the KV pool in tokens. mem_fraction_static: share of a device's
        memory for weights and pool together, if max_total_tokens is unset.
    overlap_depth: steps dispatched ahead of the one being read, 0 to 2; every depth gives the
        same tokens.
    num_continuous_decode_steps: verifications of one dispatched step; the host then has less to do
        for each, tokens arrive in lumps, and work behind a row's end is wasted. Same tokens.
    random_seed: makes requests without a sampling_seed reproducible in order of arrival.
    compilation_cache_dir: where compiled programs are kept; "" keeps none.
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
    compilation_cache_dir: str | None = None

    def __post_init__(self) -> None:
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        _check_choice("load_format", self.load_format, LOAD_FORMATS)
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
        theta = self.speculative_draft_rope_theta
        if theta is not None and not (isinstance(theta, int | float) and theta > 0):
            raise ConfigError(
                f"speculative_draft_rope_theta is {theta!r}; expected a number above 0"
            )
        if not 0.0 < self.mem_fraction_static <= 1.0:
            raise ConfigError(
                f"mem_fraction_static is {self.mem_fraction_static}; expected a number in (0, 1]"
            )
        if self.algorithm is Algorithm.EAGLE3 and self.model_path is not None:
            if self.speculative_draft_model_path is None:
                raise ConfigError(
                    "speculative_algorithm is EAGLE3; expected speculative_draft_model_path too"
                )
        elif self.speculative_draft_model_path is not None:
            because = (
                "the bundled target has its own draft"
                if self.model_path is None
                else "speculative_algorithm is NONE"
            )
            raise ConfigError(
                f"speculative_draft_model_path is {self.speculative_draft_model_path!r}, but "
                f"{because}; expected it unset"
            )
        self.speculative  # noqa: B018  (an impossible S/K/N is refused here, not later)

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
        steps = DEFAULT_SPEC[0] if steps is None else steps
        topk = DEFAULT_SPEC[1] if topk is None else topk
        if nodes is None:
            pool = topk + (steps - 1) * topk * topk
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


def _check_integer(name: str, value: object, *, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} is {value!r}; expected an integer from {low} to {high}")


def _check_positive(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} is {value!r}; expected an integer of at least 1")
