"""The worked example of the design, run through the functions of a step.

L = 7, root t7, S/K/N = 2/2/4. Ids: t7 70, a1 10, b1 11, a2 20, b2 21, c2 22, d2 23, x 30, y 31.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.config.limits import Algorithm, SpeculativeConfig
from jspec.device.batch import DraftTree
from jspec.pallas_kernels.attention.api import index_queries
from jspec.pallas_kernels.bonus_token.reference import gather_bonus, gather_path
from jspec.pallas_kernels.compaction.reference import compact_path
from jspec.pallas_kernels.kv_write.reference import page_slots
from jspec.sampling.accept import accept_tree
from jspec.spec import indexing
from jspec.speculative.tree import Level, ancestors, build_tree, pack_bits

SPEC = SpeculativeConfig(algorithm=Algorithm.EAGLE3, num_steps=2, topk=2, num_draft_tokens=4)
L = 7
SEQ_LENS = jnp.asarray([L], jnp.int32)
T7, A1, B1, A2, B2, C2, D2, X, Y, Z = 70, 10, 11, 20, 21, 22, 23, 30, 31, 32
PAGE_SIZE = 4
TABLE = jnp.asarray([[3, 1, 2]], jnp.int32)  # slots 0-3 page 3, 4-7 page 1, 8-11 page 2


def tree() -> DraftTree:
    level1 = Level(
        ids=jnp.asarray([[A1, B1]], jnp.int32),
        scores=jnp.asarray([[-1.0, -2.0]]),
        parents=jnp.asarray([[-1, -1]], jnp.int32),
    )
    level2 = Level(
        ids=jnp.asarray([[A2, B2, C2, D2]], jnp.int32),
        scores=jnp.asarray([[-1.5, -9.0, -3.0, -4.0]]),
        parents=jnp.asarray([[0, 0, 1, 1]], jnp.int32),
    )
    return build_tree(
        jnp.asarray([T7], jnp.int32), (level1, level2), num_draft_tokens=SPEC.num_draft_tokens
    )


def test_numbers_of_the_configuration() -> None:
    assert SPEC.pool_size == 6
    assert SPEC.max_emitted == 3
    assert SPEC.num_scratch_slots == 4


def test_draft_rows() -> None:
    """Level 2: rows 0 and 1 in slots 7 and 8, both at RoPE 7; children at token position 9."""
    assert [indexing.scratch_slot(L, row) for row in (0, 1)] == [7, 8]
    assert indexing.draft_position(L, 1) == 7
    assert indexing.chosen_position(L, 0) == 8  # noise of level 1
    assert indexing.chosen_position(L, 1) == 9  # noise of level 2


def test_tree_positions_and_masks() -> None:
    built = tree()
    assert built.tokens.tolist() == [[T7, A1, B1, A2]]
    assert built.parents.tolist() == [[-1, 0, 0, 1]]
    assert built.depths.tolist() == [[0, 1, 1, 2]]
    slots = indexing.scratch_slot(SEQ_LENS[:, None], jnp.arange(SPEC.num_draft_tokens))
    assert slots.tolist() == [[7, 8, 9, 10]]
    assert indexing.target_position(SEQ_LENS[:, None], built.depths).tolist() == [[7, 8, 8, 9]]
    assert indexing.chosen_position(SEQ_LENS[:, None], built.depths).tolist() == [[8, 9, 9, 10]]
    mask = ancestors(built, num_levels=SPEC.num_steps)
    seen = [{0}, {0, 1}, {0, 2}, {0, 1, 3}]
    assert [set(np.flatnonzero(row).tolist()) for row in np.asarray(mask[0])] == seen
    assert pack_bits(mask).tolist() == [[[0b0001], [0b0011], [0b0101], [0b1011]]]


@pytest.mark.parametrize(
    ("target_ids", "path", "emitted", "moves"),
    [
        ([A1, A2, X, Y], [0, 1, 3], [A1, A2, Y], {7: 7, 8: 8, 10: 9}),
        ([B1, X, Z, Y], [0, 2, 0], [B1, Z, 0], {7: 7, 9: 8}),
        ([X, A2, A2, Y], [0, 0, 0], [X, 0, 0], {7: 7}),
    ],
)
def test_accept_compact_advance(
    target_ids: list[int], path: list[int], emitted: list[int], moves: dict[int, int]
) -> None:
    ids = jnp.asarray([target_ids], jnp.int32)
    node_path, num_accepted = accept_tree(tree(), ids, num_levels=SPEC.num_steps)
    num_emitted = len(moves)
    assert num_accepted.tolist() == [num_emitted - 1]
    assert node_path.tolist() == [path]
    ids = gather_path(ids, node_path, num_accepted)
    assert ids.tolist() == [emitted]
    assert gather_bonus(ids, num_accepted).tolist() == [emitted[num_emitted - 1]]

    # compact: every slot contains its own number; page_of is TABLE
    pages = np.zeros((4, PAGE_SIZE, 2, 1), np.float32)
    for slot in range(12):
        pages[int(TABLE[0, slot // PAGE_SIZE]), slot % PAGE_SIZE] = slot
    after = np.asarray(compact_path(jnp.asarray(pages), TABLE, SEQ_LENS, node_path, num_accepted))
    held = [int(after[int(TABLE[0, s // PAGE_SIZE]), s % PAGE_SIZE, 0, 0]) for s in range(12)]
    expected = list(range(12))
    for source, destination in moves.items():
        expected[destination] = source
    assert held == expected

    # advance: M rows at slots and RoPE positions 7, 8, 9; rows >= num_emitted go to page 0
    index = index_queries(
        jnp.asarray([0, num_emitted], jnp.int32),
        SPEC.max_emitted,
        queries_per_row=SPEC.max_emitted,
    )
    slot = indexing.emitted_position(SEQ_LENS[index.row_idx], index.within)
    assert slot.tolist() == [7, 8, 9]
    page, offset = page_slots(TABLE, index.row_idx, slot, index.valid, page_size=PAGE_SIZE)
    assert page.tolist() == [1, 2, 2][:num_emitted] + [0] * (3 - num_emitted)
    assert offset.tolist()[:num_emitted] == [3, 0, 1][:num_emitted]

    # L' and root'; the level-1 candidates after root' have the token position after it
    next_len = L + num_emitted
    assert indexing.target_position(next_len, 0) == L + num_emitted  # root' at 10 in the first case
    assert indexing.chosen_position(next_len, 0) == L + num_emitted + 1
