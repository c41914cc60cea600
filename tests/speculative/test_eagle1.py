"""EAGLE-1 heads as drafters: no text depends on them, and one that is right is always accepted.

Several sets of weights go through one compiled engine: a random head, one of NaN, an oracle, and an
oracle with noise. The oracle's target reads no context, so what it says next follows from the last
token alone, which the head can know through fc: shared noise then makes every draft the target's
own, at any temperature.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jspec.core.batch import Features
from jspec.core.config import Algorithm, SpeculativeConfig
from jspec.core.engine_args import EngineArgs
from jspec.core.errors import CheckpointError, ConfigError
from jspec.core.features import StepFeatures
from jspec.core.model_spec import Eagle1Config, uniform_decoder
from jspec.core.request import Request
from jspec.core.state import empty_sampling
from jspec.engine.loading import LoadedModels, load_models, resolve_paths
from jspec.engine.runner import empty_pools
from jspec.models.checkpoint import save_target
from jspec.models.decoder import Params
from jspec.models.eagle1 import Eagle1Head, eagle1_params
from jspec.models.placement import init_params, nested
from jspec.models.stored import stored_tensors, value_at
from jspec.pallas_kernels.attention.rows import AttentionRows
from jspec.pallas_kernels.ops import Ops
from jspec.speculative.drafter import Emitted
from jspec.speculative.eagle import EagleDrafter
from tests.models.eagle3_reference import Eagle1Reference
from tests.speculative.engines import (
    TARGET,
    Compiled,
    build,
    make_request,
    mesh_of,
    plain_engine,
    plain_ids,
    serve,
    spec_of,
    tiny_params,
)
from tests.speculative.test_standalone import useful

CHAIN = (3, 1, 4)
TREE = (2, 2, 7)  # every candidate is verified, so the target's own path is among them
SHAPES = (pytest.param(CHAIN, marks=pytest.mark.slow), TREE)
SIZE = TARGET.hidden_size
CONFIG = Eagle1Config(
    layer=uniform_decoder(
        vocab_size=TARGET.vocab_size,
        hidden_size=SIZE,
        intermediate_size=48,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
    ),
    draft_vocab_size=TARGET.vocab_size,
)


def spec(shape: tuple[int, int, int]) -> SpeculativeConfig:
    return spec_of(*shape, Algorithm.EAGLE)


def with_head(head: Params, target: Params) -> Params:
    """The head's own weights, and what is the target's."""
    return {**head, "embed": target["embed"], "lm_head": target["lm_head"]}


@functools.cache
def random_head() -> Params:
    return with_head(init_params(eagle1_params(CONFIG), seed=9), tiny_params()[0])


@functools.cache
def engine(shape: tuple[int, int, int]) -> Compiled:
    """Chains on pages of 16, trees on pages of 4."""
    config = spec(shape)
    return build(
        config,
        page_size=16 if shape[1] == 1 else 4,
        params=(tiny_params()[0], random_head()),
        variants=(StepFeatures(),),
        make=lambda ops, shard: EagleDrafter(Eagle1Head(CONFIG, ops, shard), config),
    )


def some_requests(batch: int) -> list[Request]:
    """Greedy and sampled rows; prompts of several chunks, and one of a single token."""
    return [
        make_request(
            i,
            prompt_len=(16, 1, 40, 7, 23)[i],
            seed=8800 + i,
            temperature=float(i % 2),
            max_new_tokens=48 - 4 * i,
            ignore_eos=True,
        )
        for i in range(batch)
    ]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("batch", "chunk", "depth"), [(1, 5, 2), (5, 32, 1), (3, 8, 0)])
def test_a_random_head_changes_no_token(
    shape: tuple[int, int, int], batch: int, chunk: int, depth: int
) -> None:
    requests = some_requests(batch)
    served = serve(engine(shape), requests, chunk_size=chunk, overlap_depth=depth)
    assert list(served.ids) == [plain_ids(request) for request in requests]
    assert served.num_leaked_pages == 0


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_head_of_garbage_changes_no_token(shape: tuple[int, int, int], bad: float) -> None:
    """Every number of its layers and of fc, so every score of every draft."""
    garbage = {
        name: jax.tree.map(lambda x: jnp.full_like(x, bad), random_head()[name])
        for name in ("fc", "layers")
    }
    requests = some_requests(5)
    served = serve(engine(shape), requests, draft={**random_head(), **garbage})
    assert list(served.ids) == [plain_ids(request) for request in requests]


def contextless_target() -> Params:
    """TARGET's weights with attention and MLP turned off, and embeddings whose norm is 1."""
    params = tiny_params()[0]
    values = leaves_of(params)
    for path, leaf in values.items():
        if "out" in path or "down" in path:
            values[path] = jnp.zeros_like(leaf)
    values["embed", "table"] = jnp.sign(values["embed", "table"])
    return nested(values.items())


