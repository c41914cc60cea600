"""What a drafter is: it proposes a tree, is told what became of it, and keeps what it likes.

    propose   state and caches -> DraftTree, and the caches with scratch rows after L
    advance   what was emitted, with the target's features -> caches and state for the next propose

`advance` is one call for the chunk of a prompt, for what a verification emitted, and for a row
that is resumed. It is given tokens where they stand; a drafter that pairs a feature with another
token than its own does that shifting itself.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from jspec.config import drafting
from jspec.config.drafting import Drafting
from jspec.config.limits import SpeculativeConfig
from jspec.device.batch import DraftTree, Features, SharedPrefixes, Verified
from jspec.device.pytree import pytree, static
from jspec.device.state import SamplingRows
from jspec.models.params import ParamTable
from jspec.pallas_kernels.attention.rows import AttentionRows, QueryIndex, index_queries
from jspec.spec import indexing
from jspec.spec.cache_groups import CacheGroup
from jspec.speculative.target import KVPool, Params
from jspec.speculative.tree import root_only


@pytree
class RowsInStep:
    """The rows of a decode step, gathered from the state: everything propose may look at."""

    root_ids: jax.Array  # i32[B]
    seq_lens: jax.Array  # i32[B], L
    page_table: jax.Array  # i32[B, P], of the full space
    sampling: SamplingRows
    window_tables: dict[int, jax.Array] = dataclasses.field(default_factory=dict)  # i32[B, P] each
    shared: SharedPrefixes | None = None  # what some of them begin with


@pytree
class Emitted:
    """Tokens that became part of their rows: what `advance` is told.

    Row r's tokens stand at positions p, p + 1, ... (p = rows.prefix_lens[r]), and exactly one more
    id, next_ids[r], is known after its last token.

    In:  the worked example, L = 7 and root t7: two rows, of which the first accepted a1 a2 with
         bonus y (path 0 1 3), the second b1 with bonus z (path 0 2); M = 3
    Out: token_ids   t7 a1 a2 | t7 b1  .     the old root, then the accepted drafts
         positions    7  8  9 |  7  8  .     rows.q_positions; p = 7
         features    n0 n1 n3 | n0 n2  .     of the node that holds the token
         next_ids           y |     z        the bonus token: the next root
         last               2 |     4        index in T of each row's last token
         following   a1 a2  y | b1  z  .     following_ids
    Of a prompt's chunk t0 t1 t2 with t3 after it, next_ids is t3: the next prompt token, or the
    sampled root. `.` is padding, outside cu_q_lens.
    """

    token_ids: jax.Array  # i32[T]
    features: Features  # [T, .], the target's at these tokens
    next_ids: jax.Array  # i32[R]
    rows: AttentionRows  # where the tokens stand
    last: jax.Array  # i32[R]
    is_first: jax.Array  # bool[R], nothing of the row's tenancy came before: state starts anew
    sampling: SamplingRows  # [R]
    queries_per_row: int | None = static()  # None: packed chunks; else T = R * queries_per_row
    is_chain: bool = static(default=False)  # a verified chain: its drafts lie where they stand


def index_emitted(emitted: Emitted) -> QueryIndex:
    """Which row each of the T tokens belongs to, and its place there."""
    return index_queries(
        emitted.rows.cu_q_lens,
        emitted.token_ids.shape[0],
        queries_per_row=emitted.queries_per_row,
    )


def following_ids(emitted: Emitted) -> Int[Array, "T"]:
    """The id after each token: for drafters that pair feature i with token i + 1.

    In:  two chunks [3 4 5][8 9], next_ids [6, 7]
    Out: [4 5 6][9 7]
    """
    row_idx = index_emitted(emitted).row_idx
    is_last = jnp.arange(emitted.token_ids.shape[0]) == jnp.take(emitted.last, row_idx, mode="clip")
    after = jnp.take(emitted.next_ids, row_idx, mode="clip")
    return jnp.where(is_last, after, jnp.roll(emitted.token_ids, -1))


def next_positions(emitted: Emitted) -> Int[Array, "R"]:
    """Position of `next_ids` in each row."""
    cu_q_lens = emitted.rows.cu_q_lens
    return emitted.rows.prefix_lens + cu_q_lens[1:] - cu_q_lens[:-1]


@pytree
class TokenRows:
    """Tokens where they stand, for a drafter whose rows are tokens; laid out as Emitted's are."""

    token_ids: jax.Array  # i32[T]
    rows: AttentionRows
    last: jax.Array  # i32[R], index in T of each row's last token
    queries_per_row: int | None = static()


