"""Block drafters' files: read, run over pages, and compared with the libraries that wrote them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jspec.config.limits import Algorithm
from jspec.device.batch import Features
from jspec.device.state import empty_sampling
from jspec.errors import JspecError
from jspec.models.heads.block_config import load_block_config
from jspec.models.heads.block_head import BlockHead
from jspec.models.heads.dflash import block_name, load_block
from jspec.models.heads.eagle3 import load_eagle3
from jspec.models.heads.eagle3_config import load_eagle3_config
from jspec.models.heads.feature_head import FeatureHead
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.ops import Ops
from jspec.spec.model_spec import ModelSpec, uniform_decoder
from jspec.speculative.drafter import Emitted, StepBatch
from jspec.speculative.drafters.block import BlockDrafter, ParallelDrafter
from tests.models.block_reference import BlockReference
from tests.models.eagle3_reference import Eagle3Reference
from tests.speculative.engines import spec_of
from tests.support.caches import empty_pools
from tests.support.golden_arrays import arrays_of

GOLDEN = Path(__file__).parents[1] / "golden" / "blocks"
PAGE, PAGES, CHUNK = 4, 8, 8
# What the reference is told of each.
SETTINGS: dict[str, dict[str, Any]] = {
    "assistant": {"windows": (4, None), "reach": 0, "is_causal": False},
    "dflash": {"windows": (None, None)},
    "dflash_window": {"windows": (4, None), "reach": 0, "windows_from_root": True},
    "dflash_both_ways": {
        "windows": (4, None),
        "reach": 0,
        "windows_from_root": True,
        "is_causal": False,
        "from_root": True,
    },
    "dspark_vanilla": {"windows": (None, None), "from_root": True, "markov": "vanilla"},
    "dspark_gated": {"windows": (None,), "markov": "gated"},
    "dspark_rnn": {"windows": (None,), "markov": "rnn"},
    "dflash2": {
        "windows": (4, None),
        "reach": 0,
        "windows_from_root": True,
        "is_causal": False,
        "num_candidates": 7,
    },
}


@functools.cache
def golden_target() -> ModelSpec:
    return uniform_decoder(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_layers=8,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
    )


def parallel_head() -> tuple[ParallelDrafter, Any, dict[str, np.ndarray]]:
    golden = arrays_of(GOLDEN / "peagle" / "outputs.npz")
    spec = load_eagle3_config(GOLDEN / "peagle", target=golden_target())
    params = load_eagle3(GOLDEN / "peagle", spec, target_params={}, dtype=np.float32)
    shape = spec_of(golden["logits"].shape[1], spec.draft_vocab_size, 9)
    return ParallelDrafter(FeatureHead(spec, Ops()), shape), params, golden


def golden_head(name: str) -> tuple[BlockDrafter, Any, dict[str, np.ndarray]]:
    golden = arrays_of(GOLDEN / name / "outputs.npz")
    spec = load_block_config(GOLDEN / name, target=golden_target())
    lent = {"embed": {"table": golden["embed"]}}
    if "lm_head" in golden:
        lent["lm_head"] = {"kernel": golden["lm_head"].T}
    params = load_block(GOLDEN / name, spec, target_params=lent, dtype=np.float32)
    size, topk = spec.most_steps, spec.draft_vocab_size
    if spec.selector is not None:
        topk = spec.selector.num_candidates
    shape = spec_of(size, topk, 9, Algorithm.DFLASH)
    return BlockDrafter(BlockHead(spec, Ops()), shape), params, golden


class Row:
    """One row whose context is told in chunks."""

    def __init__(
        self,
        drafter: BlockDrafter | ParallelDrafter,
        params: Any,
        golden: dict[str, np.ndarray],
    ) -> None:
        self.drafter: Any = drafter
        self.state = self.drafter.init_state(1, context_length=64, dtype=jnp.float32)
        self.params = jax.tree.map(jnp.asarray, params)
        self.golden = golden
        self.table = jnp.arange(1, 1 + PAGES, dtype=jnp.int32)[::-1][None]
        self.caches = empty_pools(
            self.drafter.cache_groups,
            num_pages=1 + PAGES,
            page_size=PAGE,
            shards=1,
            dtype=jnp.float32,
            ops=Ops(),
        )
        self.length = 0
        fast = {"xla_backend_optimization_level": 0}  # compiling is what the tests cost
        self._advance = jax.jit(self.drafter.advance, compiler_options=fast)
        self._levels = jax.jit(self._ranked, compiler_options=fast)

    def tell(self, end: int) -> None:
        """Advance over a chunk, padded to CHUNK tokens."""
        count = end - self.length
        places = jnp.arange(self.length, self.length + CHUNK, dtype=jnp.int32)
        ids = jnp.asarray(self.golden["token_ids"], jnp.int32)
        emitted = Emitted(
            token_ids=ids[places],
            features=Features(
                hidden=jnp.zeros((CHUNK, 0)),
                aux_hidden=jnp.asarray(self.golden["features"])[places],
            ),
            next_ids=ids[end : end + 1],
            rows=AttentionMetadata(
                page_table=self.table,
                prefix_lens=jnp.asarray([self.length], jnp.int32),
                cu_q_lens=jnp.asarray([0, count], jnp.int32),
                q_positions=places,
            ),
            last=jnp.asarray([count - 1], jnp.int32),
            is_first=jnp.asarray([self.length == 0]),
            sampling=empty_sampling(1, vocab_size=64),
            queries_per_row=None,
        )
        self.caches, self.state = self._advance(self.params, self.caches, self.state, emitted)
        self.length = end

    def log_probs(self) -> np.ndarray:
        """[S, U], each level after the text's own tokens."""
        size = self.drafter.draft_shape.num_steps
        ids = jnp.asarray(self.golden["token_ids"][self.length : self.length + size], jnp.int32)
        length = jnp.asarray([self.length], jnp.int32)
        self.caches, found = self._levels(self.params, self.caches, self.state, ids, length)
        return np.asarray(found)[:, np.sort(np.asarray(self.params["draft_ids"]))]

    def _ranked(self, params: Any, caches: Any, state: Any, ids: Any, length: Any) -> Any:
        rows = StepBatch(
            root_ids=ids[:1],
            seq_lens=length,
            page_table=self.table,
            sampling=empty_sampling(1, vocab_size=64),
        )
        caches, rank, carried = self.drafter.guess(params, caches, state, rows)
        found = jnp.full((len(ids), 64), -jnp.inf)
        for depth in range(len(ids)):
            carried, candidates, terms = rank(depth, ids[None, depth : depth + 1], carried)
            found = found.at[depth, candidates[0, 0]].set(terms[0, 0])
        return caches, found


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    log_probs: np.ndarray = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return log_probs


