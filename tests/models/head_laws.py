"""The laws of a draft head over pages, as it is served, against a reference in numpy float64.

For any head: the rows of a prompt; four chained forwards after it; the rows of a tree, each equal
to the chain along its own path; and an extension, equal to a prompt that was longer from the start.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.models.heads.feature_head import FeatureHead
from jspec.models.layer import Params
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.ops import Ops
from jspec.spec.model_spec import cache_groups
from jspec.speculative.tree import pack_bits
from tests.models.eagle3_reference import HeadReference
from tests.support.caches import empty_pools

PAGE = 4
NUM_ROWS, NUM_STEPS, EXTENDED = 9, 4, 3
TOLERANCE: dict[str, Any] = {"rtol": 2e-5, "atol": 5e-5}  # of logits up to 20
# Two nodes after the prompt, then two children of the second: rows of the tail that each sees.
# The first two are given the prompt's last two rows as tail, so that both have four.
TREE = (((1, 1, 1, 0), (1, 1, 0, 1)), ((0, 1, 1, 0), (0, 1, 0, 1)))


class PagedHead:
    """A head over pages of one row, whose programs are compiled once per kind of call."""

    def __init__(self, head: FeatureHead, params: Params, *, num_rows: int = 2 * NUM_ROWS) -> None:
        self._head, self._params = head, jax.tree.map(jnp.asarray, params)
        self._num_pages = 2 + num_rows // PAGE
        pages = np.random.default_rng(1).permutation(self._num_pages - 1) + 1
        self._table = jnp.asarray(pages[None], jnp.int32)
        fast = {"xla_backend_optimization_level": 0}  # compiling dominates the tests' cost
        self._forward = jax.jit(
            self._traced, static_argnames="queries_per_row", compiler_options=fast
        )
        self._features = jax.jit(head.features)

    def empty(self) -> Any:
        return empty_pools(
            cache_groups(self._head.spec.layer, name="draft"),
            num_pages=self._num_pages,
            page_size=PAGE,
            shards=1,
            dtype=jnp.float32,
            ops=Ops(),
        )

    def _traced(
        self, params: Any, kv: Any, tokens: Any, hidden: Any, rows: Any, **static: Any
    ) -> Any:
        carried, kv = self._head.forward(params, tokens, hidden, kv, rows, **static)
        return kv, carried, self._head.logits(params, carried)

    def fuse(self, given: Any) -> jax.Array:
        with jax.default_matmul_precision("highest"):
            return self._features(self._params, jnp.asarray(given, jnp.float32))

    def run(
        self,
        kv: Any,
        tokens: Any,
        hidden: Any,
        *,
        start: int,
        count: int | None = None,
        positions: Any = None,
        seen: Any = None,
        tail_positions: Any = None,
        is_prompt: bool = False,
    ) -> tuple[Any, np.ndarray, np.ndarray]:
        """Return (pools, fed-back features, logits) of `count` rows from slot `start` on.

        seen: rows of the tail that each query sees; else all before it.
        """
        size = len(tokens)
        rows = AttentionMetadata(
            page_table=self._table,
            prefix_lens=jnp.asarray([start], jnp.int32),
            cu_q_lens=jnp.asarray([0, size if count is None else count], jnp.int32),
            q_positions=jnp.asarray(
                start + np.arange(size) if positions is None else positions, jnp.int32
            ),
            tail_mask=None if seen is None else pack_bits(jnp.asarray(seen, bool)),
            tail_positions=None if seen is None else jnp.asarray([tail_positions], jnp.int32),
        )
        with jax.default_matmul_precision("highest"):
            kv, carried, logits = self._forward(
                self._params,
                kv,
                jnp.asarray(tokens, jnp.int32),
                jnp.asarray(hidden, jnp.float32),
                rows,
                queries_per_row=None if is_prompt else size,
            )
        return kv, np.asarray(carried)[:count], np.asarray(logits)[:count]


def check_head(
    head: FeatureHead, params: Params, reference: HeadReference, *, vocab_size: int, width: int
) -> None:
    """Check all laws of one head. width: of the features that it reads."""
    rng = np.random.default_rng(1)
    tokens = [int(token) for token in rng.integers(0, vocab_size, NUM_ROWS + EXTENDED)]
    given = rng.standard_normal((NUM_ROWS + EXTENDED, width)).astype(np.float32)
    paged = PagedHead(head, params)
    fused = np.asarray(paged.fuse(given))
    np.testing.assert_allclose(fused, reference.fuse(given), **TOLERANCE)
    whole = reference.run(tokens, reference.fuse(given))

    # the prompt, in a chunk that is longer than it
    kv, carried, logits = paged.run(
        paged.empty(), tokens, fused, start=0, count=NUM_ROWS, is_prompt=True
    )
    np.testing.assert_allclose(carried, whole[:NUM_ROWS], **TOLERANCE)
    np.testing.assert_allclose(logits, reference.logits(whole[:NUM_ROWS]), **TOLERANCE)
    check_chain(paged, kv, params, reference, tokens[:NUM_ROWS], given[:NUM_ROWS], carried)
    check_tree(paged, kv, reference, tokens[:NUM_ROWS], given[:NUM_ROWS], carried)

    # the next rows with true features, over the drafts' entries
    _, carried, logits = paged.run(kv, tokens[NUM_ROWS:], fused[NUM_ROWS:], start=NUM_ROWS)
    np.testing.assert_allclose(carried, whole[NUM_ROWS:], **TOLERANCE)
    np.testing.assert_allclose(logits, reference.logits(whole[NUM_ROWS:]), **TOLERANCE)


def check_chain(
    paged: PagedHead,
    kv: Any,
    params: Params,
    reference: HeadReference,
    tokens: list[int],
    given: np.ndarray,
    carried: np.ndarray,
) -> None:
    """Check greedy drafts after the prompt: the reference's ids, and the logits that chose them."""
    drafts, chosen_from = reference.chain(tokens, given, num_steps=NUM_STEPS + 1)
    last, position = carried[-1:], len(tokens)
    ids = np.asarray(params["draft_ids"])
    for step in range(NUM_STEPS):
        padded = np.zeros((EXTENDED, last.shape[1]), np.float32)
        padded[0] = last[0]
        ids_of_step = [drafts[step], *[0] * (EXTENDED - 1)]
        kv, last, logits = paged.run(kv, ids_of_step, padded, start=position + step, count=1)
        np.testing.assert_allclose(logits[0], chosen_from[step + 1], **TOLERANCE)
        assert int(ids[int(logits[0].argmax())]) == drafts[step + 1]


