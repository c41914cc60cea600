"""Definition of a load: arrival of requests and their contents."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

WARM_UP_TOKENS = 16
MAX_WARM_UP = 64
WORDS = (  # noqa: SIM905 (a list would take one line per word)
    "the of and to in is that for it as was with be by on not he his but at are this have from or "
    "had an they which one you were all her she there would their we him been has when who will no "
    "more if out so up said what its about than into them can only other time new some could these "
    "two may first then do any like my now over such our man me even most made after also well did "
    "many before must through years where much your way down should because long each just state"
).split()


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One load: `clients` requests always open, or `rate` requests per second (Poisson). With both,
    at most `clients` are open; further requests wait in the client."""

    name: str
    num_requests: int
    clients: int | None = None
    rate: float | None = None

    @classmethod
    def parse(cls, text: str) -> Point:
        """Parse c64 (64 clients) or r12 (12 requests per second); c64:512 sends 512 requests, by
        default 8 per client and at most 256, or 256 at a rate. Raises ValueError."""
        load, _, count = text.partition(":")
        try:
            kind, value = load[:1], float(load[1:])
            num_requests = int(count) if count else 256
            if kind not in ("c", "r") or value <= 0 or num_requests < 1:
                raise ValueError
            if kind == "c" and value != int(value):
                raise ValueError
        except ValueError:
            raise ValueError(
                f"point {text!r}; expected cCLIENTS or rRATE, :REQUESTS after it if wanted "
                f"(c64, r12, c64:512)"
            ) from None
        if kind == "r":
            return cls(name=load, num_requests=num_requests, rate=value)
        clients = int(value)
        num_requests = num_requests if count else min(8 * clients, 256)
        return cls(name=load, num_requests=num_requests, clients=clients)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    prompt: str | tuple[int, ...]
    sampling: Mapping[str, Any]
    prompt_len: int
    new_tokens: int
    body: bytes = b""  # for HTTP
    is_exact: bool = True  # fewer tokens than new_tokens are an error
    name: str = ""
    index: int = 0


def native_body(job: Job) -> dict[str, Any]:
    content = {"text": job.prompt} if isinstance(job.prompt, str) else {"input_ids": job.prompt}
    named = {"rid": job.name} if job.name else {}
    return {**content, "sampling_params": dict(job.sampling), "stream": True, **named}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """Random requests; lengths are uniform in [jitter, 1] of prompt_len and new_tokens."""

    prompt_len: int = 1024
    new_tokens: int = 256
    prefix_len: int = 0  # of a prefix common to all prompts of a seed
    jitter: float = 0.5
    vocab_size: int = 120_000
    temperature: float = 0.0
    seed: int = 0
    is_text: bool = False  # words, about one token each, instead of ids
    stop: tuple[str, ...] = ()
    trace: bool = False  # give each request a name (`rid`)
    to_body: Callable[[Job], dict[str, Any]] = field(default=native_body)

    def jobs(self, point: Point) -> tuple[list[Job], list[Job]]:
        """Return (warm-up, measured) jobs; warm-up has other prompts and short answers."""
        # The order of draws is fixed, so that a seed's load never changes; figures depend on it.
        rng, prefix = random.Random(self.seed), self.prefix()
        measured = []
        for index in range(point.num_requests):
            lengths = [
                int(longest * rng.uniform(self.jitter, 1))
                for longest in (self.prompt_len, self.new_tokens)
            ]
            prompt = self.draw(rng, max(1, lengths[0]))
            name, new_tokens = f"{point.name}-{index}", max(2, lengths[1])
            measured.append(self._job([*prefix, *prompt], new_tokens, name, index))
        num_warm = min(point.clients or MAX_WARM_UP, MAX_WARM_UP, point.num_requests)
        warm = [
            self._job(
                [*prefix, *self.draw(rng, job.prompt_len - self.prefix_len)],
                WARM_UP_TOKENS,
                f"warm-{point.name}-{i}",
            )
            for i, job in enumerate(measured[:num_warm])
        ]
        return warm, measured

    def draw(self, rng: random.Random, length: int) -> list[int] | list[str]:
        if self.is_text:
            return [rng.choice(WORDS) for _ in range(length)]
        low = min(100, self.vocab_size // 2)
        return [rng.randrange(low, self.vocab_size) for _ in range(length)]

    def prefix(self) -> list[int] | list[str]:
        return self.draw(random.Random(f"prefix {self.seed}"), self.prefix_len)

    def _job(self, prompt: list[int | str], new_tokens: int, name: str, index: int = 0) -> Job:
        sampling: dict[str, Any] = {
            "temperature": self.temperature,
            "max_new_tokens": new_tokens,
            "ignore_eos": True,
        }
        if self.stop:
            sampling["stop"] = list(self.stop)
        job = Job(
            prompt=" ".join(map(str, prompt)) if self.is_text else tuple(map(int, prompt)),
            sampling=sampling,
            prompt_len=len(prompt),
            new_tokens=new_tokens,
            name=f"{self.seed}-{name}" if self.trace else "",
            index=index,
        )
        return with_body(job, self.to_body)


def with_body(job: Job, to_body: Callable[[Job], dict[str, Any]]) -> Job:
    names = [name for name in Job.__slots__ if name != "body"]
    body = json.dumps(to_body(job)).encode()
    return Job(body=body, **{name: getattr(job, name) for name in names})
