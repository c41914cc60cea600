from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.config.limits import Algorithm, SpeculativeConfig
from jspec.config.shape_sets import shapes_for
from jspec.scheduler.shapes.shape_policy import (
    COLD_RUNS,
    COST_SAMPLES,
    ENOUGH_SAMPLES,
    MARGIN,
    SURE_SAMPLES,
    Costs,
    Survival,
    best_shape,
    does_less,
    family,
    is_part,
)

CHAIN = SpeculativeConfig(algorithm=Algorithm.EAGLE3, num_steps=3, topk=1, num_draft_tokens=4)
PLAIN, ONE, THREE = shapes_for(CHAIN)


def test_the_worked_example() -> None:
    survival = Survival(tried=[0.0] * 3, got=[0.0] * 3)
    survival.see([40, 20, 10, 30], num_steps=3, age=0)
    assert survival.expected(3) == pytest.approx(2.3)
    assert survival.expected(1) == pytest.approx(1.6)
    expected = {PLAIN: 1.0, THREE: survival.expected(3)}
    assert best_shape(PLAIN, expected=expected, costs={PLAIN: 4.14, THREE: 4.85}) == THREE


def test_a_shallow_verification_says_nothing_of_deeper_drafts() -> None:
    """But that more of them are reached."""
    survival = Survival.of(3)
    for _ in range(50):
        survival.see([0, 8], num_steps=1, age=0)
    assert survival.expected(1) > 1.95
    assert survival.expected(3) - 1 == pytest.approx(1.75 * (survival.expected(1) - 1))


def test_where_no_first_draft_is_right_nothing_is_known_of_deeper_ones() -> None:
    """So a text that becomes easy finds them as it finds the first one."""
    survival = Survival.of(3)
    for _ in range(1600):
        survival.see([1], num_steps=3, age=0)
    assert survival.expected(3) < 1.01
    for _ in range(400):
        survival.see([0, 1], num_steps=1, age=0)
    assert survival.expected(3) > 2


def test_what_is_old_counts_less() -> None:
    fresh, old = Survival.of(1), Survival.of(1)
    for survival in (fresh, old):
        for _ in range(200):
            survival.see([1, 0], num_steps=1, age=0)
    fresh.see([0, 1], num_steps=1, age=0)
    old.see([0, 1], num_steps=1, age=2000)
    assert old.expected(1) > 1.3 > 1.1 > fresh.expected(1)


def test_chains_are_one_family_and_trees_are_their_own() -> None:
    tree = SpeculativeConfig(algorithm=Algorithm.EAGLE3, num_steps=3, topk=4, num_draft_tokens=16)
    families = [family(shape) for shape in shapes_for(tree)]
    assert family(ONE) == family(THREE) == family(PLAIN)
    assert len(set(families)) == 4  # 1/4/5, 3/4/8 and 3/4/16 accept by their own nodes


def test_a_part_of_a_tree_is_the_same_tree_with_fewer_nodes() -> None:
    tree = SpeculativeConfig(algorithm=Algorithm.EAGLE3, num_steps=3, topk=4, num_draft_tokens=16)
    half = replace(tree, num_draft_tokens=8)
    assert is_part(half, of=tree)
    others = [(tree, half), (tree, tree), (half, half), (half, THREE), (ONE, THREE), (PLAIN, ONE)]
    assert not any(is_part(part, of=whole) for part, whole in others)


def test_what_a_switch_costs_is_a_mean_and_nothing_at_first() -> None:
    """Of steps after one of another shape, beyond what steps of this one take."""
    costs = Costs()
    for _ in range(COLD_RUNS + ENOUGH_SAMPLES):
        costs.see(ONE, 8, 0.005, before=ONE)
    for seconds in (0.009, 0.007, 0.012):
        assert costs.switch(8) == 0.0
        costs.see(ONE, 8, seconds, before=THREE)
    assert costs.switch(8) == pytest.approx((0.004 + 0.002 + 0.007) / 3)
    assert costs.switch(1) == 0.0
    costs.see(ONE, 8, 0.1, before=None)  # after a prompt's chunk
    assert costs.switch(8) == pytest.approx((0.004 + 0.002 + 0.007) / 3)
    assert costs.known(ONE, 8) == 0.005