def check_tree(
    paged: PagedHead,
    kv: Any,
    reference: HeadReference,
    tokens: list[int],
    given: np.ndarray,
    carried: np.ndarray,
) -> None:
    """Check two nodes, then two children of the second."""
    first, second = [3, 5], [7, 11]
    length, prompt = len(tokens), reference.fuse(given)
    hidden = np.repeat(carried[-1:], 2, axis=0)
    kv, outs, logits = paged.run(
        kv,
        first,
        hidden,
        start=length,
        positions=[length] * 2,
        seen=TREE[0],
        tail_positions=[length - 2, length - 1, length, length],
    )
    at = reference.run(tokens, prompt)[-1:]
    for i, token in enumerate(first):
        expected = reference.run([*tokens, token], np.vstack([prompt, at]))[-1:]
        np.testing.assert_allclose(outs[i : i + 1], expected, **TOLERANCE)
        np.testing.assert_allclose(logits[i : i + 1], reference.logits(expected), **TOLERANCE)
    _, outs, logits = paged.run(
        kv,
        second,
        np.repeat(outs[1:], 2, axis=0),
        start=length + 2,
        positions=[length + 1] * 2,
        seen=TREE[1],
        tail_positions=[length] * 2 + [length + 1] * 2,
    )
    path = np.vstack([prompt, at, expected])
    for i, token in enumerate(second):
        leaf = reference.run([*tokens, first[1], token], path)[-1:]
        np.testing.assert_allclose(outs[i : i + 1], leaf, **TOLERANCE)
        np.testing.assert_allclose(logits[i : i + 1], reference.logits(leaf), **TOLERANCE)
