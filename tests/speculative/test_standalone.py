"""A language model as draft: its rows, its oracle, its checkpoint, and that no text depends on it.

The oracle: a target that drafts for itself guesses, with shared noise, exactly what it will choose,
at any temperature. One position, slot or KV row that is off would cost an acceptance.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core.batch import Features
from jspec.core.config import Algorithm, SpeculativeConfig
from jspec.core.engine_args import EngineArgs
from jspec.core.errors import CheckpointError, ConfigError, JspecError
from jspec.core.features import StepFeatures
from jspec.core.model_spec import ModelSpec, uniform_decoder
from jspec.core.request import Request
from jspec.core.state import empty_sampling
from jspec.engine.loading import LoadedModels, load_models, resolve_paths
from jspec.engine.runner import empty_pools
from jspec.layers.linear import Shard
from jspec.models.checkpoint import load_target, save_target
from jspec.models.decoder import Decoder, Params
from jspec.models.placement import init_params
from jspec.models.registry import table_of
from jspec.pallas_kernels.attention.rows import AttentionRows
from jspec.pallas_kernels.ops import Ops
from jspec.speculative.drafter import Emitted
from jspec.speculative.standalone import StandaloneDrafter
from jspec.testing.tiny_models import tiny_tokenizer
from tests.models.dense_forward import dense_forward
from tests.speculative.engines import (
    TARGET,
    Compiled,
    ViewRunner,
    build,
    make_request,
    mesh_of,
    plain_ids,
    serve,
    serve_view,
    spec_of,
    tiny_params,
)

CHAIN, TREE = (3, 1, 4), (3, 2, 7)
WHOLE_TREE = (2, 2, 7)  # every candidate is verified, so the target's own path is among them
SMALL = uniform_decoder(
    vocab_size=TARGET.vocab_size,
    hidden_size=16,
    intermediate_size=32,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)


def standalone(num_steps: int, topk: int, nodes: int) -> SpeculativeConfig:
    return spec_of(num_steps, topk, nodes, Algorithm.STANDALONE)


@functools.cache
def small_params() -> Params:
    return init_params(table_of(SMALL), seed=7)


@functools.cache
def engine(spec: tuple[int, int, int], *, drafts_for_itself: bool) -> Compiled:
    """Chains on pages of 16, trees on pages of 4."""
    model, params = (TARGET, tiny_params()[0]) if drafts_for_itself else (SMALL, small_params())
    config = standalone(*spec)
    return build(
        config,
        page_size=16 if spec[1] == 1 else 4,
        params=(tiny_params()[0], params),
        variants=(StepFeatures(),),
        make=lambda ops, shard: StandaloneDrafter(Decoder(model, ops, shard), config),
    )


def some_requests(batch: int) -> list[Request]:
    """Greedy and sampled rows; prompts that end on a page's edge, and one of a single token."""
    return [
        make_request(
            i,
            prompt_len=(16, 3, 40, 1, 17)[i],
            seed=5000 + i,
            temperature=float(i % 2),
            max_new_tokens=50 - 5 * i,
        )
        for i in range(batch)
    ]


def check_identity(compiled: Compiled) -> list[int]:
    """In every batch, chunk and depth that has its own path; what was accepted each time."""
    accepted: list[int] = []
    for batch, chunk, depth in ((1, 5, 2), (5, 32, 1), (3, 8, 0)):
        requests = some_requests(batch)
        served = serve(compiled, requests, chunk_size=chunk, overlap_depth=depth)
        assert list(served.ids) == [plain_ids(request) for request in requests]
        assert served.num_leaked_pages == 0
        for request, counts in zip(requests, served.accepted, strict=True):
            accepted += useful(request, counts)
    return accepted


def useful(request: Request, counts: tuple[int, ...]) -> list[int]:
    """The verifications up to the row's end: behind it, a row may lie on pages of nobody."""
    kept, emitted = [], 1
    for count in counts:
        if emitted >= request.sampling.max_new_tokens:
            break
        kept.append(count)
        emitted += count + 1
    return kept


@pytest.mark.parametrize("spec", [pytest.param(CHAIN, marks=pytest.mark.slow), TREE], ids=str)
def test_a_small_draft_changes_no_token(spec: tuple[int, int, int]) -> None:
    accepted = check_identity(engine(spec, drafts_for_itself=False))
    assert 0 in accepted
    assert max(accepted) > 0


