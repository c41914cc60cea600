"""A driver of one layer's cache: chunks, trees and chains, commits and new tenants of slots.

Rows are texts of random vectors. Slots and pages that no row has written are NaN, and so is all
padding; each output is compared with the float64 definition over the row's whole path.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jspec.device.batch import DraftTree
from jspec.device.state import empty_caches, empty_sampling
from jspec.layers.linear import Shard
from jspec.models.attends import attend_of
from jspec.models.layer import MIXERS, LayerSettings
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.ops import Ops
from jspec.spec.cache_entry import CacheLayout, Unit
from jspec.spec.cache_groups import CacheGroup
from jspec.spec.model_spec import Mixer
from jspec.speculative.drafter import StepBatch
from jspec.speculative.tree import ancestors, pack_bits
from jspec.speculative.verify import commit_path
from tests.layers.mixer_reference import EPS

NUM_ROWS, LENGTH, CHUNK, SIZE = 3, 48, 16, 12
NUM_NODES, NUM_PATH = 7, 5
Reference = Callable[[Any, Any, npt.NDArray[Any]], npt.NDArray[Any]]


@dataclass(frozen=True)
class Mixed:
    """A kind of layer: its spec, random weights, and its definition."""

    spec: Mixer
    params: Any
    reference: Reference

    def expected(self, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return self.reference(self.spec, self.params, x)


@functools.partial(jax.jit, static_argnames=("spec", "ops", "nodes"))
def run(
    params: Any, cache: Any, x: Any, rows: Any, *, spec: Mixer, ops: Ops, nodes: int | None
) -> tuple[Any, Any]:
    settings = LayerSettings(ops, queries_per_row=nodes)
    attend = attend_of(params, cache, rows, spec, settings)
    how: dict[str, Any] = {"spec": spec, "eps": EPS, "shard": Shard(), "ops": ops}
    out = MIXERS[type(spec)](params, x, rows.q_positions, attend, **how)
    return out, attend.cache


class Rows:
    """NUM_ROWS texts, and how much of each is cached. Row r has slot r + 1."""

    def __init__(self, mixed: Mixed, *, seed: int, page_size: int, ops: Ops | None = None) -> None:
        self.mixed, self.rng, self.page_size = mixed, np.random.default_rng(seed), page_size
        self.ops = ops or Ops()
        self.group = CacheGroup("one", 1, mixed.spec.cache_entry)
        self.pages_per_row = -(-(LENGTH + NUM_NODES) // page_size)
        layout = CacheLayout(
            page_size=page_size, dtype="float32", num_nodes=NUM_NODES, num_path=NUM_PATH
        )
        units = {Unit.PAGE: 1 + NUM_ROWS * self.pages_per_row, Unit.SLOT: 1 + NUM_ROWS}
        (empty,) = empty_caches((self.group,), layout=layout, num_units=lambda _: units[self.unit])
        self.cache = jax.tree.map(  # left there by other tenants
            lambda x: jnp.full_like(x, 1 if x.dtype == jnp.int32 else jnp.nan), empty
        )
        pages = 1 + self.rng.permutation(NUM_ROWS * self.pages_per_row)
        self.table = pages.reshape(NUM_ROWS, -1)
        self.texts = self._drawn(NUM_ROWS, LENGTH)
        self.told = [0] * NUM_ROWS

    @property
    def unit(self) -> Unit:
        return self.group.entry.unit

    def _drawn(self, *shape: int) -> npt.NDArray[Any]:
        return self.rng.normal(size=(*shape, SIZE)).astype(np.float32)

    def restart(self, row: int) -> None:
        """Give the row's slot and pages to another request."""
        self.texts[row] = self._drawn(LENGTH)
        self.told[row] = 0

    def chunk(self, lens: Sequence[int]) -> None:
        """Run the next `lens` tokens of each row, packed; a row without any is padding."""
        x = np.full((CHUNK, SIZE), np.nan, np.float32)
        ends = np.append(0, np.cumsum(lens))
        positions = np.zeros(CHUNK, np.int64)
        for row, count in enumerate(lens):
            first, told = ends[row], self.told[row]
            x[first : first + count] = self.texts[row, told : told + count]
            positions[first : first + count] = told + np.arange(count)
        out = self._run(x, self._rows(lens, ends, positions), nodes=None)
        for row, count in enumerate(lens):
            if not count:
                continue
            self.told[row] += count
            expected = self.mixed.expected(self.texts[row, : self.told[row]])
            got = out[ends[row] : ends[row + 1]]
            np.testing.assert_allclose(got, expected[len(expected) - count :], atol=3e-5, rtol=3e-4)

    def _rows(self, lens: Any, ends: Any, positions: Any) -> AttentionMetadata:
        live = np.asarray(lens) > 0
        return AttentionMetadata(
            page_table=jnp.asarray(self.table * live[:, None], jnp.int32),
            prefix_lens=jnp.asarray(np.asarray(self.told) * live, jnp.int32),
            cu_q_lens=jnp.asarray(ends, jnp.int32),
            q_positions=jnp.asarray(positions, jnp.int32),
            slots=jnp.asarray((1 + np.arange(NUM_ROWS)) * live, jnp.int32),
        )

    def _run(self, x: Any, rows: AttentionMetadata, *, nodes: int | None) -> npt.NDArray[Any]:
        with jax.default_matmul_precision("highest"):
            out, self.cache = run(
                self.mixed.params,
                self.cache,
                jnp.asarray(x),
                rows,
                spec=self.mixed.spec,
                ops=self.ops,
                nodes=nodes,
            )
        return np.asarray(out)

    def verify(self, num_nodes: int, *, topk: int, dead: Sequence[int] = ()) -> None:
        """Run a random tree of every row (a chain if topk is 1), and accept a random path of it.

        The accepted nodes have the row's next tokens, all others random ones. dead: rows without a
        request, which are padding.
        """
        parents = np.stack([self._parents(num_nodes, topk) for _ in range(NUM_ROWS)])
        depths = np.zeros_like(parents)
        for node in range(1, num_nodes):
            depths[:, node] = np.take_along_axis(depths, parents[:, node : node + 1], 1)[:, 0] + 1
        paths = [self._path(parents[row]) for row in range(NUM_ROWS)]
        x = self._drawn(NUM_ROWS, num_nodes)
        for row, path in enumerate(paths):
            x[row, path] = self.texts[row, self.told[row] : self.told[row] + len(path)]
        x[list(dead)] = np.nan
        live = [0 if row in dead else 1 for row in range(NUM_ROWS)]
        positions = (np.asarray(self.told) * live)[:, None] + depths
        rows = self._rows(live, np.arange(NUM_ROWS + 1) * num_nodes, positions.reshape(-1))
        if topk > 1:
            tree = DraftTree(
                tokens=jnp.asarray(parents),
                parents=jnp.asarray(parents),
                depths=jnp.asarray(depths),
            )
            mask = pack_bits(ancestors(tree, num_levels=num_nodes))
            rows = AttentionMetadata(
                **{
                    **vars(rows),
                    "tail_mask": mask.reshape(NUM_ROWS * num_nodes, -1),
                    "tail_positions": jnp.asarray(positions, jnp.int32),
                }
            )
        out = self._run(x.reshape(-1, SIZE), rows, nodes=num_nodes).reshape(NUM_ROWS, num_nodes, -1)
        for row in set(range(NUM_ROWS)) - set(dead):
            self._check_nodes(row, x[row], parents[row], out[row])
        self._commit(paths, rows, is_chain=topk == 1)
        for row in set(range(NUM_ROWS)) - set(dead):
            self.told[row] += len(paths[row])

    def _parents(self, num_nodes: int, topk: int) -> npt.NDArray[Any]:
        if topk == 1:
            return np.arange(-1, num_nodes - 1)
        return np.asarray([-1, *(int(self.rng.integers(0, n)) for n in range(1, num_nodes))])

    def _path(self, parents: npt.NDArray[Any]) -> list[int]:
        """Return the nodes from the root to a random one."""
        node, path = int(self.rng.integers(0, len(parents))), []
        while node >= 0:
            path.insert(0, node)
            node = int(parents[node])
        return path[:NUM_PATH]

    def _check_nodes(self, row: int, x: Any, parents: Any, out: Any) -> None:
        prefix = self.texts[row, : self.told[row]]
        for node in range(len(parents)):
            path, at = [], node
            while at >= 0:
                path.insert(0, at)
                at = int(parents[at])
            expected = self.mixed.expected(np.concatenate((prefix, x[path])))[-1]
            np.testing.assert_allclose(out[node], expected, atol=3e-5, rtol=3e-4)

    def _commit(self, paths: list[list[int]], rows: AttentionMetadata, *, is_chain: bool) -> None:
        node_path = np.zeros((NUM_ROWS, NUM_PATH), np.int32)
        for row, path in enumerate(paths):
            node_path[row, : len(path)] = path
        batch = StepBatch(
            root_ids=jnp.zeros(NUM_ROWS, jnp.int32),
            seq_lens=rows.prefix_lens,
            page_table=rows.page_table,
            slots=rows.slots,
            sampling=empty_sampling(NUM_ROWS, vocab_size=2),
        )
        (self.cache,) = commit_path(
            (self.cache,),
            batch,
            jnp.asarray(node_path),
            jnp.asarray([len(path) - 1 for path in paths], jnp.int32),
            ops=self.ops,
            groups=(self.group,),
            is_chain=is_chain,
        )
