"""Experts split over devices write the text of one device: plain, with chains and with trees."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jspec
from jspec.messages.request import Request
from jspec.messages.step_options import StepOptions
from jspec.models.files.checkpoint import load_model_spec
from jspec.models.heads.head_params import head_params
from jspec.models.registry import table_of
from jspec.server.app import create_app
from jspec.spec.expert_shards import experts_by_layer, on_expert_shards
from tests.models.family_checkpoints import GOLDEN
from tests.server.helpers import ask
from tests.speculative.engines import (
    DRAFT,
    PLAIN,
    Compiled,
    build,
    dial_for,
    make_request,
    serve,
    spec_of,
    tiny_params,
)
from tests.speculative.every_drafter import sharded
from tests.speculative.family_targets import drawn, target_of
from tests.speculative.mtp_checkpoints import CONFIGS, engine_of, load, write_checkpoint

NONE, CHAIN, TREE = (0, 1, 1), (3, 1, 4), (3, 2, 7)
FAMILIES = ("qwen3_moe", "gpt_oss", "glm4_moe", "deepseek_v3", "qwen3_next", "mimo_v2", "gemma4")
Mesh = tuple[int, int, int]  # data, expert, tensor
ONE = (1, 1, 1)
MESHES = ((1, 2, 1), (1, 2, 2), (1, 4, 1))
SHARED = ((2, 1, 1), (2, 2, 1), (2, 1, 2), (4, 1, 1))  # the experts are split over data ranks, too
# Biases and clamps, and a shared expert beside groups of experts.
IN_CI = {
    ("gpt_oss", (1, 2, 2), TREE),
    ("deepseek_v3", (2, 2, 1), CHAIN),
}


def requests_of() -> list[Request]:
    return [
        make_request(
            i, prompt_len=n, seed=40 + i, temperature=i % 2, max_new_tokens=40, ignore_eos=True
        )
        for i, n in enumerate((29, 5, 18))
    ]


def engine(family: str, shape: tuple[int, int, int], mesh: Mesh) -> Compiled:
    ranks, experts, tensor = mesh
    shards, target = experts * tensor, target_of(family)
    table = table_of(on_expert_shards(target, ranks * experts, data_shards=ranks))
    head = {} if shape == NONE else sharded(head_params(DRAFT), tiny_params()[1], shards)
    return build(
        PLAIN if shape == NONE else spec_of(*shape),
        page_size=4,
        variants=(StepOptions(),),
        params=(sharded(table, drawn(target), shards), head),
        target_spec=target,
        shards=shards,
        ranks=ranks,
        experts=experts,
        ranks_share_experts=True,
    )


@functools.cache
def plain_texts(family: str) -> list[tuple[int, ...]]:
    return list(serve(engine(family, NONE, ONE), requests_of(), chunk_size=8).ids)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mesh", "shape"),
    [
        pytest.param(*case, marks=() if case in IN_CI else pytest.mark.exhaustive)
        for family in FAMILIES
        for mesh in MESHES + SHARED
        for shape in (NONE, CHAIN, TREE)
        for case in [(family, mesh, shape)]
    ],
)
def test_split_experts_write_the_text_of_one_device(
    family: str, mesh: Mesh, shape: tuple[int, int, int]
) -> None:
    requests, expected = requests_of(), plain_texts(family)
    assert len(set(expected)) == len(requests)
    dial = None if shape == NONE else dial_for(requests, expected)
    served = serve(engine(family, shape, mesh), requests, chunk_size=8, dial=dial)
    assert list(served.ids) == expected
    assert shape == NONE or np.all(served.counters.accept_histogram)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["glm4_moe", pytest.param("deepseek_v3", marks=pytest.mark.exhaustive)]
)
def test_a_draft_of_the_targets_own_layers_is_split_as_well(name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIGS[name])
    requests = requests_of()
    expected = list(serve(engine_of(load(tmp_path), NONE), requests, chunk_size=8).ids)
    models = load(tmp_path, shards=4, experts=2)
    experts = models.params["draft"]["layers"][0]["moe"]["experts"]["down"]
    assert experts.sharding.shard_shape(experts.shape)[0] == experts.shape[0] // 2
    served = serve(
        engine_of(models, TREE), requests, chunk_size=8, dial=dial_for(requests, expected)
    )
    assert list(served.ids) == expected
    assert np.all(served.counters.accept_histogram)


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks",
    [
        {"dp_size": 2, "enable_dp_attention": True},
        pytest.param({}, marks=pytest.mark.exhaustive),
    ],
)
def test_the_flags_give_the_text_of_transformers(ranks: dict[str, Any], tmp_path: Path) -> None:
    """Each of two pairs of devices, which may be data ranks, has half of the experts and spares."""
    experts = experts_by_layer(load_model_spec(GOLDEN / "deepseek_v3"))
    uses = tmp_path / "uses.json"
    uses.write_text(json.dumps({"logical_count": [[*range(n, 0, -1)] for n in experts]}))
    golden = json.loads((GOLDEN / "deepseek_v3" / "greedy.json").read_text())
    engine = jspec.Engine(
        str(GOLDEN / "deepseek_v3"),
        tp_size=4,
        ep_size=2,
        **ranks,
        dtype="float32",
        skip_tokenizer_init=True,
        max_running_requests=1,
        disable_logprobs=True,
        compilation_cache_dir="",
        expert_distribution_recorder_mode="stat",
        init_expert_location=str(uses),
        ep_num_redundant_experts=2,
    )
    with engine:
        app = create_app(engine)
        assert "expert_balancedness{" not in ask(app, "GET", "/metrics").text
        said = engine.generate(
            input_ids=golden["prompt"],
            sampling_params={"temperature": 0, "max_new_tokens": 60, "ignore_eos": True},
        )
        dumped = ask(app, "POST", "/dump_expert_distribution_record").json()
        scraped = ask(app, "GET", "/metrics").text
    assert said["output_ids"] == golden["ids"][:60]
    counts = np.array(dumped["logical_count"])
    has_experts = counts.sum(axis=1) > 0
    num_tokens = len(golden["prompt"]) + 59  # the last one is not read
    assert counts.shape == (len(experts), max(experts))
    assert counts[has_experts].max() <= num_tokens
    assert scraped.count("jspec:expert_balancedness{") == has_experts.sum() > 0
