"""Rows that follow a grammar: the text equals that of a sampler without drafts, in any batch."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.engine.programs.compilation import Recipe, compile_all
from jspec.engine.programs.program_keys import programs_on_demand
from jspec.engine.programs.program_store import ProgramStore
from jspec.engine.runner import init_state
from jspec.messages.plan import StepKind
from jspec.messages.request import Request
from jspec.messages.step_options import SAMPLING, StepOption, StepOptions
from jspec.models.heads.head_params import head_params
from jspec.models.registry import table_of
from jspec.text.grammar.reasoning_first import AnyText, Mark, ReasoningFirst
from tests.speculative.engines import (
    DRAFT,
    TARGET,
    Compiled,
    Served,
    ViewRunner,
    build,
    dense_logits,
    dial_for,
    engine,
    make_request,
    mesh_of,
    plain_engine,
    plain_ids,
    serve,
    serve_view,
    spec_of,
    tiny_params,
)
from tests.speculative.every_drafter import sharded
from tests.support.fake_grammar import FakeGrammar
from tests.support.flat_limits import with_limits

END = 5


def with_grammars(compiled: Compiled) -> Compiled:
    """Add the programs that rows with a grammar need."""
    limits = with_limits(compiled.limits, vocab_size=TARGET.vocab_size)
    state = init_state(
        compiled.program,
        limits,
        shards=compiled.program.target.shard.size,
        kv_dtype=jnp.float32,
    )
    more = compile_all(
        compiled.program,
        limits,
        mesh=mesh_of(compiled.program.target.shard.size),
        params=compiled.params,
        state=state,
        keys=programs_on_demand(limits, StepOptions(frozenset({StepOption.GRAMMAR}))),
    )
    return dataclasses.replace(
        compiled, limits=limits, executables={**compiled.executables, **more}
    )


@functools.cache
def engine_of(name: str) -> Compiled:
    if name == "plain":
        return with_grammars(plain_engine())
    if name == "two_rounds":
        shape = spec_of(2, 1, 3)
        return with_grammars(build(shape, page_size=16, num_rounds=2, variants=(SAMPLING,)))
    if name == "two_shards":  # each has half of the vocabulary's logits between two programs
        target, head = tiny_params()
        params = sharded(table_of(TARGET), target, 2), sharded(head_params(DRAFT), head, 2)
        how: dict[str, Any] = {"page_size": 16, "dial": False, "variants": (SAMPLING,)}
        return with_grammars(build(spec_of(2, 1, 3), shards=2, params=params, **how))
    return with_grammars(engine((3, 2, 7), 16, options=SAMPLING))


def constrained(i: int, grammar: FakeGrammar, **sampling: Any) -> Request:
    request = make_request(i, prompt_len=9 + 3 * i, seed=100 + i, regex="by ids", **sampling)
    return dataclasses.replace(request, grammar=grammar, eos_token_ids=(END,))


def grammar_of(least: int = 4, most: int = 12) -> FakeGrammar:
    return FakeGrammar(TARGET.vocab_size, END, least=least, most=most)


def greedy(request: Request) -> tuple[int, ...]:
    """Decode by dense logits and the grammar's allowed ids alone."""
    grammar: Any = request.grammar
    ids, state = list(request.prompt_ids), 0
    out: list[int] = []
    while len(out) < request.sampling.wanted_tokens and END not in out:
        allowed = grammar.allowed(state, len(out))
        if len(out) < request.sampling.min_new_tokens and allowed.sum() > 1:
            allowed = allowed & (np.arange(allowed.size) != END)
        logits = np.where(allowed, dense_logits(tuple(ids))[-1], -np.inf)
        out.append(int(logits.argmax()))
        ids.append(out[-1])
        state = grammar.next_state(state, out[-1])
    return tuple(out)


@functools.cache
def mixed() -> tuple[Request, ...]:
    """Return greedy and sampled rows with a grammar, and rows without one."""
    return (
        constrained(0, grammar_of(), temperature=0.0, max_new_tokens=20),
        make_request(1, prompt_len=12, seed=7, temperature=1.0, max_new_tokens=24),
        constrained(2, grammar_of(1, 30), temperature=1.0, max_new_tokens=16),
        make_request(3, prompt_len=5, seed=8, temperature=0.0, max_new_tokens=9),
        constrained(
            4,
            grammar_of(2, 9),
            temperature=0.8,
            top_p=0.9,
            frequency_penalty=0.5,
            max_new_tokens=20,
        ),
        constrained(5, grammar_of(0, 6), temperature=0.0, min_new_tokens=10, max_new_tokens=20),
    )


@functools.cache
def expected() -> tuple[tuple[int, ...], ...]:
    """Decode each alone, plain, without overlap."""
    alone = functools.partial(serve, engine_of("plain"), overlap_depth=0)
    return tuple(alone([request]).ids[0] for request in mixed())


