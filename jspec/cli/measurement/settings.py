"""Checked settings of `jspec bench`, and the requests that follow from them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jspec.cli.measurement.backends import BACKENDS, Backend
from jspec.cli.measurement.load import WARM_UP_TOKENS, Job, Pattern, Point, with_body
from jspec.cli.measurement.prompts import Encoder, Prompt, python_prompts, read_prompts
from jspec.errors import ConfigError

DATASETS = ("text", "random", "jsonl", "sharegpt")
MODES = ("both", "plain", "speculative")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """Settings; lengths are in tokens. Repeat r on a server uses seed + r, so that its prompts are
    not cached."""

    num_prompts: int = 8
    repeats: int = 3
    concurrency: int | None = None  # None: the rate alone decides
    request_rate: float | None = None
    dataset_name: str = "text"
    dataset_path: Path | None = None
    input_len: int = 64
    prefix_len: int = 0
    output_len: int = 64
    range_ratio: float = 1.0
    vocab_size: int | None = None
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = True
    backend: str = "jspec"

    def __post_init__(self) -> None:
        for name, least in (
            ("num_prompts", 1),
            ("repeats", 1),
            ("input_len", 1),
            ("prefix_len", 0),
        ):
            self._check_integer(name, least)
        self._check_integer("output_len", 2)
        if self.concurrency is not None:
            self._check_integer("concurrency", 1)
        if self.vocab_size is not None:
            self._check_integer("vocab_size", 2)
        rate = self.request_rate
        if rate is not None and not rate > 0:
            raise ConfigError(f"request_rate is {rate}; expected requests a second above 0, or inf")
        if not 0 <= self.range_ratio <= 1:
            raise ConfigError(f"random_range_ratio is {self.range_ratio}; expected 0 to 1")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"temperature is {self.temperature}; expected 0 or more")
        if self.dataset_name not in DATASETS:
            raise ConfigError(
                f"dataset_name is {self.dataset_name!r}; expected one of {', '.join(DATASETS)}"
            )
        if (self.dataset_path is not None) != (self.dataset_name in ("jsonl", "sharegpt")):
            raise ConfigError(
                f"dataset_name is {self.dataset_name!r} and dataset_path is "
                f"{None if self.dataset_path is None else str(self.dataset_path)!r}; expected a "
                f"path with jsonl and sharegpt, and none without"
            )
        if self.prefix_len and self.dataset_name != "random":
            raise ConfigError(
                f"random_prefix_len is {self.prefix_len} with dataset_name {self.dataset_name!r}; "
                f"expected 'random'"
            )
        if self.backend not in BACKENDS:
            raise ConfigError(f"backend is {self.backend!r}; expected one of {', '.join(BACKENDS)}")
        if self.vocab_size is not None and self.backend.endswith("chat"):
            raise ConfigError("vocab_size requests token ids, which a chat cannot contain")

    def _check_integer(self, name: str, least: int) -> None:
        if getattr(self, name) < least:
            raise ConfigError(f"{name} is {getattr(self, name)}; expected at least {least}")

    @property
    def protocol(self) -> Backend:
        return BACKENDS[self.backend]

    @property
    def point(self) -> Point:
        """The load: a closed loop without a rate; an infinite rate sends all at once."""
        rate, clients = self.request_rate, self.concurrency
        if rate is not None and math.isinf(rate):
            rate, clients = None, clients or self.num_prompts
        if rate is None:
            clients = min(clients or 1, self.num_prompts)
        name = f"c{clients}" if rate is None else f"r{rate:g}"
        return Point(name=name, num_requests=self.num_prompts, clients=clients, rate=rate)

    def jobs(
        self,
        tokenizer: Encoder | None,
        *,
        repeat: int,
        to_body: Callable[[Job], dict[str, Any]] | None,  # None: a local engine, which takes ids
        vocab_size: int | None,  # upper bound of random token ids; None: words
    ) -> list[Job]:
        """Return the requests of one repeat."""
        settings = replace(self, seed=self.seed + repeat)
        found = [
            settings._job(prompt, new_tokens, index)
            for index, (prompt, new_tokens) in enumerate(
                settings._prompts(tokenizer, as_text=to_body is not None, vocab_size=vocab_size)
            )
        ]
        return found if to_body is None else [with_body(job, to_body) for job in found]

    def warm_up(
        self, jobs: list[Job], to_body: Callable[[Job], dict[str, Any]] | None
    ) -> list[Job]:
        """Return jobs with the same prompts and short answers, as many as are open at once."""
        num_warm = min(self.point.clients or 8, len(jobs), 64)
        found = []
        for job in jobs[:num_warm]:
            new_tokens = min(WARM_UP_TOKENS, job.new_tokens)
            sampling = {**job.sampling, "max_new_tokens": new_tokens}
            short = replace(job, sampling=sampling, new_tokens=new_tokens, body=b"")
            found.append(short if to_body is None else with_body(short, to_body))
        return found

    def _prompts(
        self, tokenizer: Encoder | None, *, as_text: bool, vocab_size: int | None
    ) -> list[tuple[Prompt, int]]:
        rng = random.Random(self.seed)
        lengths = [
            [
                max(least, int(longest * rng.uniform(self.range_ratio, 1)))
                for _ in range(self.num_prompts)
            ]
            for longest, least in ((self.input_len, 1), (self.output_len, 2))
        ]
        if self.dataset_path is not None:
            found = read_prompts(
                self.dataset_path,
                count=self.num_prompts,
                seed=self.seed,
                fallback_length=self.input_len,
            )
        elif self.dataset_name == "random":
            found = [self._random(rng, length, vocab_size) for length in lengths[0]]
        elif tokenizer is None:
            raise ConfigError(
                "dataset_name is 'text' without a tokenizer; expected --dataset-name random and "
                "--vocab-size"
            )
        else:
            found = python_prompts(
                tokenizer,
                count=self.num_prompts,
                lengths=lengths[0],
                seed=self.seed,
                as_text=as_text,
            )
        return [
            (prompt, prompt.new_tokens or new_tokens)
            for prompt, new_tokens in zip(found, lengths[1], strict=True)
        ]

    def _random(self, rng: random.Random, length: int, vocab_size: int | None) -> Prompt:
        pattern = Pattern(
            prefix_len=self.prefix_len,
            vocab_size=vocab_size or 2,
            is_text=vocab_size is None,
            seed=self.seed,
        )
        drawn = [*pattern.prefix(), *pattern.draw(rng, length)]
        content = " ".join(map(str, drawn)) if vocab_size is None else tuple(map(int, drawn))
        return Prompt(content=content, length=len(drawn))

    def _job(self, prompt: Prompt, new_tokens: int, index: int) -> Job:
        sampling: dict[str, Any] = {
            "temperature": self.temperature,
            "max_new_tokens": new_tokens,
            "ignore_eos": self.ignore_eos,
        }
        return Job(
            prompt=prompt.content,
            sampling=sampling,
            prompt_len=prompt.length,
            new_tokens=new_tokens,
            is_exact=self.ignore_eos,
            index=index,
        )
