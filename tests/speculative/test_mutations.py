"""The suite notices when an index moves by one.

Each mutation shifts one index the way the field's known defects did; the check that must go red is
named beside it. A mutation that no check notices is a hole in the suite. Those of the drafters are
in test_drafter_laws.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import pytest

from jspec.messages.request import Request
from jspec.messages.step_options import StepOptions
from jspec.pallas_kernels.bonus_token import reference as bonus_token
from jspec.pallas_kernels.compaction import reference as compaction
from jspec.spec import indexing
from tests.speculative.engines import PLAIN, build, dial_for, make_request, serve, spec_of

TREE = (3, 2, 7)


def three_requests() -> list[Request]:
    return [
        make_request(i, prompt_len=5 + 6 * i, seed=40 + i, temperature=i % 2, max_new_tokens=40)
        for i in range(3)
    ]


@functools.cache
def unmutated() -> list[tuple[int, ...]]:
    """What plain decoding makes of the three requests when no index is moved."""
    with pytest.MonkeyPatch.context() as clean:
        for undo in _ORIGINALS:
            clean.setattr(undo.owner, undo.name, undo.value)
        plain = build(PLAIN, page_size=16, variants=(StepOptions(),))
        return [serve(plain, [request]).ids[0] for request in three_requests()]


def check_identity() -> None:
    """A tree of unequal rows against plain decoding, in greedy and at temperature 1."""
    requests, expected = three_requests(), unmutated()
    engine = build(spec_of(*TREE), page_size=4, variants=(StepOptions(),))
    assert list(serve(engine, requests, dial=dial_for(requests, expected)).ids) == expected


@dataclass(frozen=True)
class Original:
    owner: Any
    name: str
    value: Any


@dataclass(frozen=True)
class Mutation:
    """`owner.name` is replaced by mutate(original)."""

    title: str
    owner: Any
    name: str
    mutate: Callable[[Any], Any]
    check: Callable[[], None]

    @property
    def original(self) -> Original:
        return Original(self.owner, self.name, getattr(self.owner, self.name))


MUTATIONS = (
    Mutation(
        "bonus index",
        bonus_token,
        "gather_bonus",
        lambda f: lambda ids, num_accepted: f(ids, jnp.maximum(num_accepted - 1, 0)),
        check_identity,
    ),
    Mutation(
        "compaction source",
        compaction,
        "compact_path",
        lambda f: lambda pages, table, lens, path, n: f(pages, table, lens, path + 1, n),
        check_identity,
    ),
    Mutation(
        "noise position",
        indexing,
        "chosen_position",
        lambda f: lambda seq_len, depth: f(seq_len, depth) + 1,
        check_identity,
    ),
    Mutation(
        "scratch slot",
        compaction,
        "page_slots",
        lambda f: (
            lambda table, row, slot, valid, page_size: f(
                table, row, slot + 1, valid, page_size=page_size
            )
        ),
        check_identity,
    ),
    Mutation(
        "target RoPE position",
        indexing,
        "target_position",
        lambda f: lambda seq_len, depth: f(seq_len, depth) + depth,
        check_identity,
    ),
)
_ORIGINALS = tuple(mutation.original for mutation in MUTATIONS)
REQUIRED = {
    "bonus index",
    "compaction source",
    "noise position",
}


def test_the_list_names_what_must_never_move() -> None:
    assert {mutation.title for mutation in MUTATIONS} >= REQUIRED


def test_the_checks_pass_without_a_mutation() -> None:
    check_identity()


@pytest.mark.slow_cases("bonus index]", "compaction source]", "noise position]")
@pytest.mark.parametrize(
    "mutation",
    [
        pytest.param(m, id=m.title, marks=() if m.title in REQUIRED else pytest.mark.slow)
        for m in MUTATIONS
    ],
)
def test_a_moved_index_is_noticed(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    original = mutation.original.value
    monkeypatch.setattr(mutation.owner, mutation.name, mutation.mutate(original))
    with pytest.raises(AssertionError):
        mutation.check()