def test_plain_decoding_takes_the_best_that_is_allowed() -> None:
    for index in (0, 5):  # the greedy ones
        assert expected()[index] == greedy(mixed()[index])
    for request, ids in zip(mixed(), expected(), strict=True):
        if request.grammar is None:
            assert ids == plain_ids(request)
            continue
        grammar: Any = request.grammar
        state = 0
        for count, token_id in enumerate(ids):
            assert grammar.allowed(state, count)[token_id]
            state = grammar.next_state(state, token_id)
        assert ids[-1] == END or len(ids) == request.sampling.wanted_tokens


def test_the_end_comes_where_nothing_else_may_though_the_output_is_short() -> None:
    ids = expected()[5]
    assert len(ids) == 7 < mixed()[5].sampling.min_new_tokens
    assert ids[-1] == END
    assert END not in ids[:-1]


@pytest.mark.parametrize(
    "name",
    ["tree", *(pytest.param(n, marks=pytest.mark.slow) for n in ("two_shards", "two_rounds"))],
)
def test_speculative_equals_plain_beside_rows_without_a_grammar(name: str) -> None:
    dial = None if name == "two_shards" else dial_for(list(mixed()), list(expected()))
    served = serve(engine_of(name), list(mixed()), overlap_depth=2, chunk_size=8, dial=dial)
    assert served.ids == expected()
    if dial is not None:
        assert served.counters.num_accepted > 0
    assert served.num_leaked_pages == 0


INNER = FakeGrammar(TARGET.vocab_size, END, least=4, most=12)
# Two tokens end reasoning, or one, which a bias has the model write early.
THINKING = [bytes([65 + i % 26]) for i in range(TARGET.vocab_size)]
THINKING[7], THINKING[9], THINKING[11] = b"</th", b"ink>", b"</think>"
BIAS = {"logit_bias": ((7, 5.0), (9, 6.0), (11, 4.0))}


def reasoning(i: int, **sampling: Any) -> Request:
    request = constrained(i, INNER, max_new_tokens=40, **BIAS, **sampling)
    after = ReasoningFirst(INNER, Mark("</think>", THINKING), opens=None)
    return dataclasses.replace(request, grammar=after)


def test_a_grammar_begins_where_reasoning_ends_inside_a_tree_too() -> None:
    """The drafts are mostly right, so that the mark and its successors are verified together."""
    requests = [reasoning(i, temperature=1.0) for i in range(5)]
    alone = functools.partial(serve, engine_of("plain"), overlap_depth=0)
    texts = [alone([request]).ids[0] for request in requests]
    served = serve(engine_of("tree"), requests, dial=dial_for(requests, texts))
    assert list(served.ids) == texts
    assert served.counters.num_accepted > 0
    num_inside = 0
    for ids, accepted in zip(texts, served.accepted, strict=True):
        said = b"".join(THINKING[token_id] for token_id in ids)
        assert b"</think>" in said
        ends = [
            n
            for n in range(1, len(ids) + 1)
            if b"</think>" in b"".join(THINKING[token_id] for token_id in ids[:n])
        ]
        after, state = ids[ends[0] :], 0
        for count, token_id in enumerate(after):
            assert INNER.allowed(state, count)[token_id]
            state = INNER.next_state(state, token_id)
        # Emitted so far after each step; the mark's last id strictly inside a step.
        edges = np.cumsum([1, *(n + 1 for n in accepted)])
        num_inside += ends[0] not in edges and after != ()
    assert num_inside


def bounded(i: int, budget: int | None, **sampling: Any) -> Request:
    """One of reasoning without a grammar after it."""
    request = make_request(
        i,
        prompt_len=9 + 3 * i,
        seed=100 + i,
        temperature=i % 2,
        max_new_tokens=48,
        ignore_eos=True,
        max_thinking_tokens=budget,
        **sampling,
    )
    if budget is None:
        return request
    after = ReasoningFirst(AnyText(), Mark("</think>", THINKING), budget=budget)
    return dataclasses.replace(request, grammar=after)


@pytest.mark.parametrize("name", ["tree", pytest.param("two_rounds", marks=pytest.mark.slow)])
def test_reasoning_ends_where_its_budget_does(name: str) -> None:
    """The text is plain decoding's up to the budget, and ordinary steps write all but its end."""
    budgets = (0, 21, 30, None)
    requests = [bounded(i, budget) for i, budget in enumerate(budgets)]
    alone = functools.partial(serve, engine_of("plain"), overlap_depth=0)
    free = [alone([bounded(i, None)]).ids[0] for i in range(len(budgets))]
    texts = [alone([request]).ids[0] for request in requests]
    for budget, text, without in zip(budgets, texts, free, strict=True):
        ends = [i for i in range(len(text)) if b"</think>" in told(text[: i + 1])]
        most = len(text) if budget is None else budget
        assert text[:most] == without[:most]
        if budget is not None and b"</think>" not in told(text[:budget]):
            assert told(text).startswith(told(text[:budget]))
            assert ends[0] <= budget + 1  # one token, or the second of two
    served, view = watched(name, requests)
    assert list(served.ids) == texts
    decodes = [bool(plan.constraints) for plan, _ in view.steps if not plan.is_prefill]
    assert 0 < sum(decodes) < len(decodes) / 2
    for plan, _ in view.steps:
        assert (StepOption.GRAMMAR in plan.options) == bool(plan.constraints)


