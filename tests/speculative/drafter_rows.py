"""A driver of any drafter: chunks, proposals and verifications of rows with given features.

Unwritten slots are NaN, and so is the initial state, so that a read of them shows. The reference is
a drafter in float64 without cache, state or slots.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from jspec.config.speculation import MAX_LOOKUP_STEPS
from jspec.device.batch import DraftTree, Features, Verified
from jspec.device.state import empty_sampling
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.ops import Ops
from jspec.speculative import drafter
from jspec.speculative.drafter import Emitted, StepBatch, emitted_by
from jspec.speculative.drafters.composite import CompositeDrafter
from jspec.speculative.tree import Level, build_tree
from tests.speculative import own_assistants
from tests.speculative.engines import TARGET
from tests.speculative.every_drafter import Kind
from tests.support.caches import empty_pools

PAGE, PAGES_PER_ROW, NUM_ROWS, CHUNK = 4, 12, 3, 12
LENGTH = PAGE * PAGES_PER_ROW
Shape = tuple[int, int]  # S and K


def whole_tree(kind: Kind, shape: Shape) -> tuple[int, int, int]:
    """Return an S/K/N whose tree has every candidate as a node."""
    num_steps, topk = shape
    nodes = 1 + kind.algorithm.num_candidates(num_steps, topk)
    if kind.guesses and kind.looks_up:  # and a lookup's paths, as long as there are nodes
        nodes += topk * MAX_LOOKUP_STEPS
    return num_steps, topk, nodes


class Programs:
    """advance and propose of a drafter, compiled at their first call."""

    def __init__(self, kind: Kind, shape: Shape, *, nodes: int | None = None) -> None:
        whole = whole_tree(kind, shape)
        self.kind, self.drafter = kind, kind.drafter((*shape, nodes or whole[2]))
        self.params = kind.params()
        self.advance = jax.jit(functools.partial(self.drafter.advance, self.params))
        self.propose = jax.jit(self._propose)

    def _propose(
        self, caches: Any, state: Any, rows: StepBatch
    ) -> tuple[Any, DraftTree, tuple[Level, ...]]:
        """Return (caches, tree, the levels of the drafter's model)."""
        kept: list[Level] = []

        def build(root_ids: Any, levels: Any, **named: Any) -> DraftTree:
            kept.extend(levels)
            return build_tree(root_ids, levels, **named)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(drafter, "build_tree", build)
            written, tree = self.drafter.propose(self.params, caches, state, rows)
        if isinstance(self.drafter, CompositeDrafter):
            _, own = self.drafter.model.levels(self.params, caches, state.model, rows)
            return written, tree, own
        return written, tree, tuple(kept)


@functools.cache
def programs_of(kind: Kind, shape: Shape) -> Programs:
    return Programs(kind, shape)


@dataclass(frozen=True)
class Candidates:
    """One row's levels, one after the other. parents: -1 for the root."""

    ids: npt.NDArray[Any]
    scores: npt.NDArray[Any]
    parents: npt.NDArray[Any]


class Texts:
    """NUM_ROWS texts with a feature per token, and how many of each the drafter has received.

    Texts for a lookup have two distinct ids, so that it finds matches.
    """

    def __init__(
        self, kind: Kind, shape: Shape, *, seed: int, programs: Programs | None = None
    ) -> None:
        rng = np.random.default_rng(seed)
        self.kind, self.shape = kind, shape
        self.told = [0] * NUM_ROWS
        self.ids = rng.integers(0, 2 if kind.looks_up else TARGET.vocab_size, (NUM_ROWS, LENGTH))
        self.programs = programs or programs_of(kind, shape)
        self.drafter = self.programs.drafter
        size = TARGET.hidden_size

        def of_width(width: int) -> jax.Array:
            return jnp.asarray(rng.normal(size=(NUM_ROWS, LENGTH, width)), jnp.float32)

        self.features = Features(
            hidden=of_width(size if self.drafter.needs.hidden else 0),
            # For a drafter that reads the target's caches, what these have of the token.
            aux_hidden=of_width(
                own_assistants.WIDTH
                if self.drafter.needs.caches
                else size * len(kind.aux_layer_ids)
            ),
        )
        pools = empty_pools(
            self.drafter.cache_groups,
            num_pages=1 + NUM_ROWS * PAGES_PER_ROW,
            page_size=PAGE,
            shards=1,
            dtype=jnp.float32,
            ops=Ops(),
        )
        self.caches = tuple(jnp.full_like(pages, jnp.nan) for pages in pools)
        state = self.drafter.init_state(NUM_ROWS, context_length=LENGTH, dtype=jnp.float32)
        self.state = jax.tree.map(  # what another tenant left there
            lambda x: jnp.full_like(x, 7 if x.dtype == jnp.int32 else jnp.nan), state
        )
        pages = 1 + rng.permutation(NUM_ROWS * PAGES_PER_ROW)
        self.table = jnp.asarray(pages.reshape(NUM_ROWS, -1), jnp.int32)
        self.sampling = dataclasses.replace(
            empty_sampling(NUM_ROWS, vocab_size=TARGET.vocab_size),
            seed=jnp.asarray([[0, 11 + r] for r in range(NUM_ROWS)], jnp.uint32),
        )

    def chunk(self, lens: list[int]) -> None:
        """Give the next `lens` tokens of each row, packed like in a prefill step; 0 for none."""
        ends = np.append(0, np.cumsum(lens))
        row, position = np.zeros(CHUNK, np.int64), np.zeros(CHUNK, np.int64)
        for r, (begin, end) in enumerate(itertools.pairwise(ends)):
            row[begin:end] = r
            position[begin:end] = self.told[r] + np.arange(end - begin)
        after = [told + n for told, n in zip(self.told, lens, strict=True)]
        starts = [told if n else 0 for told, n in zip(self.told, lens, strict=True)]
        live = [n > 0 for n in lens]
        emitted = Emitted(
            token_ids=jnp.asarray(self.ids[row, position], jnp.int32),
            features=self._features(row, position),
            next_ids=jnp.asarray(self.ids[np.arange(NUM_ROWS), after], jnp.int32),
            rows=AttentionMetadata(
                page_table=self.table * jnp.asarray(live)[:, None],  # slot 0 has page 0 alone
                prefix_lens=jnp.asarray(starts, jnp.int32),
                cu_q_lens=jnp.asarray(ends, jnp.int32),
                q_positions=jnp.asarray(position, jnp.int32),
            ),
            last=jnp.maximum(jnp.asarray(ends[1:] - 1, jnp.int32), 0),
            is_first=jnp.asarray([told == 0 for told in self.told]),
            sampling=self.sampling,
            queries_per_row=None,
        )
        self._advance(emitted, live)
        self.told = after

    def _features(self, row: Any, position: Any) -> Features:
        return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[row, position]), self.features)

    def _advance(self, emitted: Emitted, live: list[bool]) -> None:
        """Advance. In a step, rows without a token use slot 0, so their state is dropped here as
        well."""
        self.caches, state = self.programs.advance(self.caches, self.state, emitted)
        keep = jnp.asarray(live)
        self.state = jax.tree.map(
            lambda new, old: jnp.where(keep.reshape(-1, *[1] * (new.ndim - 1)), new, old),
            state,
            self.state,
        )

    def rows(self) -> StepBatch:
        return StepBatch(
            root_ids=jnp.asarray(self.ids[np.arange(NUM_ROWS), self.told], jnp.int32),
            seq_lens=jnp.asarray(self.told, jnp.int32),
            page_table=self.table,
            sampling=self.sampling,
            target_kv=self._target_kv() if self.drafter.needs.caches else (),
        )

    def _target_kv(self) -> tuple[jax.Array, ...]:
        """Return the target's caches: of committed tokens, and NaN in all other slots."""
        groups, dim, caches = own_assistants.GROUPS, own_assistants.DIM, own_assistants.CACHES
        shape = (1 + NUM_ROWS * PAGES_PER_ROW, PAGE, 2 * groups, dim)
        pools = np.full((TARGET.num_layers, *shape), np.nan, np.float32)
        values = np.asarray(self.features.aux_hidden)
        values = values.reshape(NUM_ROWS, LENGTH, len(caches), 2 * groups, dim)
        for row, told in enumerate(self.told):
            place = np.arange(told)
            pages = np.asarray(self.table)[row, place // PAGE]
            for i, cache in enumerate(caches):
                pools[cache, pages, place % PAGE] = values[row, :told, i]
        return tuple(map(jnp.asarray, pools))

    def propose(self) -> tuple[DraftTree, tuple[Level, ...]]:
        self.caches, tree, levels = self.programs.propose(self.caches, self.state, self.rows())
        return tree, levels

    def verify(self, num_accepted: list[int]) -> None:
        """Propose, then emit the text's next tokens for as many drafts, and one more."""
        self.propose()
        self._emit(num_accepted, is_chain=False)

    def accept(self, num_accepted: list[int]) -> None:
        """Propose, and let `count` tokens of the chain become the text."""
        tokens = np.asarray(self.propose()[0].tokens)
        for row, (told, count) in enumerate(zip(self.told, num_accepted, strict=True)):
            self.ids[row, told + 1 : told + 1 + count] = tokens[row, 1 : 1 + count]
        self._emit(num_accepted, is_chain=True)

    def _emit(self, num_accepted: list[int], *, is_chain: bool) -> None:
        rows, most = self.rows(), self.shape[0] + 1
        every_row = np.arange(NUM_ROWS)
        position = np.asarray(self.told)[:, None] + np.arange(most)
        emitted_ids = self.ids[every_row[:, None], position + 1]
        verified = Verified(
            emitted_ids=jnp.asarray(emitted_ids, jnp.int32),
            bonus_ids=jnp.asarray(emitted_ids[every_row, num_accepted], jnp.int32),
            num_accepted=jnp.asarray(num_accepted, jnp.int32),
            node_path=jnp.zeros((NUM_ROWS, most), jnp.int32),
            features=self._features(every_row[:, None], position),
        )
        self._advance(emitted_by(verified, rows, is_chain=is_chain), [True] * NUM_ROWS)
        self.told = [n + a + 1 for n, a in zip(self.told, num_accepted, strict=True)]

    def known(self, row: int) -> tuple[list[int], npt.NDArray[Any]]:
        """Return all tokens of a row, the root included, and its features."""
        length = self.told[row]
        both = [np.asarray(x)[row, :length] for x in jax.tree.leaves(self.features)]
        return self.ids[row, : length + 1].tolist(), np.hstack(both)

    def cached(self, row: int) -> list[npt.NDArray[Any]]:
        """Return [rows, 2G, D] of each pool: the committed slots in order."""
        found = []
        for i, pool in enumerate(self.caches):
            pages = np.asarray(pool)[np.asarray(self.table[row])]
            count = max(self.told[row] - (i if self.kind.lags else 0), 0)
            found.append(pages.reshape(-1, *pages.shape[2:])[:count])
        return found

    def check_guesses(self) -> int:
        """Check that every row's tree is float64's; return the number of candidates."""
        checked = self._check_lookup() if self.kind.looks_up else 0
        if self.kind.guesses is None:
            return checked
        _, levels = self.propose()
        for row in range(NUM_ROWS):
            ids, scores, parents = (
                np.concatenate([np.asarray(getattr(level, name))[row] for level in levels])
                for name in ("ids", "scores", "parents")
            )
            expected = self.expected(row)
            where = f"{self.kind.name}, row {row} of {self.told[row]} tokens"
            np.testing.assert_array_equal(ids, expected.ids, err_msg=where)
            np.testing.assert_array_equal(parents, expected.parents, err_msg=where)
            np.testing.assert_allclose(scores, expected.scores, atol=5e-5, rtol=0, err_msg=where)
            checked += ids.size
        return checked

    def expected(self, row: int) -> Candidates:
        """Return EAGLE-2's candidates: K after the root, then K after each of the K best of a
        level."""
        assert self.kind.guesses is not None
        (num_steps, topk) = self.shape
        guesses = self.kind.guesses(num_steps)
        tokens, features = self.known(row)
        ids: list[int] = []
        scores: list[float] = []
        parents: list[int] = []
        paths: list[list[int]] = []
        expanded = [-1]
        for _ in range(num_steps):
            first = len(ids)
            for beam in expanded:
                path = paths[beam] if beam >= 0 else []
                terms = guesses.log_probs(tokens, features, path)
                above = scores[beam] if beam >= 0 else 0.0
                for best in np.argsort(-terms, kind="stable")[:topk].tolist():
                    ids.append(best)
                    scores.append(above + float(terms[best]))
                    parents.append(beam)
                    paths.append([*path, best])
            order = np.argsort(-np.asarray(scores[first:]), kind="stable")[:topk]
            expanded = (first + order).tolist()
        return Candidates(np.asarray(ids), np.asarray(scores), np.asarray(parents))

    def _check_lookup(self) -> int:
        """Check that the best branch is that of a plain search, and that the tree has it from
        the root."""
        tree, _ = self.propose()
        ids, parents = np.asarray(tree.tokens), np.asarray(tree.parents)
        lookup = getattr(self.drafter, "lookup", self.drafter)
        checked = 0
        for row in range(NUM_ROWS):
            node, tokens = 0, self.known(row)[0]
            for token in continuation(tokens, lookup, steps=lookup.draft_shape.num_steps):
                held = np.flatnonzero((parents[row] == node) & (ids[row] == token)).tolist()
                assert held, f"row {row}: {token} is no child of node {node}"
                node = held[0]
                checked += 1
        return checked


def continuation(ids: list[int], lookup: Any, *, steps: int) -> list[int]:
    """Return what follows the latest longest match of the row's end; [] without one."""
    root = len(ids) - 1

    def length(end: int) -> int:
        agree = 0
        while agree < min(lookup.max_match, end + 1) and ids[end - agree] == ids[root - agree]:
            agree += 1
        return agree

    ends = [(length(end), end) for end in range(root) if length(end) >= lookup.min_match]
    if not ends:
        return []
    end, said = max(ends)[1], list(ids)
    for d in range(steps):
        said.append(said[end + 1 + d])
    return said[root + 1 :]


def random_history(texts: Texts, rng: np.random.Generator, *, verifications: int = 3) -> None:
    """Run chunks of random lengths, some of 0, and verifications that accept every count."""
    for _ in range(2):
        lens = rng.multinomial(rng.integers(1, CHUNK + 1), [1 / NUM_ROWS] * NUM_ROWS)
        texts.chunk(lens.tolist())
    texts.chunk([int(told == 0) for told in texts.told])
    for _ in range(verifications):
        texts.verify(rng.integers(0, texts.shape[0] + 1, NUM_ROWS).tolist())


def refilled(texts: Texts) -> Texts:
    """Return a fresh start of the same rows: prompts with all that they have become."""
    fresh = Texts(texts.kind, texts.shape, seed=0, programs=texts.programs)
    fresh.ids, fresh.features, fresh.table = texts.ids, texts.features, texts.table
    while fresh.told != texts.told:
        room, lens = CHUNK, []
        for done, told in zip(fresh.told, texts.told, strict=True):
            lens.append(min(room, told - done))
            room -= lens[-1]
        fresh.chunk(lens)
    return fresh


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Run every operation by itself: no jit, no donation, loops in Python."""
    with jax.disable_jit():
        yield
