"""`jspec doctor`: find out why speculation does not pay, by measuring a pair on generated texts.

serve      generate texts with a chain of S steps, recording each step's acceptance and time
force      compare the head's teacher-forced guesses with the target's choices at every token
try        try other settings of the head (layer ids, RoPE base, norms, vocabulary, ...)
look       inspect tensors, the chat template, and the target without its windows
compare    measure an engine without speculation
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jspec.cli.diagnosis.costs import propose_seconds, step_timing
from jspec.cli.diagnosis.examination import Examination
from jspec.cli.diagnosis.prompts import Prompt
from jspec.cli.diagnosis.records import Diagnosis
from jspec.cli.diagnosis.texts import make_texts
from jspec.cli.diagnosis.verify import checking_arguments
from jspec.config.engine_args import EngineArgs
from jspec.errors import ConfigError
from jspec.serving.engine import Engine

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorSettings:
    max_new_tokens: int = 128
    temperature: float | None = None
    seed: int = 0


def chain_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with a chain, since measuring by depth needs one guess per depth."""
    args = EngineArgs.from_mapping(arguments)
    if args.speculative.num_steps < 1:
        raise ConfigError(
            f"speculative_algorithm is {args.algorithm.name}; expected one that drafts, such as "
            "EAGLE3"
        )
    steps = args.speculative.num_steps
    return {
        **arguments,
        "speculative_num_steps": steps,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": steps + 1,
    }


def examine(
    arguments: Mapping[str, Any],
    prompts: Sequence[Prompt],
    settings: DoctorSettings,
    *,
    say: Say = lambda _: None,
) -> Diagnosis:
    say("starting the engine that speculates")
    with Engine(**chain_arguments(arguments)) as engine:
        requests = [
            prompt.request(
                engine,
                temperature=settings.temperature,
                max_new_tokens=settings.max_new_tokens,
                sampling_seed=settings.seed + i,
            )
            for i, prompt in enumerate(prompts)
        ]
        say(f"{len(requests)} texts")
        texts = make_texts(engine, requests)
        step = step_timing(engine, requests[0])
        examination = Examination(engine, texts, say=say)
        examination.run([p.given for p in prompts if isinstance(p.given, str)])
        proposing = propose_seconds(engine.served)
    say("starting the engine that does not speculate")
    with Engine(**checking_arguments(arguments)) as engine:
        plain_step = step_timing(engine, requests[0])
    return examination.diagnosis(step=step, propose_seconds=proposing, plain_step=plain_step)
