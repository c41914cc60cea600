"""A drafter that proposes a whole block in one forward fits the protocol as it is.

It is DFlash's shape (block diffusion), small and random: K and V of what was emitted are made of
the target's features, the text itself never runs through the draft; a block's rows, the root and a
mask for each level, see each other both ways; and what they guess is a lattice, every candidate of
a level under every one before it, of which the tree is cut.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from jax.typing import DTypeLike

from jspec.config import drafting
from jspec.config.drafting import Algorithm
from jspec.config.limits import SpeculativeConfig
from jspec.device.batch import DraftTree
from jspec.layers.linear import Shard
from jspec.pallas_kernels.attention.api import AttentionCall, AttentionMetadata
from jspec.pallas_kernels.ops import Ops
from jspec.spec import indexing
from jspec.spec.cache_entry import KV
from jspec.spec.cache_groups import CacheGroup
from jspec.speculative.beams import grow_from_lattice
from jspec.speculative.candidates import Ranking, rank_candidates
from jspec.speculative.drafter import Emitted, Needs, StepBatch
from jspec.speculative.target import KVPool, Params
from jspec.speculative.tree import pack_bits
from tests.speculative.drafter_rows import Programs, Texts, random_history, refilled
from tests.speculative.engines import TARGET, build, make_request, plain_ids, serve, tiny_params
from tests.speculative.every_drafter import Kind

H, G, D = 4, 2, 16  # heads, kv heads, their width
AUX = (0, 1)  # captures of the target
WIDTH = len(AUX) * TARGET.hidden_size
SCALE = D**-0.5
# A row of its cache is a feature: at position i nothing later counts. S + 1 scratch slots, the root
# and S masks; as many tokens emitted.
BLOCKS = Algorithm(
    name="BLOCKS",
    propose_slots=drafting.emitted,
    advance_slots=drafting.emitted,
    num_candidates=drafting.expanded,
)


@dataclass(frozen=True, slots=True)
class BlockDrafter:
    draft_shape: SpeculativeConfig
    ops: Ops

    algorithm = BLOCKS
    table = ()
    cache_groups = (CacheGroup("block", 1, KV(G, D, D)),)
    needs = Needs(aux_layer_ids=AUX)

    def init_state(self, num_slots: int, *, context_length: int, dtype: DTypeLike) -> tuple[()]:
        del num_slots, context_length, dtype
        return ()

    def of_shape(self, draft_shape: SpeculativeConfig) -> BlockDrafter:
        return replace(self, draft_shape=draft_shape)

    def advance(
        self, params: Params, caches: KVPool, state: tuple[()], emitted: Emitted
    ) -> tuple[KVPool, tuple[()]]:
        """Two products a token: no layer is run."""
        context = emitted.features.aux_hidden @ params["fc"]
        k, v = (split(context @ params[name], G) for name in ("k", "v"))
        pool = self.ops.write_kv(
            k, v, caches[0], emitted.rows, queries_per_row=emitted.queries_per_row
        )
        return (pool,), state

    def propose(
        self, params: Params, caches: KVPool, state: tuple[()], rows: StepBatch
    ) -> tuple[KVPool, DraftTree]:
        """One forward over [B, 1 + S] rows, then the lattice."""
        del state
        batch, block = rows.root_ids.shape[0], 1 + self.draft_shape.num_steps
        root = jnp.take(params["embed"], rows.root_ids, axis=0, mode="clip")[:, None]
        masks = jnp.broadcast_to(params["masks"], (batch, *params["masks"].shape))
        x = jnp.concatenate((root, masks[:, : block - 1]), axis=1).reshape(batch * block, -1)
        place = jnp.arange(block, dtype=jnp.int32)
        positions = rows.seq_lens[:, None] + place
        all_of_it = jnp.ones((batch * block, block), bool)
        out, pool = self.ops.attend(
            split(x @ params["q"], H),
            split(x @ params["k"], G),
            split(x @ params["v"], G),
            caches[0],
            AttentionMetadata(
                page_table=rows.page_table,
                window_tables=rows.window_tables,
                prefix_lens=rows.seq_lens,
                cu_q_lens=jnp.arange(batch + 1, dtype=jnp.int32) * block,
                q_positions=positions.reshape(-1),
                tail_mask=pack_bits(all_of_it),
                tail_positions=positions,
                shared=rows.shared,
            ),
            AttentionCall(queries_per_row=block, scale=SCALE),
        )
        hidden = (x + out.reshape(batch * block, H * D) @ params["out"]).reshape(batch, block, -1)
        ids, terms = rank_candidates(
            hidden[:, 1:] @ params["head"],
            jnp.arange(TARGET.vocab_size, dtype=jnp.int32),
            rows.sampling,
            positions=indexing.chosen_position(rows.seq_lens[:, None], place[None, :-1]),
            ranking=Ranking(self.draft_shape.topk),
            shard=Shard(),
            ops=self.ops,
        )
        return (pool,), grow_from_lattice(rows.root_ids, ids, terms, draft_shape=self.draft_shape)


def split(x: jax.Array, heads: int) -> jax.Array:
    return x.reshape(x.shape[0], heads, D)


@functools.cache
def draft_params() -> Params:
    rng, E, V = np.random.default_rng(5), TARGET.hidden_size, TARGET.vocab_size
    sizes = {"fc": (WIDTH, E), "q": (E, H * D), "k": (E, G * D), "v": (E, G * D)}
    sizes |= {"out": (H * D, E), "head": (E, V), "embed": (V, E), "masks": (5, E)}
    return {
        name: jnp.asarray(rng.standard_normal(size) * size[0] ** -0.5, jnp.float32)
        for name, size in sizes.items()
    }


@dataclass(frozen=True, slots=True)
class Dense:
    """The same in float64, without a cache: what may follow depends on the depth alone."""

    num_steps: int

    def log_probs(
        self, tokens: list[int], features: npt.NDArray[Any], path: list[int]
    ) -> npt.NDArray[Any]:
        p = {name: np.asarray(value, np.float64) for name, value in draft_params().items()}
        x = np.vstack((p["embed"][tokens[-1:]], p["masks"]))[: 1 + self.num_steps]
        rows = np.vstack((features.astype(np.float64) @ p["fc"], x))
        k, v = (np.repeat((rows @ p[n]).reshape(-1, G, D), H // G, axis=1) for n in ("k", "v"))
        scores = np.einsum("qhd,khd->hqk", (x @ p["q"]).reshape(-1, H, D), k) * SCALE
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", weights, v).reshape(len(x), -1)
        logits = ((x + mixed @ p["out"]) @ p["head"])[1 + len(path)]
        logits -= logits.max()
        return logits - np.log(np.exp(logits).sum())


BLOCK = Kind(
    name="block",
    algorithm=BLOCKS,
    make=lambda spec, ops, _: BlockDrafter(spec, ops),
    params=draft_params,
    guesses=None,
    always_right=lambda _: {},
    aux_layer_ids=AUX,
)
SHAPES = [(4, 1, 5), (3, 3, 12)]


@pytest.mark.parametrize("shape", SHAPES)
def test_guesses_and_caches_are_those_of_a_dense_forward(shape: tuple[int, int, int]) -> None:
    """After chunks of any length and verifications that accept any number; what a verification
    left is what a prompt of the same text leaves."""
    rng = np.random.default_rng(shape[0])
    kind = replace(BLOCK, guesses=functools.partial(Dense, shape[0]))
    texts = Texts(kind, shape[:2], seed=3, programs=Programs(kind, shape[:2]))
    random_history(texts, rng)
    assert texts.check_guesses() == 3 * (shape[1] + (shape[0] - 1) * shape[1] ** 2)
    fresh = refilled(texts)
    for row in range(3):
        for ours, anew in zip(texts.cached(row), fresh.cached(row), strict=True):
            assert len(ours) == texts.told[row]
            np.testing.assert_allclose(ours, anew, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_the_text_is_that_of_plain_decoding() -> None:
    shape = SHAPES[1]
    compiled = build(
        BLOCK.spec(shape),
        page_size=4,
        params=(tiny_params()[0], draft_params()),
        make=lambda ops, shard: BLOCK.make(BLOCK.spec(shape), ops, shard),
        aux_layer_ids=AUX,
    )
    requests = [
        make_request(
            i,
            prompt_len=3 + 8 * i,
            seed=60 + i,
            temperature=0.8 * (i % 2),
            max_new_tokens=24,
            ignore_eos=True,
        )
        for i in range(3)
    ]
    for chunk_size, overlap_depth in ((8, 2), (32, 0)):
        served = serve(compiled, requests, chunk_size=chunk_size, overlap_depth=overlap_depth)
        assert served.ids == tuple(plain_ids(request) for request in requests)
        assert served.num_leaked_pages == 0
        assert served.counters.num_proposed > 0
