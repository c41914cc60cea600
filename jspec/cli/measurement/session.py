"""A whole measurement: targets alternate within each repeat; results are medians."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jspec.cli.measurement.client import closed_loop, run_load
from jspec.cli.measurement.figures import Seen, acceptance, medians, summary
from jspec.cli.measurement.load import Job, Point
from jspec.cli.measurement.targets import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    point: Point
    warm_up: Sequence[Job]
    jobs: Sequence[Sequence[Job]]  # of each repeat, equal for all targets
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    runs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    seen: dict[str, list[Seen]] = field(default_factory=dict)


async def measure(targets: Sequence[Target], plan: Plan, *, say: Callable[[str], None]) -> Measured:
    """Run all repeats. The order of the targets alternates, so that drift affects all equally."""
    found = Measured()
    for target in targets:
        warm = Seen()
        await closed_loop(target.send, plan.warm_up, len(plan.warm_up), warm)
        if warm.errors:
            say(f"{target.name}: warm-up: {warm.errors[0]}")
    for repeat, jobs in enumerate(plan.jobs):
        for target in targets if repeat % 2 == 0 else reversed(targets):
            await target.before()
            seen, seconds = await run_load(target.send, plan.point, jobs, seed=plan.seed + repeat)
            await target.after(seen)
            figures = summary(seen, seconds)
            found.runs.setdefault(target.name, []).append(figures)
            found.seen.setdefault(target.name, []).append(seen)
            say(
                f"{repeat + 1}/{len(plan.jobs)} {target.name}: "
                f"{figures['output_tokens_per_second']} tokens/s in {seconds:.1f} s"
            )
    return found


def result_of(measured: Measured, names: Sequence[str]) -> dict[str, Any]:
    """Return medians by target; for two also the second's ratio to the first, and equal outputs."""
    modes = {}
    for name in names:
        runs, seen = measured.runs[name], measured.seen[name]
        total = Seen()
        for each in seen:
            total.add_histogram(each.histogram)
        modes[name] = {**medians(runs), "acceptance": acceptance(total.histogram), "runs": runs}
    result: dict[str, Any] = {"modes": modes}
    if len(names) == 2:
        first, second = (modes[name] for name in names)
        result["ratio"] = _ratios(first, second)
        same, known = _same(*(measured.seen[name] for name in names))
        if known:
            result["same_tokens"] = {"same": same, "of": known}
    return result


def _ratios(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the second's improvement over the first: above 1 is better, also for times."""
    rates = [of["output_tokens_per_second"] for of in (second, first)]
    times = {name: (first[name][0], second[name][0]) for name in ("ttft_ms", "tpot_ms", "e2e_ms")}
    pairs = {"output_tokens_per_second": tuple(rates), **times}
    return {name: round(a / b, 3) if a and b else None for name, (a, b) in pairs.items()}


def _same(plain: Sequence[Seen], other: Sequence[Seen]) -> tuple[int, int]:
    pairs = [
        (ids, b.output_ids[index])
        for a, b in zip(plain, other, strict=True)
        for index, ids in a.output_ids.items()
        if index in b.output_ids
    ]
    return sum(a == b for a, b in pairs), len(pairs)
