"""NGRAM: lookup drafting from the row's own ids, or from a corpus, without model or cache.

The draft is what follows the longest suffix of a row's ids (the root is last) that also occurs
earlier in the row, at its latest occurrence; with K > 1 the K best occurrences become branches. A
row without a match may use a corpus, else token 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jspec.config.drafting import Algorithm
from jspec.config.limits import SpeculativeConfig
from jspec.device.pytree import pytree
from jspec.models.files.stored.param_reads import Place
from jspec.models.params import ParamTable
from jspec.spec.cache_groups import CacheGroup
from jspec.speculative.drafter import (
    Emitted,
    LevelDrafter,
    Needs,
    StepBatch,
    index_emitted,
    next_positions,
)
from jspec.speculative.drafters.corpus import read_corpus
from jspec.speculative.drafters.source import DraftRequest, DraftSource, made
from jspec.speculative.target import KVPool, Params
from jspec.speculative.tree import Level, merge_paths

# Sentinels that equal no token id: an unwritten place of a history, a suffix's places before the
# row's start, and places outside an array in a shifted window.
UNKNOWN, BEFORE_START, OUTSIDE = -1, -2, -3
UNMATCHED = -1e4  # path score of a branch without a match, below those of all others


@pytree
class NgramState:
    """The ids of each row, by slot, or by row once gathered."""

    history: jax.Array  # i32[., context], the id at each position up to the root's


@pytree
class Branches:
    """K continuations of each row, best first; those without a match are last, all token 0."""

    tokens: jax.Array  # i32[B, K, S]
    lengths: jax.Array  # i32[B, K], tokens that matched before each; 0 without a match

    @property
    def is_match(self) -> Bool[Array, "B K"]:
        return self.lengths > 0


@dataclass(frozen=True, slots=True)
class NgramDrafter(LevelDrafter):
    """Lookup drafting. params: {}, or the result of `sort_corpus` with the same max_match."""

    draft_shape: SpeculativeConfig
    min_match: int = 1  # suffix tokens that must match
    max_match: int = 12  # suffix tokens that are compared

    algorithm: ClassVar[Algorithm] = Algorithm.NGRAM
    cache_groups: ClassVar[tuple[CacheGroup, ...]] = ()
    table: ClassVar[ParamTable] = ()
    needs: ClassVar[Needs] = Needs()

    def init_state(self, num_slots: int, *, context_length: int, dtype: DTypeLike) -> NgramState:
        del dtype
        return NgramState(history=jnp.full((num_slots, context_length), UNKNOWN, jnp.int32))

    def of_shape(self, draft_shape: SpeculativeConfig) -> NgramDrafter:
        return replace(self, draft_shape=draft_shape)

    def levels(
        self, params: Params, caches: KVPool, state: NgramState, rows: StepBatch
    ) -> tuple[KVPool, tuple[Level, ...]]:
        branches = self.branches(params, state, rows)
        return caches, merge_paths((), branches.tokens, path_scores(branches))

    def branches(self, params: Params, state: NgramState, rows: StepBatch) -> Branches:
        suffix = last_ids(state.history, rows.seq_lens, count=self.max_match)
        branches = find_in_history(
            state.history,
            suffix,
            rows.seq_lens,
            draft_shape=self.draft_shape,
            min_match=self.min_match,
        )
        if params:
            other = find_in_corpus(
                params["corpus"],
                params["contexts"],
                suffix,
                draft_shape=self.draft_shape,
                min_match=self.min_match,
            )
            known = branches.is_match[:, :1]
            branches = Branches(
                tokens=jnp.where(known[:, :, None], branches.tokens, other.tokens),
                lengths=jnp.where(known, branches.lengths, other.lengths),
            )
        return branches

    def advance(
        self, params: Params, caches: KVPool, state: NgramState, emitted: Emitted
    ) -> tuple[KVPool, NgramState]:
        del params
        index = index_emitted(emitted)
        # A row that starts after a cached prefix already has the ids of the prefix.
        is_empty = emitted.is_first & (emitted.rows.prefix_lens == 0)
        history = jnp.where(is_empty[:, None], UNKNOWN, state.history)
        batch, width = history.shape
        position = jnp.where(index.valid, emitted.rows.q_positions, width)  # width: dropped
        history = history.at[index.row_idx, position].set(emitted.token_ids, mode="drop")
        every_row = jnp.arange(batch, dtype=jnp.int32)
        history = history.at[every_row, next_positions(emitted)].set(emitted.next_ids, mode="drop")
        return caches, NgramState(history=history)


def last_ids(
    history: Int[Array, "B C"], seq_lens: Int[Array, "B"], *, count: int
) -> Int[Array, "B W"]:
    """Return the last `count` ids of each row, the root first; BEFORE_START past the start.

    In:  history [5 6 7 .], L = 2, count 4
    Out: [7 6 5 BEFORE_START]
    """
    position = seq_lens[:, None] - jnp.arange(count, dtype=jnp.int32)
    ids = jnp.take_along_axis(history, jnp.maximum(position, 0), axis=1, mode="clip")
    return jnp.where((position >= 0) & (ids >= 0), ids, BEFORE_START)


def find_in_history(
    history: Int[Array, "B C"],
    suffix: Int[Array, "B W"],
    seq_lens: Int[Array, "B"],
    *,
    draft_shape: SpeculativeConfig,
    min_match: int,
) -> Branches:
    """Return the continuations of the longest matches of each row's suffix in the row itself.

    A match ends at e < L. Its continuation reaches the row's end after L - e tokens and then
    restarts at e + 1, so a repeating row is continued periodically.

    In:  ids 1 2 3 9 1 2 with root 2 at L = 5, S = 3, K = 1
    Out: 1 2 matches at e = 1: tokens [3 9 1]
    """
    width, num_steps = history.shape[1], draft_shape.num_steps
    position = jnp.arange(width, dtype=jnp.int32)
    length = match_lengths(history, suffix)
    is_match = (position < seq_lens[:, None]) & (length >= min_match)
    score = jnp.where(is_match, length * width + position, UNKNOWN)  # longest first, then latest
    tokens, lengths = [], []
    depth = jnp.arange(num_steps, dtype=jnp.int32)
    for _ in range(draft_shape.topk):
        end = jnp.argmax(score, axis=1).astype(jnp.int32)[:, None]
        best = jnp.max(score, axis=1)
        is_found = best >= 0
        period = jnp.maximum(seq_lens[:, None] - end, 1)
        at = end + 1 + depth % period
        ids = jnp.take_along_axis(history, at, axis=1, mode="clip")
        tokens.append(jnp.where(is_found[:, None] & (ids >= 0), ids, 0))
        lengths.append(jnp.where(is_found, best // width, 0))
        differs = jnp.zeros(score.shape, bool)
        for d in range(num_steps):
            inside = position + 1 + d <= seq_lens[:, None]
            differs |= inside & (shifted(history, d + 1) != ids[:, d : d + 1])
        score = jnp.where(differs, score, UNKNOWN)
    return Branches(tokens=jnp.stack(tokens, axis=1), lengths=jnp.stack(lengths, axis=1))


def match_lengths(history: Int[Array, "B C"], suffix: Int[Array, "B W"]) -> Int[Array, "B C"]:
    """Return how many ids up to and including each position equal the suffix, at most W.

    In:  history [1 2 3 9 1 2], suffix [2 1 9] (the last id first)
    Out: [0 2 0 0 0 3]
    """
    agrees = jnp.ones(history.shape, bool)
    length = jnp.zeros(history.shape, jnp.int32)
    for i in range(suffix.shape[1]):
        agrees &= shifted(history, -i) == suffix[:, i : i + 1]
        length += agrees
    return length


def shifted(history: Int[Array, "B C"], by: int) -> Int[Array, "B C"]:
    """Return history[:, p + by] at each p, OUTSIDE beyond its ends."""
    width = history.shape[1]
    if by >= 0:
        return jnp.pad(history, ((0, 0), (0, by)), constant_values=OUTSIDE)[:, by:]
    return jnp.pad(history, ((0, 0), (-by, 0)), constant_values=OUTSIDE)[:, :width]


def sort_corpus(ids: np.ndarray, *, max_match: int) -> dict[str, np.ndarray]:
    """Return a corpus's ids, i32[n], and contexts, i32[n - 1]: the places 0 to n - 2, sorted by the
    max_match ids that end there, last id first. Raises ValueError for fewer than two ids."""
    ids = np.asarray(ids, np.int32)
    if ids.ndim != 1 or ids.size < 2:
        raise ValueError(f"a corpus has shape {ids.shape}; expected at least two ids in a row")
    before = np.concatenate((np.full(max_match, UNKNOWN, np.int32), ids))
    keys = [before[max_match - i : max_match - i + ids.size - 1] for i in range(max_match)]
    return {"corpus": ids, "contexts": np.lexsort(keys[::-1]).astype(np.int32)}


def find_in_corpus(
    corpus: Int[Array, "n"],
    contexts: Int[Array, "n1"],
    suffix: Int[Array, "B W"],
    *,
    draft_shape: SpeculativeConfig,
    min_match: int,
) -> Branches:
    """Return the continuations of the longest matches of each row's suffix in the corpus: the best
    K of the K sorted contexts on either side of the suffix's insertion point."""
    size = contexts.shape[0]
    offset = jnp.arange(suffix.shape[1], dtype=jnp.int32)

    def ids_before(rank: jax.Array) -> jax.Array:
        place = jnp.take(contexts, rank, mode="clip")[..., None] - offset
        return jnp.where(place >= 0, jnp.take(corpus, place, mode="clip"), UNKNOWN)

    def halve(_: Any, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low + high) // 2
        comes_before = is_less(ids_before(middle), suffix) & (low < high)
        return jnp.where(comes_before, middle + 1, low), jnp.where(comes_before, high, middle)

    bounds = jnp.zeros(suffix.shape[:1], jnp.int32), jnp.full(suffix.shape[:1], size, jnp.int32)
    own, _ = jax.lax.fori_loop(0, size.bit_length(), halve, bounds)
    rank = own[:, None] + jnp.arange(-draft_shape.topk, draft_shape.topk, dtype=jnp.int32)
    agrees = jnp.cumprod((ids_before(rank) == suffix[:, None]).astype(jnp.int32), axis=2)
    length = jnp.where((rank >= 0) & (rank < size), jnp.sum(agrees, axis=2), 0)
    length, best = jax.lax.top_k(length, draft_shape.topk)
    rank = jnp.take_along_axis(rank, best, axis=1, mode="clip")
    place = jnp.take(contexts, rank, mode="clip")[..., None]
    after = place + 1 + jnp.arange(draft_shape.num_steps, dtype=jnp.int32)
    tokens = jnp.where(after < corpus.shape[0], jnp.take(corpus, after, mode="clip"), 0)
    length = jnp.where(length >= min_match, length, 0)
    return Branches(tokens=jnp.where(length[..., None] > 0, tokens, 0), lengths=length)