def leaves_of(params: Params) -> dict[Any, Any]:
    paths = jax.tree_util.tree_leaves_with_path(params)
    return {tuple(key.key for key in path): leaf for path, leaf in paths}


def oracle_head(target: Params) -> Params:
    """fc hands the embedding on, as the target's final norm leaves it; the layer adds nothing."""
    head = jax.tree.map(jnp.zeros_like, init_params(eagle1_params(CONFIG), seed=9))
    shrunk = 1.0 / np.sqrt(1.0 + TARGET.rms_norm_eps)
    head["fc"]["kernel"] = head["fc"]["kernel"].at[:SIZE].set(jnp.eye(SIZE) * shrunk)
    return with_head({**head, "draft_ids": random_head()["draft_ids"]}, target)


@functools.cache
def contextless() -> tuple[Params, list[tuple[int, ...]]]:
    """The target, and what it says plainly to five requests."""
    target = contextless_target()
    compiled = plain_engine()
    compiled = dataclasses.replace(compiled, params={**compiled.params, "target": target})
    return target, [serve(compiled, [request]).ids[0] for request in some_requests(5)]


def accepted_by(shape: tuple[int, int, int], *, noise: float) -> list[int]:
    """num_accepted of each verification by the oracle, whose fc has noise; the text is checked."""
    target, expected = contextless()
    assert len(set(expected)) == len(expected)
    head = oracle_head(target)
    kernel = head["fc"]["kernel"]
    errors = noise * jax.random.normal(jax.random.key(0), kernel.shape)
    head = {**head, "fc": {**head["fc"], "kernel": kernel + errors}}
    compiled = engine(shape)
    compiled = dataclasses.replace(compiled, params={**compiled.params, "target": target})
    served = serve(compiled, some_requests(5), draft=head)
    assert list(served.ids) == expected
    return [
        count
        for request, accepted in zip(some_requests(5), served.accepted, strict=True)
        for count in useful(request, accepted)
    ]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_oracle_is_accepted_whole(shape: tuple[int, int, int]) -> None:
    """Exactly S + 1 tokens on every verification, greedy and at temperature 1."""
    counts = accepted_by(shape, noise=0.0)
    assert len(counts) > 40
    assert set(counts) == {shape[0]}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_oracle_with_noise_is_accepted_in_every_count(shape: tuple[int, int, int]) -> None:
    assert set(accepted_by(shape, noise=0.1)) == set(range(shape[0] + 1))


