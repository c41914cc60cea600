"""`jspec verify`: run the same requests with and without speculation, and explain differences.

    speculation   every request once, as it would be served
    plain         every request twice, the second time in another order and batch, both with
                  log-probabilities
    rescoring     each text by the target alone, which gives plain decoding's choice at every token
                  after the same prefix, also past a text's first difference

Each difference has a margin (`sampling.margin`). Rounding is measured as the distance of plain
decoding's log-probabilities from rescoring's. A margin within TOLERANCE times the largest distance
is a tie flip, as bfloat16 has; a larger one is a fault.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jspec.cli.diagnosis.prompts import Prompt
from jspec.cli.diagnosis.texts import Text, make_texts
from jspec.cli.measurement.offline import plain_arguments
from jspec.config.engine_args import EngineArgs
from jspec.config.limits import Algorithm
from jspec.engine.rescorer import Difference, Rescored, Rescorer
from jspec.errors import ConfigError
from jspec.messages.request import Request
from jspec.serving.engine import Engine

TOLERANCE = 4.0
LEAST_TOLERANCE = 1e-4  # in logits: float32 on a CPU can have no rounding noise at all
PLAUSIBLE_NOISE = {"float32": 0.05}  # upper bound for rounding; 2 for 16-bit types
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifySettings:
    max_new_tokens: int = 64
    temperatures: tuple[float | None, ...] = (0.0, None)  # of each prompt; None: the model's
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A difference that rounding cannot explain."""

    text: int  # its number
    prompt: int
    index: int
    what: str  # a sentence
    margin: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    num_tokens: int
    num_differences: int
    num_tie_flips: int
    largest_margin: float
    faults: tuple[Fault, ...]
    num_other: int  # texts that differ from those of the first plain run

    @property
    def tie_flips_per_1000(self) -> float:
        return 1e3 * self.num_tie_flips / self.num_tokens if self.num_tokens else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    engine: str
    dtype: str
    num_texts: int
    speculation: Side
    plain: Side
    noise: float  # largest distance of log-probabilities
    mean_noise: float
    tolerance: float  # larger margins are faults
    warnings: tuple[str, ...]

    @property
    def num_faults(self) -> int:
        return len(self.speculation.faults) + len(self.plain.faults)

    def to_json(self) -> dict[str, Any]:
        return {
            **dataclasses.asdict(self),
            "num_faults": self.num_faults,
            "tie_flips_per_1000_tokens": {
                "speculation": self.speculation.tie_flips_per_1000,
                "plain": self.plain.tie_flips_per_1000,
            },
        }


def checking_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {**plain_arguments(arguments), "disable_logprobs": False}


def check_speculates(arguments: Mapping[str, Any]) -> None:
    if EngineArgs.from_mapping(arguments).algorithm == Algorithm.NONE:
        raise ConfigError(
            "speculative_algorithm is NONE, so there is nothing to compare; expected EAGLE3, "
            "EAGLE, NEXTN, NGRAM or STANDALONE"
        )