def is_less(a: Int[Array, "*b W"], b: Int[Array, "*b W"]) -> Bool[Array, "*b"]:
    first = jnp.argmax(a != b, axis=-1)[..., None]
    a, b = (jnp.take_along_axis(x, first, axis=-1, mode="clip")[..., 0] for x in (a, b))
    return a < b


def path_scores(branches: Branches) -> Float[Array, "B K S"]:
    """Return scores that put better branches and lower depths first, and no match last."""
    topk, num_steps = branches.tokens.shape[1:]
    distance = jnp.arange(topk)[:, None] + jnp.arange(num_steps)
    unmatched = jnp.where(branches.is_match, 0.0, UNMATCHED)
    return unmatched[:, :, None] - distance.astype(jnp.float32)


def ngram_source(request: DraftRequest) -> DraftSource:
    args = request.args
    longest = args.speculative_ngram_max_match_window_size
    drafter = NgramDrafter(
        args.speculative,
        min_match=args.speculative_ngram_min_match_window_size,
        max_match=longest,
    )

    if args.speculative_ngram_external_corpus_path is None:
        return DraftSource(make=made(drafter))
    ids = read_corpus(
        Path(args.speculative_ngram_external_corpus_path),
        vocab_size=request.target.vocab_size,
        max_tokens=args.speculative_ngram_external_corpus_max_tokens,
        tokenizer=request.tokenizer,
    )

    def read(target_params: Params, dtype: DTypeLike, place: Place) -> Params:
        del target_params, dtype, place
        return sort_corpus(ids, max_match=longest)

    return DraftSource(make=made(drafter), read=read)
