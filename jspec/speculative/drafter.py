"""The interface of drafters: propose a tree, then advance over what the verification emitted.

    propose   state and caches -> DraftTree, and the caches with scratch slots after L written
    advance   emitted tokens and the target's features -> caches and state for the next propose

`advance` serves prompt chunks, verified tokens and resumed rows alike. It receives each token with
the target's feature at that token; a drafter that pairs others (EAGLE) shifts them itself.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from jspec.config.drafting import Algorithm
from jspec.config.limits import SpeculativeConfig
from jspec.device.batch import DraftTree, Features, SharedPrefixes, Verified
from jspec.device.pytree import pytree, static
from jspec.device.state import SamplingBatch
from jspec.models.params import ParamTable
from jspec.pallas_kernels.attention.api import AttentionMetadata, QueryIndex, index_queries
from jspec.spec import indexing
from jspec.spec.cache_groups import CacheGroup
from jspec.speculative.target import KVPool, Params
from jspec.speculative.tree import Level, build_tree, root_only


@pytree
class StepBatch:
    """The rows of a decode step, gathered by slot: everything that propose may read."""

    root_ids: jax.Array  # i32[B]
    seq_lens: jax.Array  # i32[B], L
    page_table: jax.Array  # i32[B, P], of the full space
    sampling: SamplingBatch
    window_tables: dict[int, jax.Array] = dataclasses.field(default_factory=dict)  # i32[B, P] each
    shared: SharedPrefixes | None = None  # prefixes that several rows share
    slots: jax.Array | None = None  # i32[B], of caches by slot
    target_kv: KVPool = ()  # the target's caches, if the drafter needs them
    lora_slots: jax.Array | None = None  # i32[B], of the target's adapters


@pytree
class Emitted:
    """Tokens that became part of their rows: the input of `advance`.

    Row r's tokens are at positions p, p + 1, ... (p = rows.prefix_lens[r]). next_ids[r] is the one
    id known after its last token: the next root, or for a prompt chunk that is not final the next
    prompt token.

    In:  the worked example, L = 7 and root t7: two rows, of which the first accepted a1 a2 with
         bonus y (path 0 1 3), the second b1 with bonus z (path 0 2); M = 3
    Out: token_ids   t7 a1 a2 | t7 b1  .     the old root, then the accepted drafts
         positions    7  8  9 |  7  8  .     rows.q_positions; p = 7
         features    n0 n1 n3 | n0 n2  .     of the node that holds the token
         next_ids           y |     z        the bonus token
         last               2 |     4        index in T of each row's last token
         following   a1 a2  y | b1  z  .     following_ids
         `.` is padding, outside cu_q_lens
    """

    token_ids: jax.Array  # i32[T]
    features: Features  # [T, .], the target's features at these tokens
    next_ids: jax.Array  # i32[R]
    rows: AttentionMetadata  # positions and pages of the tokens
    last: jax.Array  # i32[R]
    is_first: jax.Array  # bool[R], first call for this row's request: reset its state
    sampling: SamplingBatch  # [R]
    queries_per_row: int | None = static()  # None: packed chunks; else T = R * queries_per_row
    is_chain: bool = static(default=False)  # a verified chain: draft KV is in its final slots
    ids_only: bool = static(default=False)  # the ids of a cached prefix, without features


def index_emitted(emitted: Emitted) -> QueryIndex:
    return index_queries(
        emitted.rows.cu_q_lens,
        emitted.token_ids.shape[0],
        queries_per_row=emitted.queries_per_row,
    )


def following_ids(emitted: Emitted) -> Int[Array, "T"]:
    """Return the id after each token, for drafters that pair feature i with token i + 1.

    In:  two chunks [3 4 5][8 9], next_ids [6, 7]
    Out: [4 5 6][9 7]
    """
    row_idx = index_emitted(emitted).row_idx
    is_last = jnp.arange(emitted.token_ids.shape[0]) == jnp.take(emitted.last, row_idx, mode="clip")
    after = jnp.take(emitted.next_ids, row_idx, mode="clip")
    return jnp.where(is_last, after, jnp.roll(emitted.token_ids, -1))


def next_positions(emitted: Emitted) -> Int[Array, "R"]:
    cu_q_lens = emitted.rows.cu_q_lens
    return emitted.rows.prefix_lens + cu_q_lens[1:] - cu_q_lens[:-1]


@pytree
class TokenRows:
    """Tokens at their own positions, laid out like Emitted, for drafters with a language model."""

    token_ids: jax.Array  # i32[T]
    rows: AttentionMetadata
    last: jax.Array  # i32[R], index in T of each row's last token
    queries_per_row: int | None = static()


def with_next_ids(emitted: Emitted) -> TokenRows:
    """Return the emitted tokens of each row and the one after them: T + R tokens.

    In:  the worked example of Emitted: t7 a1 a2 before y, t7 b1 before z; M = 3
    Out: token_ids   t7 a1 a2  y | t7 b1  z  .     M + 1 per row
         positions    7  8  9 10 |  7  8  9  .     the next root's position is L'
         last                  3 |        6
    In:  two packed chunks [3 4 5][8 9] before 6 and 7     Out: [3 4 5 6][8 9 7], last [3, 6]
    """
    cu_q_lens, per_row = emitted.rows.cu_q_lens, emitted.queries_per_row
    num_rows = cu_q_lens.shape[0] - 1
    every_row = jnp.arange(num_rows, dtype=jnp.int32)
    lens = cu_q_lens[1:] - cu_q_lens[:-1]
    grown = cu_q_lens + jnp.arange(num_rows + 1, dtype=jnp.int32)
    first, last, wider = cu_q_lens[:-1], grown[1:] - 1, None
    if per_row is not None:
        wider = per_row + 1
        first, last = every_row * per_row, every_row * wider + lens
    size = emitted.token_ids.shape[0] + num_rows
    index = index_queries(grown, size, queries_per_row=wider)

    def of_row(x: jax.Array) -> jax.Array:
        return jnp.take(x, index.row_idx, mode="clip")

    own = jnp.take(emitted.token_ids, of_row(first) + index.within, mode="clip")
    is_next = index.within == of_row(lens)
    positions = indexing.emitted_position(of_row(emitted.rows.prefix_lens), index.within)
    return TokenRows(
        token_ids=jnp.where(is_next, of_row(emitted.next_ids), own),
        rows=dataclasses.replace(emitted.rows, cu_q_lens=grown, q_positions=positions),
        last=last,
        queries_per_row=wider,
    )


def last_two(emitted: Emitted) -> TokenRows:
    """Return the last emitted token of each row that verified a chain, and the token after it:
    `propose` has written the draft KV of the earlier ones (not under simulated acceptance).

    In:  a chain of S = 2, L = 7: one row accepts a1 a2 with bonus y, another none with bonus z
    Out: token_ids a2 y | t7 z, positions 9 10 | 7 8, last [1, 3]; t7 a1 of row 0 exist already
    """
    num_rows = emitted.next_ids.shape[0]
    own = jnp.take(emitted.token_ids, emitted.last, mode="clip")
    start = next_positions(emitted) - 1
    place = jnp.arange(2, dtype=jnp.int32)
    every_row = jnp.arange(num_rows + 1, dtype=jnp.int32)
    return TokenRows(
        token_ids=jnp.stack((own, emitted.next_ids), axis=1).reshape(-1),
        rows=dataclasses.replace(
            emitted.rows,
            prefix_lens=start,
            cu_q_lens=2 * every_row,
            q_positions=indexing.emitted_position(start[:, None], place).reshape(-1),
        ),
        last=2 * every_row[:-1] + 1,
        queries_per_row=2,
    )


def emitted_by(verified: Verified, rows: StepBatch, *, is_chain: bool = False) -> Emitted:
    """Return the tokens that a verification emitted: M per row, padded after num_accepted + 1."""
    batch, most = verified.emitted_ids.shape
    row = jnp.arange(most, dtype=jnp.int32)
    first = jnp.arange(batch, dtype=jnp.int32) * most
    positions = indexing.emitted_position(rows.seq_lens[:, None], row)
    tokens = jnp.concatenate((rows.root_ids[:, None], verified.emitted_ids[:, :-1]), axis=1)
    return Emitted(
        token_ids=tokens.reshape(-1),
        features=jax.tree.map(lambda x: x.reshape(batch * most, -1), verified.features),
        next_ids=verified.bonus_ids,
        rows=AttentionMetadata(
            page_table=rows.page_table,
            window_tables=rows.window_tables,
            prefix_lens=rows.seq_lens,
            cu_q_lens=_cumulative(verified.num_accepted + 1),
            q_positions=positions.reshape(-1),
        ),
        last=first + verified.num_accepted,
        is_first=jnp.zeros((batch,), bool),
        sampling=rows.sampling,
        queries_per_row=most,
        is_chain=is_chain,
    )


def _cumulative(lens: jax.Array) -> jax.Array:
    return jnp.concatenate((jnp.zeros((1,), jnp.int32), jnp.cumsum(lens, dtype=jnp.int32)))


@dataclass(frozen=True, slots=True)
class Needs:
    """The target features that a drafter reads; the others are neither gathered nor kept."""

    hidden: bool = False  # the last hidden state, after the final norm
    # The residual at the input of these layers; the target must capture the same ones.
    aux_layer_ids: tuple[int, ...] = ()
    caches: bool = False  # the target's caches, which propose reads


class Drafter(Protocol):
    """A draft method: static properties, and pure functions that are traced inside the step.
    `state` in propose and advance is the rows' entries of `init_state`, gathered by slot."""

    @property
    def algorithm(self) -> Algorithm:
        """The host's facts about this method: name, lookahead and write extents."""
        ...

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]: ...

    @property
    def table(self) -> ParamTable: ...

    @property
    def needs(self) -> Needs: ...

    def init_state(self, num_slots: int, *, context_length: int, dtype: DTypeLike) -> Any:
        """Return a pytree with one entry per slot, including the dummy slot 0."""
        ...

    def of_shape(self, draft_shape: SpeculativeConfig) -> Drafter:
        """Return this drafter for a draft shape that is no larger, with the same state."""
        ...

    def propose(
        self, params: Params, caches: KVPool, state: Any, rows: StepBatch
    ) -> tuple[KVPool, DraftTree]:
        """Return the caches with scratch slots written, and a draft tree of N nodes per row."""
        ...

    def advance(
        self, params: Params, caches: KVPool, state: Any, emitted: Emitted
    ) -> tuple[KVPool, Any]:
        """Return caches and state after the emitted tokens."""
        ...