def test_a_cost_is_a_median_and_unknown_at_first() -> None:
    costs = Costs()
    for cold in (0.03, 0.02):  # a program's first runs are no measure
        costs.see(ONE, 8, cold, before=ONE)
    for seconds in (0.004, 0.9):
        costs.see(ONE, 8, seconds, before=ONE)
        assert costs.known(ONE, 8) is None
    costs.see(ONE, 8, 0.005, before=ONE)
    assert costs.known(ONE, 8) == 0.005
    assert costs.known(ONE, 4) is None


def seen(costs: Costs, shape: SpeculativeConfig, *seconds: float) -> None:
    for each in seconds:
        costs.see(shape, 8, each, before=shape)


def test_of_two_looks_one_may_have_met_a_slow_moment() -> None:
    for first, second in ((0.005, 0.020), (0.020, 0.005)):
        costs = Costs()
        seen(costs, ONE, *[0.1] * COLD_RUNS, *[first] * 9)
        costs.fade(ONE, 8)
        assert costs.known(ONE, 8) == first
        seen(costs, ONE, *[second] * ENOUGH_SAMPLES)
        assert costs.known(ONE, 8) == 0.005
        seen(costs, ONE, *[second] * ENOUGH_SAMPLES)
        assert costs.known(ONE, 8) == second


def test_by_few_samples_a_shape_takes_no_longer_than_one_that_does_more() -> None:
    costs = Costs()
    for shape, seconds in ((PLAIN, 0.009), (ONE, 0.007), (THREE, 0.008)):
        seen(costs, shape, *[0.1] * COLD_RUNS, *[seconds] * (SURE_SAMPLES - 1))
    believed = {PLAIN: 0.007, ONE: 0.007, THREE: 0.008}
    assert costs.all_known((PLAIN, ONE, THREE), 8) == believed
    assert costs.all_known((PLAIN, THREE), 8) == {PLAIN: 0.008, THREE: 0.008}
    assert costs.all_known((PLAIN, THREE), 4) == {}
    seen(costs, PLAIN, 0.009)  # enough of them: it is so
    assert costs.all_known((PLAIN, ONE, THREE), 8) == believed | {PLAIN: 0.009}


def test_costs_of_other_shapes_move_with_the_one_that_is_run() -> None:
    """Rows whose texts grow have longer steps, of whatever shape. Looks and other batches do not
    tell; nor do its first steps, of which the median moves as there come more of them."""
    costs, growth = Costs(), 1e-6
    for shape, bucket in ((ONE, 8), (PLAIN, 4)):
        for _ in range(COLD_RUNS + ENOUGH_SAMPLES):
            costs.see(shape, bucket, 0.007, before=shape)
    for step in range(COLD_RUNS + COST_SAMPLES):
        costs.see(THREE, 8, 0.008 + growth * step, before=THREE, leads=True)
    assert costs.known(ONE, 8) == 0.007
    for step in range(1000):
        costs.see(THREE, 8, 0.008 + growth * step, before=THREE, leads=True)
        costs.see(THREE, 4, 0.003 + growth * step, before=THREE)
    assert costs.known(ONE, 8) == pytest.approx(0.008, abs=4e-5)
    assert costs.known(PLAIN, 4) == 0.007
    for _ in range(ENOUGH_SAMPLES):  # as it is measured now, the old ones as they would be
        costs.see(ONE, 8, 0.0081, before=ONE)
    assert costs.known(ONE, 8) == pytest.approx(0.008, abs=4e-5)
    costs.fade(ONE, 8)
    assert costs.known(ONE, 8) == pytest.approx(0.0081)


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from([PLAIN, ONE, THREE]),
            st.sampled_from([1e-4, 0.005, 0.006, 0.02, 1.0]),  # seconds
            st.integers(1, COST_SAMPLES + 3),  # steps of it in a row
            st.booleans(),  # whether it leads
            st.booleans(),  # whether another one's cost is to be measured anew
        ),
        max_size=20,
    )
)
def test_a_cost_is_never_0_and_near_what_was_measured_last(
    steps: list[tuple[SpeculativeConfig, float, int, bool, bool]],
) -> None:
    """However far another shape's cost moves."""
    costs = Costs()
    for shape, seconds, count, leads, fades in steps:
        if fades:
            costs.fade(ONE, 8)
        for _ in range(count):
            costs.see(shape, 8, seconds, before=shape, leads=leads)
        assert all(cost > 0 for cost in costs.all_known((PLAIN, ONE, THREE), 8).values())
        if count > COST_SAMPLES + COLD_RUNS:
            assert costs.known(shape, 8) == seconds