def verify(
    arguments: Mapping[str, Any],
    prompts: Iterable[Prompt],
    settings: VerifySettings,
    *,
    make_engine: Callable[..., Engine] = Engine,
    say: Say = lambda _: None,
) -> VerifyReport:
    """Start one engine after the other. Raises ConfigError, CheckpointError and RequestError."""
    check_speculates(arguments)
    say("starting the engine that speculates")
    with make_engine(**arguments) as engine:
        cases, numbers = requests_of(engine, prompts, settings)
        say(f"{len(cases)} texts with speculation")
        texts = make_texts(engine, cases)
        draft_shape = engine.limits.draft_shape
        name = f"{engine.config.speculative_algorithm} {draft_shape.num_steps}/{draft_shape.topk}/"
        name += str(draft_shape.num_draft_tokens)
    say("starting the engine that does not")
    with Engine(**checking_arguments(arguments)) as engine:
        say("the same texts, twice")
        plain = make_texts(engine, cases)
        company = max(1, engine.limits.pool.max_rows // 2)
        other = make_texts(engine, cases, at_once=company, reverse=True, logprobs=True)
        say("rescoring")
        most = max(len(text.request.prompt_ids) + len(text.ids) for text in (*texts, *plain))
        rescorer = Rescorer(engine.served, most_tokens=most)
        rescored = [[_score(rescorer, t) for t in each] for each in (texts, plain, other)]
        dtype = engine.config.dtype
    distances = np.concatenate([*map(_distances, other, rescored[2]), np.zeros(1)])
    noise = float(distances.max())
    tolerance = max(TOLERANCE * noise, LEAST_TOLERANCE)
    judge = _Judge(tolerance, plain, numbers)
    return VerifyReport(
        engine=name,
        dtype=dtype,
        num_texts=len(cases),
        speculation=judge.side(texts, rescored[0], "speculation"),
        plain=judge.side([*plain, *other], [*rescored[1], *rescored[2]], "plain decoding"),
        noise=noise,
        mean_noise=float(distances.mean()),
        tolerance=tolerance,
        warnings=_warnings(noise, dtype),
    )


def requests_of(
    engine: Engine, prompts: Iterable[Prompt], settings: VerifySettings
) -> tuple[list[Request], list[int]]:
    """Return the requests for each prompt and temperature, and their prompts. Seeds all differ."""
    found: list[Request] = []
    numbers: list[int] = []
    for prompt in prompts:
        own = "temperature" in prompt.sampling
        for temperature in settings.temperatures[:1] if own else settings.temperatures:
            request = prompt.request(
                engine,
                temperature=temperature,
                max_new_tokens=settings.max_new_tokens,
                sampling_seed=settings.seed + len(found),
            )
            found.append(request)
            numbers.append(prompt.number)
    return found, numbers


def _score(rescorer: Rescorer, text: Text) -> Rescored | None:
    return rescorer.score(text.request, text.ids) if text.ids else None


def _distances(text: Text, rescored: Rescored | None) -> np.ndarray:
    found: list[float] = []
    if rescored is not None:
        for i, known in enumerate(text.logprobs, start=rescored.prompt_len):
            again = dict(zip(rescored.top_ids[i].tolist(), rescored.top_logprobs[i], strict=True))
            found += [abs(value - again[t]) for value, t in known.top if t in again]
    distances = np.asarray(found, np.float64)
    return distances[np.isfinite(distances)]


class _Judge:
    def __init__(self, tolerance: float, plain: Sequence[Text], numbers: Sequence[int]) -> None:
        self._tolerance, self._plain, self._numbers = tolerance, plain, numbers

    def side(self, texts: Sequence[Text], scores: Sequence[Rescored | None], who: str) -> Side:
        differences: list[Difference] = []
        faults: list[Fault] = []
        for i, (text, rescored) in enumerate(zip(texts, scores, strict=True)):
            case = i % len(self._plain)
            found = () if rescored is None else rescored.differences
            differences += found
            wrong = [
                Fault(
                    text=case,
                    prompt=self._numbers[case],
                    index=each.index,
                    what=f"{who} emitted token {each.emitted_id}; the target chooses "
                    f"{each.chosen_id}",
                    margin=each.margin,
                )
                for each in found
                if each.margin > self._tolerance
            ]
            faults += wrong or self._other_end(case, text, who)
        margins = [each.margin for each in differences]
        same = [text.ids == self._plain[i % len(self._plain)].ids for i, text in enumerate(texts)]
        count = sum(rescored.num_differences for rescored in scores if rescored is not None)
        return Side(
            num_tokens=sum(len(text.ids) for text in texts),
            num_differences=count,
            num_tie_flips=sum(value <= self._tolerance for value in margins),
            largest_margin=max(margins, default=0.0),
            faults=tuple(faults),
            num_other=same.count(False),
        )

    def _other_end(self, case: int, text: Text, who: str) -> list[Fault]:
        plain = self._plain[case]
        shared = min(len(text.ids), len(plain.ids))
        if text.ids[:shared] != plain.ids[:shared]:
            return []
        if len(text.ids) == len(plain.ids) and text.finish == plain.finish:
            return []
        return [
            Fault(
                text=case,
                prompt=self._numbers[case],
                index=shared,
                what=f"{who} ended after {len(text.ids)} tokens ({_end(text)}); plain decoding "
                f"after {len(plain.ids)} ({_end(plain)}), alike until then",
            )
        ]


def _end(text: Text) -> str:
    return "no reason" if text.finish is None else text.finish.kind.value


def _warnings(noise: float, dtype: str) -> tuple[str, ...]:
    if noise <= PLAUSIBLE_NOISE.get(dtype, 2.0):
        return ()
    return (
        f"plain decoding's log-probabilities differ by up to {noise:.3g} from rescored ones, more "
        f"than by rounding in {dtype}: faults of that size are indistinguishable from noise",
    )
