"""A grammar after reasoning, at each node of a tree."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.messages.grammar import ENDLESS, num_words
from jspec.text.grammar.reasoning_first import AnyText, Mark, ReasoningFirst
from tests.support.fake_grammar import FakeGrammar

V, END = 40, 5
# The mark is one token (9), or three (1, 2, 3), and 4 glues something else to its end.
TOKENS = [bytes([65 + i]) for i in range(V)]
TOKENS[9], TOKENS[1], TOKENS[2], TOKENS[3], TOKENS[4] = b"</t>", b"<", b"/t", b">\n", b">x"
OPENS = 30
INNER = FakeGrammar(V, END, least=3, most=9)
EVERYTHING = set(range(64))


def grammar(opens: int | None = None, **more: Any) -> ReasoningFirst:
    return ReasoningFirst(INNER, Mark("</t>", TOKENS), opens=opens, **more)


def masks(state: object, tokens: list[int], parents: list[int]) -> list[set[int]]:
    allowed = np.zeros((len(tokens), num_words(V)), np.uint32)
    state.fill(np.array(tokens, np.int32), np.array(parents, np.int32), allowed)  # type: ignore[attr-defined]
    bits = np.unpackbits(allowed.view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in bits]


def of_inner(*ids: int) -> set[int]:
    state = INNER.begin()
    state.accept(ids)
    assert not state.failed
    return masks(state, [0], [-1])[0]


def legal(*ids: int) -> int:
    return min(of_inner(*ids) - {END})


@pytest.mark.parametrize("before", [(), (20,), (1, 1), (20, 1, 2, 20)])
def test_nodes_after_the_mark_on_their_own_path_are_masked_and_no_others(
    before: tuple[int, ...],
) -> None:
    state = grammar().begin()
    state.accept(before)
    a = legal()
    b = legal(a)
    # root - 9 - a - b, and 20 - 9; root - 1 - 2 - 3 - a; root - 20
    tokens = [0, 9, a, b, 20, 9, 1, 2, 3, a, 20]
    parents = [-1, 0, 1, 2, 0, 4, 0, 6, 7, 8, 0]
    for _ in range(2):  # and the state is unchanged
        found = masks(state, tokens, parents)
        assert found[1] == found[5] == found[8] == of_inner()
        assert found[2] == found[9] == of_inner(a)
        assert found[3] == of_inner(a, b)
        assert all(found[node] == EVERYTHING for node in (4, 6, 10))
        assert found[7] == EVERYTHING - {4}  # "</t" and ">x" would hide the x from the grammar


def test_what_is_accepted_crosses_the_mark_anywhere() -> None:
    a = legal()
    for ids in ((9, a), (20, 1, 2, 3, a), (1, 1, 2, 3, a)):
        for cut in range(len(ids) + 1):
            state = grammar().begin()
            state.accept(ids[:cut])
            state.accept(ids[cut:])
            assert not state.failed
            assert masks(state, [0], [-1])[0] == of_inner(a)
    state = grammar().begin()
    state.accept((9, min(set(range(V)) - of_inner())))
    assert "not allowed" in state.failed


def test_an_answer_may_open_its_reasoning_or_leave_it_out() -> None:
    a = legal()
    state = grammar(OPENS).begin()
    tokens, parents = [0, a, OPENS, 20, 9, a], [-1, 0, 0, 2, 3, 4]
    found = masks(state, tokens, parents)
    assert found[0] == of_inner() | {OPENS}
    assert found[1] == found[5] == of_inner(a)
    assert found[2] == found[3] == EVERYTHING
    assert found[4] == of_inner()
    state.accept((a,))
    assert masks(state, [0], [-1])[0] == of_inner(a)
    other = grammar(OPENS).begin()
    other.accept((OPENS, 20))
    assert masks(other, [0], [-1])[0] == EVERYTHING


IDS = st.sampled_from([1, 2, 3, 4, 9, 20, OPENS])  # parts of the mark, and two others


@given(
    tree=st.lists(st.tuples(IDS, st.integers(0, 8)), max_size=9),
    before=st.lists(IDS, max_size=5),
    budget=st.integers(0, 5),
    opens=st.sampled_from([None, OPENS]),
)
@settings(max_examples=150, deadline=None)
def test_a_node_gets_the_mask_of_its_path(
    tree: list[tuple[int, int]], before: list[int], budget: int, opens: int | None
) -> None:
    """By a budget, too, which every path spends for itself."""
    thinking = ReasoningFirst(AnyText(), Mark("</t>", TOKENS), opens=opens, budget=budget)
    tokens, parents = [0], [-1]
    for token_id, above in tree:
        tokens.append(token_id)
        parents.append(min(above, len(tokens) - 2))
    state = thinking.begin()
    state.accept(tuple(before))
    found = masks(state, tokens, parents)
    for node in range(len(tokens)):
        path, at = [], node
        while at:
            path.insert(0, tokens[at])
            at = parents[at]
        alone = thinking.begin()
        alone.accept((*before, *path))
        assert found[node] == masks(alone, [0], [-1])[0]
        if alone.num_free:
            assert found[node] == EVERYTHING


@given(wishes=st.lists(st.integers(0, V - 1), min_size=20, max_size=20), budget=st.integers(0, 6))
@settings(max_examples=100, deadline=None)
def test_a_budget_ends_reasoning_and_nothing_else(wishes: list[int], budget: int) -> None:
    """A writer that takes what it wishes where that is allowed."""
    state = ReasoningFirst(AnyText(), Mark("</t>", TOKENS), budget=budget).begin()
    text, num_inside = b"", 0
    for wish in wishes:
        allowed = masks(state, [0], [-1])[0]
        is_over = b"</t>" in text
        is_forced = not is_over and num_inside >= budget
        assert allowed == EVERYTHING or (is_forced and len(allowed) == 1)
        assert state.num_free == (ENDLESS if is_over else max(budget - num_inside, 0))
        token_id = wish if wish in allowed else allowed.pop()
        state.accept((token_id,))
        num_inside += not is_over
        text += TOKENS[token_id]
    if budget < 6:
        assert b"</t>" in text


def test_a_budget_goes_before_a_grammar() -> None:
    state = grammar(budget=2).begin()
    assert state.num_free == 0  # the grammar may begin at once
    state.accept((20, 20))
    assert masks(state, [0, 9, 20], [-1, 0, 0])[:2] == [{9}, of_inner()]
    state.accept((9,))
    assert masks(state, [0], [-1])[0] == of_inner()