def told(ids: tuple[int, ...]) -> bytes:
    return b"".join(THINKING[token_id] for token_id in ids)


def test_a_retracted_row_goes_on_where_its_grammar_was() -> None:
    requests = [
        constrained(i, grammar_of(80, 90), temperature=1.0, max_new_tokens=100) for i in range(3)
    ]
    alone = functools.partial(serve, engine_of("plain"), overlap_depth=0)
    texts = [alone([request]).ids[0] for request in requests]
    served = serve(engine_of("tree"), requests, num_pages=12, dial=dial_for(requests, texts))
    assert served.num_retractions > 0
    assert served.counters.num_accepted > 0
    assert list(served.ids) == texts


def test_a_step_in_flight_is_read_before_the_next_tree_is_judged() -> None:
    served, view = watched("tree", [mixed()[0], mixed()[2]])
    decodes = [plan for plan, _ in view.steps if not plan.is_prefill]
    assert all(plan.constraints for plan in decodes)
    # Each step is read before the next one is dispatched.
    kinds = [event.kind.value for event in served.trace]
    assert kinds == ["dispatch", "collect"] * (len(kinds) // 2)


def test_a_batch_without_a_grammar_needs_no_program_of_them() -> None:
    served, view = watched("tree", [mixed()[1], mixed()[3]])
    assert served.ids == (expected()[1], expected()[3])
    for plan, _ in view.steps:
        assert plan.constraints == ()
        assert StepOption.GRAMMAR not in plan.options


def test_a_grammar_that_fails_ends_its_request_and_no_other() -> None:
    class Failing(FakeGrammar):
        def begin(self, *, goes_on: bool = False) -> Any:
            constraint: Any = super().begin(goes_on=goes_on)
            constraint.failed = "it grew too large"
            return constraint

    bad = constrained(9, Failing(TARGET.vocab_size, END, 4, 12), max_new_tokens=8)
    served, _ = watched("tree", [bad, mixed()[0]])
    assert served.ids == ((), expected()[0])
    assert served.num_leaked_pages == 0


def watched(name: str, requests: list[Request]) -> tuple[Served, ViewRunner]:
    compiled = engine_of(name)
    view = ViewRunner(compiled.runner(), with_limits(compiled.limits, overlap_depth=1))
    return asyncio.run(serve_view(view, requests)), view


def test_masks_are_made_while_the_device_scores() -> None:
    events: list[str] = []

    class Watched(FakeGrammar):
        def begin(self, *, goes_on: bool = False) -> Any:
            constraint: Any = super().begin(goes_on=goes_on)
            fill = constraint.fill

            def watched(tokens: Any, parents: Any, allowed: Any) -> None:
                events.append("mask" if tokens.size > 1 else "first mask")
                fill(tokens, parents, allowed)

            constraint.fill = watched
            return constraint

    compiled = engine_of("tree")
    cut = {key: watch_run(key.kind, run, events) for key, run in compiled.executables.items()}
    compiled = dataclasses.replace(compiled, executables=cut)
    request = constrained(0, Watched(TARGET.vocab_size, END, 4, 12), max_new_tokens=20)
    served = serve(compiled, [dataclasses.replace(request, seed=mixed()[0].seed)], overlap_depth=1)
    assert len(served.ids[0]) > 1
    decodes = events[events.index("propose") :]
    assert decodes == ["propose", "score", "mask", "settle"] * (len(decodes) // 4)


def watch_run(kind: StepKind, run: Any, events: list[str]) -> Any:
    def watched(*arrays: Any) -> Any:
        events.append(kind.name.lower())
        return run(*arrays)

    return watched


def test_programs_that_hand_arrays_on_are_read_from_disk_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = engine_of("tree")
    state = compiled.runner().state
    recipe = Recipe.of(compiled.program, compiled.limits, params=compiled.params, state=state)

    def structures(_: Path, *, inputs: Any, outputs: Any, **_mesh: Any) -> Any:
        return jax.tree.structure((inputs, {})), jax.tree.structure(outputs)

    monkeypatch.setattr(ProgramStore, "load", structures)
    for key, run in compiled.executables.items():
        read = recipe.load(key, tmp_path, mesh=mesh_of(1))
        assert read == (run.in_tree, run.out_tree), key