def with_next_ids(emitted: Emitted) -> TokenRows:
    """The emitted tokens of each row and the one after them: T + R tokens.

    In:  the worked example of Emitted: t7 a1 a2 with y after, t7 b1 with z after; M = 3
    Out: token_ids   t7 a1 a2  y | t7 b1  z  .     M + 1 a row
         positions    7  8  9 10 |  7  8  9  .     the next root stands where L' will be
         last                  3 |        6
    Of two packed chunks [3 4 5][8 9] with 6 and 7 after them: [3 4 5 6][8 9 7], last [3, 6].
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
        rows=AttentionRows(
            page_table=emitted.rows.page_table,
            window_tables=emitted.rows.window_tables,
            prefix_lens=emitted.rows.prefix_lens,
            cu_q_lens=grown,
            q_positions=positions,
        ),
        last=last,
        queries_per_row=wider,
    )


def last_two(emitted: Emitted) -> TokenRows:
    """Of each row that verified a chain the last emitted token, and the one after it.

    The rows before hold what the drafter wrote when it proposed: the same tokens at the same
    places. It proposed nothing after the chain's last token, whose row is missing. (Under simulated
    acceptance other tokens are emitted than were drafted: there only times are of use.)

    In:  a chain of S = 2, L = 7: one row accepts a1 a2 with bonus y, another none with bonus z
    Out: token_ids a2 y | t7 z, positions 9 10 | 7 8, last [1, 3]; t7 a1 of the first are there
    """
    num_rows = emitted.next_ids.shape[0]
    own = jnp.take(emitted.token_ids, emitted.last, mode="clip")
    start = next_positions(emitted) - 1
    place = jnp.arange(2, dtype=jnp.int32)
    every_row = jnp.arange(num_rows + 1, dtype=jnp.int32)
    return TokenRows(
        token_ids=jnp.stack((own, emitted.next_ids), axis=1).reshape(-1),
        rows=AttentionRows(
            page_table=emitted.rows.page_table,
            window_tables=emitted.rows.window_tables,
            prefix_lens=start,
            cu_q_lens=2 * every_row,
            q_positions=indexing.emitted_position(start[:, None], place).reshape(-1),
        ),
        last=2 * every_row[:-1] + 1,
        queries_per_row=2,
    )


def emitted_by(verified: Verified, rows: RowsInStep, *, is_chain: bool = False) -> Emitted:
    """What a verification emitted, M tokens a row; those after num_accepted are padding."""
    batch, most = verified.emitted_ids.shape
    row = jnp.arange(most, dtype=jnp.int32)
    first = jnp.arange(batch, dtype=jnp.int32) * most
    positions = indexing.emitted_position(rows.seq_lens[:, None], row)
    tokens = jnp.concatenate((rows.root_ids[:, None], verified.emitted_ids[:, :-1]), axis=1)
    return Emitted(
        token_ids=tokens.reshape(-1),
        features=jax.tree.map(lambda x: x.reshape(batch * most, -1), verified.features),
        next_ids=verified.bonus_ids,
        rows=AttentionRows(
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
    """[0, l0, l0 + l1, ...]"""
    return jnp.concatenate((jnp.zeros((1,), jnp.int32), jnp.cumsum(lens, dtype=jnp.int32)))


@dataclass(frozen=True, slots=True)
class Needs:
    """What of the target's features a drafter reads; the rest is neither gathered nor kept.

    hidden: the last hidden after the final norm. aux_layer_ids: the residual at the input of these
    layers; the target must have been made with the same.
    """

    hidden: bool = False
    aux_layer_ids: tuple[int, ...] = ()


class Drafter(Protocol):
    """A way of drafting: data about itself, and pure functions that are traced inside the step."""

    @property
    def drafting(self) -> Drafting:
        """The host's half of the declaration: lookahead and write extents."""
        ...

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """What it keeps for each token, beside the target's."""
        ...

    @property
    def table(self) -> ParamTable:
        """Its weights; params that no table declares are the same on every device."""
        ...

    @property
    def needs(self) -> Needs:
        """What of the target's features `advance` is to be given."""
        ...

    def init_state(self, num_slots: int, *, context_length: int, dtype: DTypeLike) -> Any:
        """A pytree with one row per slot, the dummy slot 0 included."""
        ...

    def of_shape(self, spec: SpeculativeConfig) -> Drafter:
        """The same, proposing trees of a shape no larger, from the state that this one keeps."""
        ...

    def propose(
        self, params: Params, caches: KVPool, state: Any, rows: RowsInStep
    ) -> tuple[KVPool, DraftTree]:
        """A tree of N nodes a row. state: the rows' own, gathered by slot."""
        ...

    def advance(
        self, params: Params, caches: KVPool, state: Any, emitted: Emitted
    ) -> tuple[KVPool, Any]:
        """Caches and state of the rows after what was emitted. state: as in propose."""
        ...


@dataclass(frozen=True, slots=True)
class NoDrafter:
    """Plain decoding: a tree of one node."""

    @property
    def drafting(self) -> Drafting:
        return drafting.NO_DRAFTING

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        return ()

    @property
    def table(self) -> ParamTable:
        return ()

    @property
    def needs(self) -> Needs:
        return Needs()

    def init_state(self, num_slots: int, *, context_length: int, dtype: DTypeLike) -> tuple[()]:
        del num_slots, context_length, dtype
        return ()

    def of_shape(self, spec: SpeculativeConfig) -> NoDrafter:
        del spec
        return self

    def propose(
        self, params: Params, caches: KVPool, state: tuple[()], rows: RowsInStep
    ) -> tuple[KVPool, DraftTree]:
        del params, state
        return caches, root_only(rows.root_ids)

    def advance(
        self, params: Params, caches: KVPool, state: tuple[()], emitted: Emitted
    ) -> tuple[KVPool, tuple[()]]:
        del params, state, emitted
        return caches, ()
