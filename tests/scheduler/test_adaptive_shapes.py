"""The chooser of shapes in virtual time, on the dial's acceptance and an H200's costs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks import simulate_trees
from benchmarks.simulate_shapes import CHAIN, CostTable, DialledChains, cell, limits_of, run
from jspec.config.limits import Algorithm, SpeculativeConfig
from jspec.config.shape_sets import shapes_for
from jspec.messages.features import PLAIN, StepFeatures
from jspec.messages.plan import RoundResult, RowRef, StepKind, StepPlan, StepResult
from jspec.scheduler.shapes.adaptive_shapes import AdaptiveShapes

LEAST = 0.97  # of the better of plain and the best fixed shape


def measured(rows: int, dials: tuple[float, ...], num_steps: int = 2000) -> dict[str, Any]:
    return cell(rows, dials, num_steps=num_steps, table=CostTable.measured())


@pytest.mark.parametrize(
    ("rows", "dial"), [(1, 0.0), (64, 0.0), (8, 0.2), (64, 0.3), (1, 0.9), (64, 1.0)]
)
def test_never_much_slower_than_the_best_shape_held_fixed(rows: int, dial: float) -> None:
    found = measured(rows, (dial,))
    assert found["of_best"] >= LEAST, found
    assert found["expected_of_emitted"] == pytest.approx(1, abs=0.03)
    # Nobody expects slow moments, which are 3% of a card's time in plain steps of one row.
    assert 0.9 < found["expected_of_measured_seconds"] < 1.03


@pytest.mark.parametrize("dials", [(0.0, 1.0), (1.0, 0.0)])
def test_what_changes_is_followed(dials: tuple[float, ...]) -> None:
    """Faster than any shape that does not."""
    found = measured(64, dials)
    assert found["of_best"] > 1.05, found
    assert min(found["steps"]["0/1/1"], found["steps"]["3/1/4"]) > 500


class SlowAtFirst(CostTable):
    """Plain steps take half as long again while the first hundred of all steps last."""

    asked = 0

    def step(self, shape: SpeculativeConfig, rows: int) -> float:
        SlowAtFirst.asked += 1
        slow = 1.5 if shape.is_plain and SlowAtFirst.asked < 100 else 1.0
        return slow * super().step(shape, rows)


def test_a_cost_is_not_believed_for_ever() -> None:
    """A shape that was slow when it was tried is tried again soon."""
    SlowAtFirst.asked, limits = 0, limits_of()
    chooser = AdaptiveShapes(limits, ready=lambda *_: limits.shapes)
    table = CostTable.measured()
    slow = SlowAtFirst(table.plain, table.chain)
    none = DialledChains(1, (0.0,), 1000)
    _, used = run(chooser, limits, rows=1, emitting=none, num_steps=1000, table=slow)
    assert used["0/1/1"] > 600, used


def test_only_what_is_ready_is_chosen() -> None:
    limits, asked = limits_of(), []

    def ready(num_rows: int, features: StepFeatures) -> tuple[SpeculativeConfig, ...]:
        asked.append((num_rows, features))
        return (CHAIN,)

    chooser = AdaptiveShapes(limits, ready=ready)
    none, table = DialledChains(8, (0.0,), 300), CostTable.measured()
    _, used = run(chooser, limits, rows=8, emitting=none, num_steps=300, table=table)
    assert used == {"3/1/4": 300}
    assert asked == [(8, PLAIN)] * 300
    assert chooser.totals.num_changes == chooser.totals.num_probes == 0


TREE = SpeculativeConfig(algorithm=Algorithm.EAGLE3, num_steps=3, topk=4, num_draft_tokens=16)
EMITTED = {"0/1/1": 1.0, "1/4/5": 1.7, "3/1/4": 2.2, "3/4/8": 2.8, "3/4/16": 3.0}
# Of one row, whose nodes cost nearly nothing, and of 64, whose nodes are what a step costs.
ONE_ROW = {"0/1/1": 4.1, "1/4/5": 4.4, "3/1/4": 4.8, "3/4/8": 5.0, "3/4/16": 5.0}
MANY_ROWS = {"0/1/1": 6.8, "1/4/5": 12.0, "3/1/4": 10.6, "3/4/8": 13.0, "3/4/16": 28.0}


# Of 64 rows of Llama-3.1-8B on an H200, acceptance 0.3 (adaptive_card_tree.json).
FEW_ACCEPTED = {"0/1/1": 1.0, "3/1/4": 1.41, "3/4/8": 1.67, "3/4/16": 1.74}
AT_64_ROWS = {"0/1/1": 5.5, "3/1/4": 9.4, "3/4/8": 16.2, "3/4/16": 27.6}
Milliseconds = Callable[
    [int, str, str], float
]  # of a step, by its number, its shape, the one before


def chosen(
    rows: int | Callable[[int], int],
    emitted: Mapping[str, float],
    milliseconds: Milliseconds,
    *,
    num_steps: int,
    largest: SpeculativeConfig = TREE,
    telling: float = 0.0,
) -> list[str]:
    """The shapes of so many steps of the largest and what is named beside it. telling: what steps
    take longer that tell the drafter of plain ones."""
    others = tuple(shape for shape in shapes_for(largest)[:-1] if str(shape) in emitted)
    limits = replace(limits_of(), spec=largest, other_shapes=others)
    chooser = AdaptiveShapes(limits, ready=lambda *_: limits.shapes)
    rng, names, owed = np.random.default_rng(0), [""], 0
    for step in range(num_steps):
        count = rows if isinstance(rows, int) else rows(step)
        refs = tuple(RowRef(slot, 1) for slot in range(1, count + 1))
        shape = chooser.choose(num_rows=count, features=PLAIN)
        names.append(str(shape))
        room = limits.deferred_tokens - 1 if shape.is_plain else 0
        told, owed = (owed, 0) if owed > room else (0, owed)
        owed += shape.is_plain
        plan = StepPlan(
            step=step,
            kind=StepKind.DECODE,
            features=PLAIN,
            rows=refs,
            shape=shape,
            owed=(told,) * count if told else (),
        )
        took = milliseconds(step, names[-1], names[-2]) + telling * (told > 0)
        mean = emitted[str(shape)]  # whole tokens, right on average
        counts = (int(mean) + (rng.random(count) < mean % 1)).astype(np.int32)
        result = RoundResult(num_emitted=counts, ids=np.zeros((count, 1), np.int32))
        chooser.timed(plan, took / 1e3)
        chooser.read(plan, StepResult(step=step, rounds=(result,)))
    return names[1:]


@pytest.mark.parametrize(
    ("rows", "costs", "best"), [(1, ONE_ROW, "3/4/16"), (64, MANY_ROWS, "3/4/8")]
)
def test_how_many_nodes_a_tree_has_is_chosen_by_what_they_cost(
    rows: int, costs: dict[str, float], best: str
) -> None:
    names = chosen(rows, EMITTED, lambda _, name, __: costs[name], num_steps=2000)
    assert names.count(best) > 1700, Counter(names)


def test_looking_at_what_costs_five_times_as_much_loses_little() -> None:
    """A look at a tree of 64 rows costs five plain steps."""
    names = chosen(64, FEW_ACCEPTED, lambda _, name, __: AT_64_ROWS[name], num_steps=1200)
    settled = names[200:]
    milliseconds = sum(AT_64_ROWS[name] for name in settled)
    tokens = sum(FEW_ACCEPTED[name] for name in settled)
    assert tokens / milliseconds * AT_64_ROWS["0/1/1"] > 0.98, Counter(settled)


def test_a_close_cost_that_was_mistaken_is_looked_at_again_soon() -> None:
    """When prompts have just run, plain steps seem slower than they are, and the card is cool:
    chains seem faster."""

    def at_first(step: int, name: str, before: str) -> float:
        del before
        factors = {"0/1/1": 1.25, "3/1/4": 0.82}
        return AT_64_ROWS[name] * (factors.get(name, 1.0) if step < 30 else 1.0)

    names = chosen(64, FEW_ACCEPTED, at_first, num_steps=300)
    assert names[100:].count("0/1/1") > 180, Counter(names[100:])


def test_what_is_unknown_of_fewer_rows_is_not_tried_with_many() -> None:
    """Every 200 steps new rows come in groups of 16, so that two steps have 16 and 32 of them."""

    def rows(step: int) -> int:
        return min(16 * (step % 200 + 1), 64)

    names = chosen(rows, FEW_ACCEPTED, lambda _, name, __: AT_64_ROWS[name], num_steps=2000)
    later = names[400:]
    assert sum("/4/" in name for name in later) < 20, Counter(later)


def test_rows_that_go_to_and_fro_between_two_batch_sizes_are_decided_for() -> None:
    """Nothing is ever tried to its end there."""

    def rows(step: int) -> int:
        return 32 + step // 3 % 2

    names = chosen(rows, FEW_ACCEPTED, lambda _, name, __: AT_64_ROWS[name], num_steps=2500)
    assert names[1500:].count("0/1/1") > 900, Counter(names[1500:])


def test_a_step_after_another_program_is_no_measure_where_there_are_others() -> None:
    """Its launch is late, or its time was begun by the one before."""

    def late(step: int, name: str, before: str) -> float:
        del step
        return AT_64_ROWS[name] * (1 if name == before else 3 if name == "0/1/1" else 0.5)

    names = chosen(64, FEW_ACCEPTED, late, num_steps=1000)
    assert names[200:].count("0/1/1") > 700, Counter(names[200:])


def test_where_prompts_run_between_all_steps_those_are_the_measure() -> None:
    limits = replace(limits_of(), spec=TREE, other_shapes=shapes_for(TREE)[:-1])
    chooser = AdaptiveShapes(limits, ready=lambda *_: limits.shapes)
    refs = (RowRef(1, 1),)
    prompt = StepPlan(step=0, kind=StepKind.PREFILL, features=PLAIN)
    names = []
    for step in range(400):
        shape = chooser.choose(num_rows=1, features=PLAIN)
        names.append(str(shape))
        plan = StepPlan(step=step, kind=StepKind.DECODE, features=PLAIN, rows=refs, shape=shape)
        chooser.timed(plan, ONE_ROW[names[-1]] / 1e3)
        chooser.timed(prompt, 0.02)
        none = RoundResult(num_emitted=np.ones(1, np.int32), ids=np.zeros((1, 1), np.int32))
        chooser.read(plan, StepResult(step=step, rounds=(none,)))
    assert names[200:].count("0/1/1") > 150, Counter(names[200:])


def test_a_tree_is_not_left_for_a_part_of_it_that_costs_the_same() -> None:
    """What is seen of the whole one may be bad luck; what its part emits it emits, too."""
    accepted = {"0/1/1": 1.0, "3/1/4": 2.22, "3/4/8": 2.46, "3/4/16": 2.6}
    costs = {"0/1/1": 4.14, "3/1/4": 5.08, "3/4/8": 5.3, "3/4/16": 5.18}
    names = chosen(1, accepted, lambda _, name, __: costs[name], num_steps=3000)
    assert names[1000:].count("3/4/16") > 1850, Counter(names[1000:])


@pytest.mark.parametrize(("rows", "acceptance"), [(64, 0.3), (1, 0.6)])
def test_a_tree_is_never_much_slower_than_the_best_shape_held_fixed(
    rows: int, acceptance: float
) -> None:
    """The first steps, which try all shapes, are a smaller part of a longer run."""
    costs = simulate_trees.TreeCosts.measured()
    found = simulate_trees.cell(rows, acceptance, num_steps=6000, table=costs)
    assert found["of_best"] >= LEAST, found


def test_looks_are_rare_where_the_way_there_and_back_costs_much() -> None:
    """A step after one of another shape takes twice as long as others: seen on an H200, where a
    graph of launches is told where its memory is."""
    costs = {"0/1/1": 5.5, "3/1/4": 5.7, "3/4/16": 5.8}
    emitted = dict.fromkeys(costs, 1.0)

    def ways(switch: float) -> int:
        def milliseconds(step: int, name: str, before: str) -> float:
            del step
            return costs[name] + switch * (name != before)

        names = chosen(64, emitted, milliseconds, num_steps=4000)[500:]
        return sum(a != b for a, b in itertools.pairwise(names))

    assert ways(0.0) > 2 * ways(5.5) > 0


def test_looks_are_rare_where_telling_the_drafter_costs_much() -> None:
    """What plain steps left untold is told before a look at drafts: a part of the way there."""
    costs = {"0/1/1": 5.5, "3/1/4": 5.7, "3/4/16": 5.8}

    def looks(telling: float) -> int:
        steps = chosen(
            64,
            dict.fromkeys(costs, 1.0),
            lambda _, name, __: costs[name],
            num_steps=4000,
            telling=telling,
        )
        return sum(name != "0/1/1" for name in steps[500:])

    assert looks(0.0) > 2 * looks(11.0) > 0


# Of 32 rows on an H100, acceptance 0, and of a moment when the host was slow there: steps in a row.
AT_32_ROWS = {"0/1/1": 6.6, "3/1/4": 8.0}
NOTHING_ACCEPTED = {"0/1/1": 1.0, "3/1/4": 1.0}
SLOW_MOMENT = (11.1, 21.9, 28.9, 12.0, 8.4, 9.8)


@pytest.mark.parametrize("at", range(600, 632, 4))
def test_a_slow_moment_does_not_drive_away_from_the_best_shape(at: int) -> None:
    def cost(step: int, name: str, _: str) -> float:
        return SLOW_MOMENT[step - at] if 0 <= step - at < len(SLOW_MOMENT) else AT_32_ROWS[name]

    names = chosen(32, NOTHING_ACCEPTED, cost, num_steps=1200, largest=CHAIN)
    assert names[at:].count("3/1/4") < 30, Counter(names[at:])


def steps_until(names: list[str], wanted: str) -> int:
    """Of which eight in a row are to come."""
    return next(i for i in range(len(names)) if names[i : i + 8] == [wanted] * 8)


@pytest.mark.parametrize(("slow", "every"), [(80, 800), (150, 1000)])
def test_what_was_left_is_looked_at_again_soon(slow: int, every: int) -> None:
    """Plain steps are slow for so long that they are left, and then as they were; many times."""
    num_steps = 4000

    def cost(step: int, name: str, _: str) -> float:
        is_slow = step >= every and step % every < slow
        return 9.8 if is_slow and name == "0/1/1" else AT_32_ROWS[name]

    names = chosen(32, NOTHING_ACCEPTED, cost, num_steps=num_steps, largest=CHAIN)
    for start in range(every, num_steps, every):
        assert "3/1/4" in names[start : start + slow]  # else nothing is tested
        assert steps_until(names[start + slow : start + every], "0/1/1") < 100, start


@pytest.mark.parametrize("at", [800, 2000, 3200])
def test_a_shape_that_alone_becomes_slow_is_left_soon(at: int) -> None:
    """What its cost moves by is not the others'."""

    def cost(step: int, name: str, _: str) -> float:
        return 20.0 if step >= at and name == "3/1/4" else AT_32_ROWS[name]

    emitted = {"0/1/1": 1.0, "3/1/4": 2.0}
    names = chosen(32, emitted, cost, num_steps=at + 200, largest=CHAIN)
    assert names[:at].count("3/1/4") > 0.9 * at
    assert steps_until(names[at:], "0/1/1") < 40


