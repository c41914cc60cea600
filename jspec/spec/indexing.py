"""The only functions that compute a position, a slot, or a number of pages.

They are plain arithmetic, used by the host to plan and by the device to step. For committed tokens,
slot in the sequence = RoPE position = token index. Scratch (draft tokens in flight) follows right
after them:

    worked example, L = 7 committed, root t7 at position 7, S/K/N = 2/2/4
    node            0   1   2   3        (root, a1, b1, a2 under a1)
    depth           0   1   1   2
    slot            7   8   9  10        scratch_slot: L + row
    target RoPE     7   8   8   9        target_position: L + depth
    chosen token    8   9   9  10        chosen_position: L + depth + 1
    draft RoPE      -   7   7   8        draft_position: L + depth - 1

A draft model's own scratch has the K beams of each depth below S, not the N nodes. With S = 3:

    slots of pairs (token i + 1, feature i): the root is in the last committed pair
    beams at depth  1 1 2  2             slot 7 8 9 10: beam_slot, slots_before 0; draft_position
    slots of tokens: the root has its own, slot 7, RoPE 7, which the last advance wrote
    beams at depth  1 1  2  2            slot 8 9 10 11: beam_slot, slots_before 1
    draft RoPE      8 8  9  9            target_position: the draft is a language model, too
"""

from __future__ import annotations

from typing import Any

Index = Any  # an int on the host, an i32 array on the device


def scratch_slot(seq_len: Index, row: Index) -> Index:
    return seq_len + row


def target_position(seq_len: Index, depth: Index) -> Index:
    """Return the target's RoPE position of a node at `depth`; the root has depth 0."""
    return seq_len + depth


def chosen_position(seq_len: Index, depth: Index) -> Index:
    """Return the position of the token that the target chooses at a node, whose noise is used."""
    return seq_len + depth + 1


def draft_position(seq_len: Index, depth: Index) -> Index:
    """Return the draft model's RoPE position of a node's token: one less than the target's, since
    draft slot i has the pair (token i + 1, feature i)."""
    return seq_len + depth - 1


def beam_slot(depth: int, *, topk: int, slots_before: int) -> int:
    """Return the scratch slot of the first beam at `depth`, from 1. slots_before: scratch slots
    before all beams; 1 if the root has its own."""
    return slots_before + (depth - 1) * topk


def emitted_position(start: Index, row: Index) -> Index:
    """Return the position of token `row` of a drafter's input that starts at position `start`."""
    return start + row


def lagged_start(seq_len: Index, lag: Index) -> Index:
    """Return the first slot missing in a draft layer that lags by `lag`, which is its RoPE
    position. L = 7, root t7: slot 6 has t7 with lag 0, slot 4 with lag 2."""
    return seq_len - lag


def max_emitted(num_steps: int) -> int:
    """Return M, the most tokens that a verification emits: S drafts and the bonus token."""
    return num_steps + 1


def num_scratch_slots(num_draft_tokens: int, *, propose_rows: int, advance_rows: int) -> int:
    """Return the KV slots after L that a step may write: the target's N nodes or the drafter's."""
    return max(num_draft_tokens, propose_rows, advance_rows)


def num_pages(num_tokens: int, page_size: int) -> int:
    return -(-num_tokens // page_size)


def reserved_tokens(
    committed: int, *, unread_rounds: int, num_steps: int, scratch_slots: int
) -> int:
    """Return the positions that a row must own for a round with `unread_rounds` before it, each of
    which commits at most M tokens; the new round writes its scratch after them."""
    return committed + unread_rounds * max_emitted(num_steps) + scratch_slots


def bucket(value: int, buckets: tuple[int, ...]) -> int:
    """Return the smallest bucket that is at least `value`. `buckets` ascend. Raises ValueError."""
    for size in buckets:
        if value <= size:
            return size
    raise ValueError(f"no bucket holds {value}: the buckets are {buckets}")


def powers_of_two(first: int, last: int) -> tuple[int, ...]:
    """Return first, 2 * first, ... up to and including `last`, which need not be a power of two."""
    sizes = []
    size = first
    while size < last:
        sizes.append(size)
        size *= 2
    return (*sizes, last)