def test_what_moved_far_is_not_believed_and_measured_again() -> None:
    """The whole device was slow, or the shape that is run alone: nobody can say."""
    costs = Costs()
    seen(costs, PLAIN, *[0.0066] * (COLD_RUNS + ENOUGH_SAMPLES))
    for seconds, is_far in ((0.008, False), (0.009, False), (0.020, True)):
        for _ in range(COLD_RUNS + 2 * COST_SAMPLES):
            costs.see(THREE, 8, seconds, before=THREE, leads=True)
        assert costs.has_strayed(PLAIN, 8) is is_far
    assert costs.known(PLAIN, 8) == pytest.approx(1.25 * 0.0066)
    costs.fade(PLAIN, 8)
    seen(costs, PLAIN, 0.0066)
    assert costs.known(PLAIN, 8) == 0.0066
    assert not costs.has_strayed(PLAIN, 8)


def test_less_is_fewer_levels_candidates_and_nodes() -> None:
    tree = SpeculativeConfig(algorithm=Algorithm.EAGLE3, num_steps=3, topk=4, num_draft_tokens=16)
    half = replace(tree, num_draft_tokens=8)
    wide = replace(tree, num_steps=1, num_draft_tokens=5)
    ascending = [PLAIN, ONE, THREE, half, tree]
    for less, more in itertools.combinations(ascending, 2):
        assert does_less(less, more)
        assert not does_less(more, less)
    assert not does_less(tree, tree)
    assert not does_less(wide, THREE)
    assert not does_less(THREE, wide)


SHAPES = st.sampled_from([PLAIN, ONE, THREE])


@given(
    current=SHAPES,
    expected=st.fixed_dictionaries(
        {PLAIN: st.just(1.0), ONE: st.floats(1, 2), THREE: st.floats(1, 4)}
    ),
    costs=st.dictionaries(SHAPES, st.floats(1e-4, 1.0)),
)
def test_the_choice_is_never_worth_less_than_another_one_by_more_than_the_margin(
    current: SpeculativeConfig,
    expected: dict[SpeculativeConfig, float],
    costs: dict[SpeculativeConfig, float],
) -> None:
    found = best_shape(current, expected=expected, costs=costs)
    if not costs:
        assert found == current
        return
    assert found in costs
    worth = {shape: expected[shape] / cost for shape, cost in costs.items()}
    assert worth[found] * (1 + MARGIN) >= max(worth.values()) * (1 - 1e-9)
    if found != current and current in costs:
        assert worth[found] > worth[current]


@given(
    counts=st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4), max_size=20),
    age=st.integers(0, 10_000),
)
def test_expected_tokens_lie_between_1_and_m(counts: list[list[int]], age: int) -> None:
    survival = Survival.of(3)
    for each in counts:
        survival.see(each, num_steps=3, age=age)
    found = [survival.expected(steps) for steps in range(4)]
    assert found[0] == 1.0
    assert all(0 <= more - less <= 1 + 1e-9 for less, more in itertools.pairwise(found))