@pytest.mark.parametrize("spec", [CHAIN, pytest.param(WHOLE_TREE, marks=pytest.mark.slow)], ids=str)
def test_a_target_that_drafts_for_itself_is_always_right(spec: tuple[int, int, int]) -> None:
    """S + 1 tokens on every verification, also at temperature 1: the oracle."""
    accepted = check_identity(engine(spec, drafts_for_itself=True))
    assert len(accepted) > 50
    assert set(accepted) == {spec[0]}


def test_a_resumed_row_drafts_as_before() -> None:
    """A pool too small for all: rows are retracted and filled again; the oracle still holds."""
    compiled = engine(CHAIN, drafts_for_itself=True)
    requests = [
        make_request(i, prompt_len=9 + i, seed=70 + i, temperature=i % 2, max_new_tokens=130)
        for i in range(4)
    ]
    limits = dataclasses.replace(compiled.limits, num_pages=20, prefill_buckets=(8,))
    served = asyncio.run(serve_view(ViewRunner(compiled.runner(), limits), requests))
    assert served.num_retractions > 0
    assert list(served.ids) == [plain_ids(request) for request in requests]
    accepted = served.counters.accept_histogram
    assert accepted[-1] >= sum(accepted) - len(requests)  # the last of a row may be cut


@pytest.mark.slow
def test_two_shards_draft_as_one(tmp_path: Path) -> None:
    """Draft and target split alike: the same tokens, and the oracle on both."""
    paths = {"target": (TARGET, tiny_params()[0]), "draft": (SMALL, small_params())}
    for name, (spec, params) in paths.items():
        save_target(tmp_path / name, spec, params, dtype=np.float32)
    dealt = tuple(
        load_target(tmp_path / name, spec, dtype=np.float32, shards=2)
        for name, (spec, _) in paths.items()
    )
    for model, params in ((SMALL, dealt), (TARGET, (dealt[0], dealt[0]))):
        compiled = build(
            standalone(*CHAIN),
            page_size=16,
            shards=2,
            params=params,
            variants=(StepFeatures(),),
            make=functools.partial(_drafter, model),
        )
        accepted = check_identity(compiled)
        assert set(accepted) == {CHAIN[0]} or model is SMALL


def _drafter(model: ModelSpec, ops: Ops, shard: Shard) -> StandaloneDrafter:
    return StandaloneDrafter(Decoder(model, ops, shard), standalone(*CHAIN))


WIDEST = 8  # of the candidates that are compared with a dense forward


def told(
    tokens: list[int], next_id: int, start: int, *, per_row: int | None = None, padding: int = 0
) -> Emitted:
    """One row's tokens from position `start` on, in the layout of a chunk or a verification."""
    size = len(tokens) + padding
    nothing = jnp.zeros((size, 0))
    return Emitted(
        token_ids=jnp.asarray(tokens + [0] * padding, jnp.int32),
        features=Features(hidden=nothing, aux_hidden=nothing),
        next_ids=jnp.asarray([next_id], jnp.int32),
        rows=AttentionRows(
            page_table=jnp.asarray([[3, 1, 2, 4]], jnp.int32),
            prefix_lens=jnp.asarray([start], jnp.int32),
            cu_q_lens=jnp.asarray([0, len(tokens)], jnp.int32),
            q_positions=start + jnp.arange(size, dtype=jnp.int32),
        ),
        last=jnp.asarray([len(tokens) - 1], jnp.int32),
        is_first=jnp.asarray([start == 0]),
        sampling=empty_sampling(1, vocab_size=TARGET.vocab_size),
        queries_per_row=per_row,
    )