def told(
    tokens: list[int], next_id: int, start: int, hidden: Any, *, per_row: int | None, padding: int
) -> Emitted:
    """One row's tokens from position `start` on, with the target's last hidden."""
    size = len(tokens) + padding
    rows = np.zeros((size, SIZE), np.float32)
    rows[: len(tokens)] = hidden
    return Emitted(
        token_ids=jnp.asarray(tokens + [0] * padding, jnp.int32),
        features=Features(hidden=jnp.asarray(rows), aux_hidden=jnp.zeros((size, 0))),
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


def test_an_advance_pairs_each_hidden_with_the_token_behind_it() -> None:
    check_advance()


def check_advance() -> None:
    """Two chunks of a prompt, then two verifications: the candidates are the reference's."""
    rng = np.random.default_rng(3)
    ids = [int(i) for i in rng.integers(0, TARGET.vocab_size, 16)]
    hidden = rng.standard_normal((16, SIZE)).astype(np.float32)
    params = random_head()
    drafter = EagleDrafter(Eagle1Head(CONFIG, Ops()), spec((3, 8, 9)))
    caches = empty_pools(
        drafter.cache_groups, num_pages=5, page_size=4, shards=1, dtype=jnp.float32, ops=Ops()
    )
    state = drafter.init_state(1, context_length=16, dtype=jnp.float32)
    tensors = stored_tensors(eagle1_params(CONFIG), params, dtype=np.float32)
    reference = Eagle1Reference(
        tensors=tensors | {"embed_tokens.weight": np.asarray(params["embed"]["table"])},
        head_dim=8,
        eps=CONFIG.layer.rms_norm_eps,
        theta=10000.0,
        lm_head=np.asarray(params["lm_head"]["kernel"]).T,
        hot_ids=np.arange(TARGET.vocab_size),
    )
    advance = jax.jit(drafter.advance)
    for start, end, per_row, padding in (
        (0, 5, None, 1),
        (5, 8, None, 3),
        (8, 12, 4, 0),  # all drafts accepted
        (12, 13, 4, 3),  # none
    ):
        emitted = told(
            ids[start:end], ids[end], start, hidden[start:end], per_row=per_row, padding=padding
        )
        caches, state = advance(params, caches, state, emitted)
        carried = reference.run(ids[1 : end + 1], hidden[:end].astype(np.float64))[-1:]
        logits = reference.logits(carried)[0]
        best = np.argsort(-logits)[:8]
        assert state.level1_ids[0].tolist() == best.tolist()
        total = np.log(np.exp(logits - logits.max()).sum()) + logits.max()
        np.testing.assert_allclose(state.level1_scores[0], logits[best] - total, atol=2e-5)


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """TARGET and a head beside it, on disk."""
    save_target(tmp_path / "target", TARGET, tiny_params()[0], dtype=np.float32)
    draft = tmp_path / "draft"
    draft.mkdir()
    tensors = stored_tensors(eagle1_params(CONFIG), random_head(), dtype=np.float32)
    save_file(tensors, draft / "model.safetensors")
    attention = CONFIG.layer.one_layer.attention
    values = {
        "architectures": ["LlamaForCausalLMEagle"],
        "vocab_size": TARGET.vocab_size,
        "hidden_size": SIZE,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "rms_norm_eps": CONFIG.layer.rms_norm_eps,
    }
    (draft / "config.json").write_text(json.dumps(values))
    np.save(tmp_path / "freq.npy", HOT_IDS[::-1])
    return tmp_path


HOT_IDS = np.sort(np.random.default_rng(2).choice(TARGET.vocab_size, 64, replace=False))


def load(directory: Path, *, shards: int = 1, **arguments: Any) -> LoadedModels:
    args = EngineArgs(
        model_path=str(directory / "target"),
        speculative_algorithm="EAGLE",
        speculative_draft_model_path=str(directory / "draft"),
        **arguments,
    )
    return load_models(args, resolve_paths(args), mesh=mesh_of(shards))


def test_a_head_is_read_beside_its_target(pair: Path) -> None:
    models = load(pair)
    assert isinstance(models.drafter, EagleDrafter)
    assert models.drafter.head.config == CONFIG
    assert models.target.aux_layer_ids == ()
    draft, target = models.params["draft"], models.params["target"]
    assert draft["lm_head"]["kernel"] is target["lm_head"]["kernel"]
    assert draft["embed"]["table"] is target["embed"]["table"]
    for path in (("fc", "kernel"), ("layers", 0, "attention", "qkv", "kernel")):
        np.testing.assert_array_equal(value_at(draft, path), value_at(random_head(), path))
    dummy = load(pair, load_format="dummy")
    assert jax.tree.map(jnp.shape, dummy.params) == jax.tree.map(jnp.shape, models.params)


@pytest.mark.parametrize("shards", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_map_of_frequent_ids_takes_columns_of_the_targets_head(pair: Path, shards: int) -> None:
    models = load(pair, shards=shards, speculative_token_map=str(pair / "freq.npy"))
    draft, target = models.params["draft"], models.params["target"]
    np.testing.assert_array_equal(draft["draft_ids"], HOT_IDS)
    kernel = draft["lm_head"]["kernel"]
    np.testing.assert_array_equal(kernel, np.asarray(target["lm_head"]["kernel"])[:, HOT_IDS])
    assert kernel.sharding == target["lm_head"]["kernel"].sharding
    dummy = load(
        pair, shards=shards, speculative_token_map=str(pair / "freq.npy"), load_format="dummy"
    )
    assert jax.tree.map(jnp.shape, dummy.params) == jax.tree.map(jnp.shape, models.params)


def test_an_eagle3_head_is_told_apart(pair: Path) -> None:
    path = pair / "draft" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"draft_vocab_size": 160}))
    with pytest.raises(ConfigError, match="use --speculative-algorithm EAGLE3"):
        load(pair)


def test_what_does_not_fit_is_refused_before_the_target_is_read(pair: Path) -> None:
    (pair / "draft" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"draft: expected model\.safetensors or"):
        load(pair)
    few = pair / "few.json"
    few.write_text("[1, 2]")
    with pytest.raises(ConfigError, match="speculative_eagle_topk is 4; expected at most 2"):
        load(pair, speculative_token_map=str(few), speculative_eagle_topk=4)
    with pytest.raises(CheckpointError, match=r"absent\.json: cannot be read"):
        load(pair, speculative_token_map=str(pair / "absent.json"))


def test_a_map_belongs_to_an_eagle_head() -> None:
    with pytest.raises(ConfigError, match=r"speculative_token_map is 'x\.npy', .* EAGLE3; .* map"):
        EngineArgs(speculative_token_map="x.npy")


@pytest.mark.slow
def test_two_shards_with_frequent_ids_change_no_token(pair: Path) -> None:
    """Draft, target and map split alike."""
    models = load(pair, shards=2, speculative_token_map=str(pair / "freq.npy"))
    config = spec((3, 2, 7))
    hot = dataclasses.replace(CONFIG, draft_vocab_size=len(HOT_IDS))
    compiled = build(
        config,
        page_size=16,
        shards=2,
        params=(models.params["target"], models.params["draft"]),
        variants=(StepFeatures(),),
        make=lambda ops, shard: EagleDrafter(Eagle1Head(hot, ops, shard), config),
    )
    requests = some_requests(5)
    served = serve(compiled, requests)
    assert list(served.ids) == [plain_ids(request) for request in requests]