def reference_of(name: str, golden: dict[str, np.ndarray]) -> BlockReference:
    stored = load_file(GOLDEN / name / "model.safetensors")
    tensors = {block_name(each): value for each, value in stored.items()}
    for each, lent in (("embed", "embed_tokens.weight"), ("lm_head", "lm_head.weight")):
        if each in golden:
            tensors[lent] = golden[each]
    return BlockReference(
        tensors=tensors, head_dim=8, eps=1e-6, theta=1000.0, mask_token_id=63, **SETTINGS[name]
    )


@pytest.mark.slow_cases(
    "dflash_both_ways", "dspark_gated", "dspark_vanilla", "dflash_window", "dspark_rnn"
)
@pytest.mark.parametrize("name", SETTINGS)
def test_blocks_after_chunks_equal_the_library_that_wrote_the_head(name: str) -> None:
    drafter, params, golden = golden_head(name)
    assert drafter.model.spec.block_size == golden["logits"].shape[1]
    check_rows(Row(drafter, params, golden), golden)


def check_rows(row: Row, golden: dict[str, np.ndarray]) -> None:
    num_steps = row.drafter.draft_shape.num_steps
    for root, logits in zip(golden["roots"], golden["logits"], strict=True):
        row.tell(int(root))
        expected = log_softmax(logits[-num_steps:])
        np.testing.assert_allclose(row.log_probs(), expected, rtol=2e-5, atol=2e-5)


def test_parallel_levels_equal_speculators() -> None:
    """P-EAGLE, in jspec and in numpy: after the pair of the root come those of masks."""
    drafter, params, golden = parallel_head()
    check_rows(Row(drafter, params, golden), golden)
    head = Eagle3Reference(
        tensors=load_file(GOLDEN / "peagle" / "model.safetensors"),
        head_dim=8,
        eps=1e-6,
        theta=1000.0,
        normed="whole",
        norm_before_residual=True,
        num_layers=2,
    )
    for root, logits in zip(golden["roots"], golden["logits"], strict=True):
        masks = len(logits) - 1
        ids = [*golden["token_ids"][1 : root + 1].tolist(), *[63] * masks]
        mask = head.weight("mask_hidden")[0].repeat(masks, axis=0)
        hidden = head.fuse(np.vstack((golden["features"][:root], mask)))
        found = head.logits(head.run(ids, hidden)[-len(logits) :])
        np.testing.assert_allclose(found, logits, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_numpy_reference_equals_it_too(name: str) -> None:
    golden = arrays_of(GOLDEN / name / "outputs.npz")
    reference = reference_of(name, golden)
    ids, size = golden["token_ids"], golden["logits"].shape[1]
    num_steps = size - (not reference.from_root)
    for root, expected in zip(golden["roots"], golden["logits"], strict=True):
        hidden = reference.run(int(ids[root]), golden["features"][:root].astype(float), size)
        for depth in range(num_steps):
            path = ids[root + 1 : root + 1 + depth].tolist()
            found = reference.following(hidden, int(ids[root]), path, num_steps=num_steps)
            np.testing.assert_allclose(
                found, expected[size - num_steps + depth], rtol=2e-5, atol=2e-5
            )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_token_id": None}, r"mask_token_id and pard_token are \[\]; expected one token id"),
        ({"pard_token": 62}, r"mask_token_id and pard_token are \[63, 62\]; expected one token id"),
        ({"mask_token_id": 64}, "mask_token_id is 64; expected an id of the vocabulary of 64"),
    ],
)
def test_a_parallel_head_has_one_mask(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Also in the plain layout, which vLLM's names are read in."""
    config = json.loads((GOLDEN / "peagle" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(JspecError, match=message):
        load_eagle3_config(tmp_path, target=golden_target())
    plain = config | config.pop("transformer_layer_config") | {"eagle_config": {}}
    plain |= {"architectures": ["PEagleDraftModel"], "pard_token": 63}
    del plain["mask_token_id"], plain["speculators_model_type"]
    (tmp_path / "config.json").write_text(json.dumps(plain))
    found = load_eagle3_config(tmp_path, target=golden_target())
    assert (found.mask_token_id, found.norm_before_residual) == (63, True)