def test_an_advance_scores_what_a_dense_forward_of_the_draft_scores() -> None:
    """Two chunks of a prompt, then two verifications: each leaves the candidates behind the next
    root, and their log-probabilities are the dense model's to 1e-5."""
    ids = [int(i) for i in np.random.default_rng(3).integers(0, TARGET.vocab_size, 16)]
    drafter = StandaloneDrafter(Decoder(SMALL, Ops()), standalone(3, WIDEST, 8))
    caches = empty_pools(
        drafter.cache_groups, num_pages=5, page_size=4, shards=1, dtype=jnp.float32, ops=Ops()
    )
    state = drafter.init_state(1, context_length=16, dtype=jnp.float32)
    calls = (
        told(ids[0:5], ids[5], 0, padding=1),
        told(ids[5:8], ids[8], 5, padding=3),
        told(ids[8:12], ids[12], 8, per_row=4),  # all drafts accepted
        told(ids[12:13], ids[13], 12, per_row=4, padding=3),  # none
    )
    logits = dense_forward(SMALL, small_params(), ids, aux_layer_ids=())[0]
    expected = jax.nn.log_softmax(logits)
    advance = jax.jit(drafter.advance)
    for emitted, root in zip(calls, (5, 8, 12, 13), strict=True):
        caches, state = advance(small_params(), caches, state, emitted)
        scores, best = jax.lax.top_k(expected[root], WIDEST)
        assert state.level1_ids[0].tolist() == best.tolist()
        np.testing.assert_allclose(state.level1_scores[0], scores, rtol=0, atol=1e-5)


def load(directory: Path, **arguments: Any) -> LoadedModels:
    args = EngineArgs(
        model_path=str(directory / "target"),
        speculative_algorithm="STANDALONE",
        speculative_draft_model_path=str(directory / "draft"),
        **arguments,
    )
    return load_models(args, resolve_paths(args), mesh=mesh_of(1))


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """A target and a small model beside it, each with the same tokenizer."""
    for name, spec, params in (
        ("target", TARGET, tiny_params()[0]),
        ("draft", SMALL, small_params()),
    ):
        save_target(tmp_path / name, spec, params, dtype=np.float32)
        tiny_tokenizer().save(str(tmp_path / name / "tokenizer.json"))
    return tmp_path


def test_a_draft_is_read_as_a_target_is(pair: Path) -> None:
    models = load(pair)
    assert isinstance(models.drafter, StandaloneDrafter)
    assert models.drafter.model.spec == models.draft_layer
    assert [group.name for group in models.drafter.cache_groups] == ["draft"]
    assert models.target.aux_layer_ids == ()
    embedding = models.params["draft"]["embed"]["table"]
    np.testing.assert_array_equal(embedding, small_params()["embed"]["table"])
    dummy = load(pair, load_format="dummy")
    assert jax.tree.map(jnp.shape, dummy.params) == jax.tree.map(jnp.shape, models.params)


def other_vocab_size(pair: Path) -> None:
    path = pair / "draft" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 321}))


def other_token(pair: Path) -> None:
    path = pair / "draft" / "tokenizer.json"
    path.write_text(path.read_text().replace("<|endoftext|>", "<|end|>"))


def no_weights(pair: Path) -> None:
    (pair / "draft" / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("spoil", "arguments", "kind", "message"),
    [
        (
            other_vocab_size,
            {},
            ConfigError,
            r"draft: vocab_size is 321; expected 320, that of the target .*target",
        ),
        (
            other_token,
            {},
            CheckpointError,
            r"draft/tokenizer\.json: id 256 is '<\|end\|>'; expected '<\|endoftext\|>', as in "
            r".*target/tokenizer\.json: a draft must have .* \(1 ids differ\)",
        ),
        (no_weights, {}, CheckpointError, r"draft: expected model\.safetensors"),
        (
            None,
            {"speculative_draft_rope_theta": 5.0},
            ConfigError,
            "speculative_draft_rope_theta is 5.0, but speculative_algorithm is STANDALONE",
        ),
    ],
)
def test_a_draft_that_does_not_fit_is_refused_before_the_target_is_read(
    pair: Path, spoil: Any, arguments: dict[str, Any], kind: type[JspecError], message: str
) -> None:
    if spoil is not None:
        spoil(pair)
    with pytest.raises(kind, match=message):
        load(pair, **arguments)


def test_a_draft_without_a_tokenizer_is_taken_at_its_vocab_size(pair: Path) -> None:
    (pair / "draft" / "tokenizer.json").unlink()
    load(pair, load_format="dummy")


def test_the_bundled_head_is_no_language_model() -> None:
    with pytest.raises(ConfigError, match="STANDALONE; expected speculative_draft_model_path too"):
        EngineArgs(speculative_algorithm="STANDALONE")