def test_rows_that_go_to_and_fro_between_batches_of_other_shapes_cause_no_looks() -> None:
    costs = {8: {"0/1/1": 6.0, "3/1/4": 6.6}, 64: {"0/1/1": 7.0, "3/1/4": 16.0}}

    def rows(step: int) -> int:
        return 8 if step // 60 % 2 else 64

    def cost(step: int, name: str, _: str) -> float:
        return costs[rows(step)][name]

    names = chosen(rows, {"0/1/1": 1.0, "3/1/4": 1.6}, cost, num_steps=8000, largest=CHAIN)
    best = ["3/1/4" if rows(step) == 8 else "0/1/1" for step in range(8000)]
    assert sum(a != b for a, b in zip(names, best, strict=True)) < 120  # 24 of first looks


class PaysAlike(CostTable):
    """Of 64 rows on an H100: at acceptance 0.5 1/1/2 is worth 4% more than 3/1/4."""

    def step(self, shape: SpeculativeConfig, rows: int) -> float:
        del rows
        return {0: 7.2, 1: 7.9, 3: 10.42}[shape.num_steps]


def test_shapes_that_pay_alike_do_not_alternate_while_texts_grow() -> None:
    """One is run now, the other was looked at when texts were shorter. On that card: 29 changes in
    some 1,000 steps."""
    found = cell(64, (0.5,), num_steps=2500, table=PaysAlike((), ()))
    assert found["changes"] <= 3, found
    assert found["of_best"] > 0.98, found
