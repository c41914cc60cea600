"""A multi-layer drafter driven by hand: chunks, proposals and verifications of rows whose features
are given, beside the float64 reference that knows neither lag nor state."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jspec.config.limits import Algorithm
from jspec.device.batch import Features, Verified
from jspec.device.state import empty_sampling
from jspec.layers.linear import Shard
from jspec.models.decoder import Params
from jspec.models.files.stored import stored_tensors, value_at
from jspec.models.heads.feature_head import FeatureHead
from jspec.models.heads.head_params import HeadNames, head_params
from jspec.models.params import Init
from jspec.models.placement import init_params, nested
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.ops import Ops
from jspec.spec.head_spec import HeadSpec, mtp_spec
from jspec.spec.model_spec import uniform_decoder
from jspec.speculative.drafter import Emitted, StepBatch, emitted_by
from jspec.speculative.drafters.multi_layer import MultiLayerDrafter
from tests.models.mtp_reference import MtpReference
from tests.speculative.engines import TARGET, spec_of
from tests.speculative.published_layers import (
    PUBLISHED_LAYERS,
    published_config,
    published_params,
    published_reference,
)
from tests.support.caches import empty_pools

S, PAGE, PAGES_PER_ROW, NUM_ROWS, CHUNK = 3, 4, 10, 3, 12
SIZE = TARGET.hidden_size
LAYERS = uniform_decoder(
    vocab_size=TARGET.vocab_size,
    hidden_size=SIZE,
    intermediate_size=40,
    num_layers=S,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)
CONFIGS = {
    "not_chained": mtp_spec(layer=LAYERS, target_num_layers=TARGET.num_layers),
    "chained": mtp_spec(
        layer=LAYERS, target_num_layers=TARGET.num_layers, chained=True, reads_normed=False
    ),
    "hidden_first": mtp_spec(
        layer=LAYERS,
        target_num_layers=TARGET.num_layers,
        chained=True,
        hidden_first=True,
        feeds_back_normed=True,
        zeroes_first=True,
        own_head=True,
    ),
}
# One layer that every level runs again; it has no rows of levels to look at.
RECURRENT = mtp_spec(
    layer=dataclasses.replace(LAYERS, layers=LAYERS.layers[:1]),
    target_num_layers=TARGET.num_layers,
    recurrent=True,
    reads_normed=False,
)
Record = tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]  # path, ids, log-probabilities


def config_of(name: str) -> HeadSpec:
    """Of CONFIGS, or of the published layers of a family."""
    if name in PUBLISHED_LAYERS:
        return published_config(name)[0]
    return RECURRENT if name == "recurrent" else CONFIGS[name]


def head_of(name: str, ops: Ops | None = None, shard: Shard | None = None) -> FeatureHead:
    names = published_config(name)[1] if name in PUBLISHED_LAYERS else HeadNames()
    return FeatureHead(config_of(name), ops or Ops(), shard or Shard(), names)


@functools.cache
def params_of(name: str) -> Params:
    """Random weights, norms away from 1; embedding and lm_head as the target would lend them."""
    if name in PUBLISHED_LAYERS:
        return published_params(name)
    table = head_params(config_of(name))
    params = init_params(table, seed=5)
    values = {spec.path: value_at(params, spec.path) for spec in table}
    for i, spec in enumerate(table):
        if spec.init is Init.ONES:
            values[spec.path] = 1 + jax.random.normal(jax.random.key(i), spec.shape) / 4
    return nested(values.items())


@functools.cache
def reference_of(name: str) -> MtpReference:
    if name in PUBLISHED_LAYERS:
        return published_reference(name)
    config, params = config_of(name), params_of(name)
    tensors = dict(stored_tensors(head_params(config), params, dtype=np.float32))
    tensors["embed.weight"] = np.asarray(params["embed"]["table"])
    if not config.own_head:
        tensors["head.weight"] = np.asarray(params["lm_head"]["kernel"]).T
    attention = LAYERS.one_layer.attention
    return MtpReference(
        tensors=tensors,
        prefix=HeadNames().prefix,
        head_dim=attention.head_dim,
        theta=attention.rope.theta,
        eps=LAYERS.rms_norm_eps,
        chained=config.chained,
        hidden_first=config.hidden_first,
        feeds_normed=config.feeds_back_normed,
        own_heads=config.own_head,
        zeroes_first=config.zeroes_first,
    )


def drafter_of(name: str, topk: int) -> RecordingDrafter:
    nodes = S + 1 if topk == 1 else 1 + topk + (S - 1) * topk * topk
    spec = spec_of(S, topk, nodes, Algorithm.MULTI_LAYER_EAGLE)
    return RecordingDrafter(head_of(name), spec)


@dataclass(frozen=True, slots=True)
class RecordingDrafter(MultiLayerDrafter):
    """Keeps what each forward of propose guessed: (paths, ids, terms), level 2 first."""

    record: list[Any] = field(default_factory=list, hash=False, compare=False)

    def expand(self, *given: Any, **named: Any) -> Any:
        out = MultiLayerDrafter.expand(self, *given, **named)
        self.record.append((out[1].tokens, out[2], out[3]))
        return out


@dataclass
class Texts:
    """NUM_ROWS texts with a feature a token, and how far the drafter has been told of each.

    Slots that nobody wrote hold NaN: whoever reads one is found out.
    """

    name: str
    topk: int
    seed: int
    told: list[int] = field(default_factory=lambda: [0] * NUM_ROWS)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        length = PAGE * PAGES_PER_ROW
        self.ids = rng.integers(0, TARGET.vocab_size, (NUM_ROWS, length))
        self.features = rng.normal(size=(NUM_ROWS, length, SIZE)).astype(np.float32)
        self.drafter = drafter_of(self.name, self.topk)
        pools = empty_pools(
            self.drafter.cache_groups,
            num_pages=1 + NUM_ROWS * PAGES_PER_ROW,
            page_size=PAGE,
            shards=1,
            dtype=jnp.float32,
            ops=Ops(),
        )
        self.caches = tuple(jnp.full_like(pages, jnp.nan) for pages in pools)
        self.state = self.drafter.init_state(NUM_ROWS, context_length=64, dtype=jnp.float32)
        self.state = jax.tree.map(  # what another tenant left behind
            lambda x: jnp.full_like(x, 7 if x.dtype == jnp.int32 else jnp.nan), self.state
        )
        pages = 1 + rng.permutation(NUM_ROWS * PAGES_PER_ROW)
        self.table = jnp.asarray(pages.reshape(NUM_ROWS, -1), jnp.int32)
        self.programs = programs_of(self.name, self.topk)
        self.sampling = dataclasses.replace(
            empty_sampling(NUM_ROWS, vocab_size=TARGET.vocab_size),
            seed=jnp.asarray([[0, 11 + r] for r in range(NUM_ROWS)], jnp.uint32),
        )

    def _features(self, rows: Any) -> Features:
        """As the drafter asked for them."""
        rows, none = jnp.asarray(rows), jnp.zeros((*np.shape(rows)[:-1], 0))
        if not config_of(self.name).aux_layer_ids:
            return Features(hidden=rows, aux_hidden=none)
        return Features(hidden=none, aux_hidden=rows)

    def chunk(self, lens: list[int]) -> None:
        """The next `lens` tokens of each row, packed, as a prefill step has them; 0 for none."""
        ids, features = np.zeros(CHUNK, np.int64), np.zeros((CHUNK, SIZE), np.float32)
        positions, ends = np.zeros(CHUNK, np.int64), np.append(0, np.cumsum(lens))
        for r, (begin, end) in enumerate(itertools.pairwise(ends)):
            own = slice(self.told[r], self.told[r] + lens[r])
            ids[begin:end], features[begin:end] = self.ids[r, own], self.features[r, own]
            positions[begin:end] = np.arange(own.start, own.stop)
        starts = [told if n else 0 for told, n in zip(self.told, lens, strict=True)]
        after = [told + n for told, n in zip(self.told, lens, strict=True)]
        emitted = Emitted(
            token_ids=jnp.asarray(ids, jnp.int32),
            features=self._features(features),
            next_ids=jnp.asarray([self.ids[r, n] for r, n in enumerate(after)], jnp.int32),
            rows=AttentionMetadata(
                page_table=self.table,
                prefix_lens=jnp.asarray(starts, jnp.int32),
                cu_q_lens=jnp.asarray(ends, jnp.int32),
                q_positions=jnp.asarray(positions, jnp.int32),
            ),
            last=jnp.maximum(jnp.asarray(ends[1:] - 1, jnp.int32), 0),
            is_first=jnp.asarray([told == 0 for told in self.told]),
            sampling=self.sampling,
            queries_per_row=None,
        )
        self._advance(emitted, [n > 0 for n in lens])
        self.told = after

    def _advance(self, emitted: Emitted, live: list[bool]) -> None:
        self.caches, state = self.programs[0](self.caches, self.state, emitted)
        keep = jnp.asarray(live)

        def of_live(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(keep.reshape(-1, *[1] * (new.ndim - 1)), new, old)

        self.state = jax.tree.map(of_live, state, self.state)

    def rows(self) -> StepBatch:
        return StepBatch(
            root_ids=jnp.asarray([self.ids[r, n] for r, n in enumerate(self.told)], jnp.int32),
            seq_lens=jnp.asarray(self.told, jnp.int32),
            page_table=self.table,
            sampling=self.sampling,
        )

    def propose(self) -> list[Record]:
        """What each level's forward guessed, level 2 first."""
        self.caches, record = self.programs[1](self.caches, self.state, self.rows())
        return [tuple(np.asarray(x) for x in level) for level in record]  # type: ignore[misc]

    def verify(self, num_accepted: list[int]) -> None:
        """A proposal, then as many of the text's next tokens as drafts, and one after them."""
        self.propose()
        rows, most = self.rows(), S + 1
        own = [slice(n, n + most) for n in self.told]
        emitted_ids = np.stack([self.ids[r, n + 1 : n + 1 + most] for r, n in enumerate(self.told)])
        verified = Verified(
            emitted_ids=jnp.asarray(emitted_ids, jnp.int32),
            bonus_ids=jnp.asarray(
                [emitted_ids[r, n] for r, n in enumerate(num_accepted)], jnp.int32
            ),
            num_accepted=jnp.asarray(num_accepted, jnp.int32),
            node_path=jnp.zeros((NUM_ROWS, most), jnp.int32),
            features=self._features(np.stack([self.features[r, at] for r, at in enumerate(own)])),
        )
        self._advance(emitted_by(verified, rows), [True] * NUM_ROWS)
        self.told = [n + a + 1 for n, a in zip(self.told, num_accepted, strict=True)]

    def forget(self, row: int) -> None:
        """The row is retracted: its next chunk begins it anew, over what its pages still hold."""
        self.told[row] = 0

    def known(self, row: int) -> tuple[list[int], npt.NDArray[Any]]:
        """All tokens of a row, the root included, and all features."""
        length = self.told[row]
        return self.ids[row, : length + 1].tolist(), self.features[row, :length]

    def cached(self, row: int, layer: int) -> npt.NDArray[Any]:
        """[rows, 2G, D] of a layer's pool, by slot."""
        pages = np.asarray(self.caches[layer])[np.asarray(self.table[row])]
        return pages.reshape(-1, *pages.shape[2:])

    def check_pools(self) -> None:
        """The pool law: rows below L - s of layer s are the reference's, whatever happened."""
        for row in range(NUM_ROWS):
            tokens, features = self.known(row)
            expected = reference_of(self.name).caches(tokens, features, num_layers=S)
            for layer, (k, v) in enumerate(expected):
                count = max(self.told[row] - layer, 0)
                assert k.shape[1] == count
                interleaved = np.stack((k, v), axis=1).reshape(2 * len(k), count, k.shape[2])
                np.testing.assert_allclose(
                    self.cached(row, layer)[:count],
                    interleaved.swapaxes(0, 1),
                    rtol=0,
                    atol=1e-5,
                    err_msg=f"row {row}, layer {layer}",
                )

    def check_guesses(self) -> int:
        """Every level's candidates and their log-probabilities, along each path; how many paths."""
        reference, checked = reference_of(self.name), 0
        levels = self.propose()
        level1 = (
            np.zeros((NUM_ROWS, 1, 0), np.int64),
            np.asarray(self.state.level1_ids)[:, None],
            np.asarray(self.state.level1_scores)[:, None],
        )
        for layer, (paths, ids, terms) in enumerate([level1, *levels]):
            for row in range(NUM_ROWS):
                tokens, features = self.known(row)
                for path, found, term in zip(paths[row], ids[row], terms[row], strict=True):
                    whole = [*tokens, *path.tolist()]
                    out = reference.outputs(whole, features, num_layers=layer + 1)[layer]
                    logits = reference.logits(layer, out[-1:])[0]
                    scores = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
                    best = np.argsort(-scores)[: self.topk]
                    assert found.tolist() == best.tolist(), (layer, row, path)
                    np.testing.assert_allclose(term, scores[best], rtol=0, atol=2e-5)
                    checked += 1
        return checked


@functools.cache
def programs_of(name: str, topk: int) -> tuple[Any, Any]:
    """(advance, propose), compiled once a config."""
    drafter, params = drafter_of(name, topk), params_of(name)

    def propose(caches: Any, state: Any, rows: StepBatch) -> Any:
        drafter.record.clear()
        caches, _ = drafter.propose(params, caches, state, rows)
        return caches, list(drafter.record)

    def advance(caches: Any, state: Any, emitted: Emitted) -> Any:
        return drafter.advance(params, caches, state, emitted)

    return jax.jit(advance), jax.jit(propose)