@runtime_checkable
class LevelDrafter(Drafter, Protocol):
    """A drafter that ranks candidates level by level; its tree has the best of all levels."""

    draft_shape: SpeculativeConfig

    def of_shape(self, draft_shape: SpeculativeConfig) -> LevelDrafter: ...

    @abstractmethod
    def levels(
        self, params: Params, caches: KVPool, state: Any, rows: StepBatch
    ) -> tuple[KVPool, tuple[Level, ...]]:
        """Return the caches and the candidates of each level. state: see `Drafter`."""

    def propose(
        self, params: Params, caches: KVPool, state: Any, rows: StepBatch
    ) -> tuple[KVPool, DraftTree]:
        caches, levels = self.levels(params, caches, state, rows)
        nodes = self.draft_shape.num_draft_tokens
        return caches, build_tree(rows.root_ids, levels, num_draft_tokens=nodes)


@dataclass(frozen=True, slots=True)
class NoDrafter:
    """Plain decoding: a tree of one node."""

    algorithm: ClassVar[Algorithm] = Algorithm.NONE
    cache_groups: ClassVar[tuple[CacheGroup, ...]] = ()
    table: ClassVar[ParamTable] = ()
    needs: ClassVar[Needs] = Needs()

    def init_state(self, num_slots: int, *, context_length: int, dtype: DTypeLike) -> tuple[()]:
        del num_slots, context_length, dtype
        return ()

    def of_shape(self, draft_shape: SpeculativeConfig) -> NoDrafter:
        del draft_shape
        return self

    def propose(
        self, params: Params, caches: KVPool, state: tuple[()], rows: StepBatch
    ) -> tuple[KVPool, DraftTree]:
        del params, state
        return caches, root_only(rows.root_ids)

    def advance(
        self, params: Params, caches: KVPool, state: tuple[()], emitted: Emitted
    ) -> tuple[KVPool, tuple[()]]:
        del params, state, emitted
        return caches, ()
