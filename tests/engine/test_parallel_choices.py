"""`jspec info --devices`: bytes as they are placed, times by hand, and the chosen layouts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jspec.cli.main import main
from jspec.device.parallel import Parallel
from jspec.engine.memory.memory_report import bytes_each
from jspec.engine.memory.parallel_choices import Engine, Load, Served, Split, advise
from jspec.engine.weights.dummy_weights import dummy_params
from jspec.errors import ConfigError
from jspec.models.registry import table_of
from jspec.spec.accelerators import read_devices
from jspec.spec.expert_shards import on_expert_shards
from jspec.spec.layers.feed_forward import MoESpec
from jspec.spec.model_spec import ModelSpec, cache_groups
from tests.support.tiny_models import TinyPair, tiny_target_config, write_tiny_pair

H200 = read_devices("--devices", "8xH200")
SIZES = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
LLAMA_8B = {"architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "rms_norm_eps": 1e-5}


def served(spec: ModelSpec, dtype: str = "float32") -> Served:
    groups = cache_groups(spec, name="target")
    return Served(spec=spec, groups=groups, tables=lambda _: (table_of(spec), ()), dtype=dtype)


def with_experts(spec: ModelSpec) -> ModelSpec:
    ffn = MoESpec(num_experts=8, top_k=2, inner=16)
    layers = tuple(replace(layer, ffn=ffn) for layer in spec.layers)
    return replace(spec, layers=layers, family="qwen3_moe")


@pytest.mark.parametrize(
    ("split", "mesh", "has_experts"),
    [
        (Split(tensor=4), Parallel(tensor=4), False),  # two kv heads, which are repeated
        (Split(tensor=2), Parallel(tensor=2), True),
        (Split(tensor=4, whole_experts=True), Parallel(expert=4), True),
    ],
    ids=["kv heads repeated", "parts of experts", "whole experts"],
)
def test_the_bytes_are_those_of_placed_weights(
    split: Split, mesh: Parallel, has_experts: bool
) -> None:
    spec = with_experts(tiny_target_config()) if has_experts else tiny_target_config()
    devices = jax.devices("cpu")[: split.num_devices]
    tables = {"target": table_of(on_expert_shards(spec, mesh.expert))}
    params = dummy_params(
        tables, mesh=mesh.mesh(devices), vocab_size=spec.vocab_size, dtype=jnp.float32
    )
    assert Engine(served(spec), split, H200).weight_bytes == bytes_each(params)


def info(path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    main(["info", str(path), "--json", *words])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["devices"]
    return found


def test_an_8b_on_eight_h200s(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | SIZES | HEADS))
    found = info(tmp_path, capsys, "--devices", "8xH200")
    assert [each["devices"] for each in found["choices"]] == [1, 2, 4, 8]
    one, _, four, eight = found["choices"]
    # Weights without the embedding table, and K and V of 2,048 tokens, at 4.49 TB/s.
    assert one["weight_bytes"] == 2 * (8_030_261_248)
    read = one["weight_bytes"] - 2 * 128256 * 4096 + 2048 * 131072
    assert one["one_row_ms"] == pytest.approx(1e3 * read / 4.49e12)
    # 85% of what a server has, without the weights.
    assert one["kv_tokens"] == int((0.85 * H200.usable_bytes - one["weight_bytes"]) // 131072)
    assert eight["one_row_ms"] > 1e3 * 64 * 30e-6  # 64 sums
    assert found["fastest"] == four  # sums go through peers' memory, and weights are read once
    assert (one["replicas"], four["replicas"]) == (8, 2)
    few = info(tmp_path, capsys, "--devices", "8xH200", "--requests", "1")
    assert few["fastest"] == few["quickest"] == few["choices"][2]
    # A v5e holds the weights, but not the caches too.
    v5e = info(tmp_path, capsys, "--devices", "16xv5e")
    assert v5e["choices"][0]["devices"] == 2
    assert v5e["choices"][-1]["flags"] == "--tp-size 16 --nnodes 4"


def test_experts_are_split_whole_or_in_parts() -> None:
    spec = with_experts(tiny_target_config())
    load = Load(requests=8, context=16)
    found = advise(served(spec), read_devices("--devices", "4xv6e"), load, fraction=0.85)
    assert [each.flags for each in found.choices] == [
        "--tp-size 1",
        "--tp-size 2",
        "--tp-size 2 --ep-size 2",
        "--tp-size 2 --dp-size 2 --enable-dp-attention --ep-size 2",
        "--tp-size 4",
        "--tp-size 4 --ep-size 4",
        "--tp-size 4 --dp-size 4 --enable-dp-attention --ep-size 4",
        "--tp-size 4 --dp-size 2 --enable-dp-attention --ep-size 4",
    ]
    by_flags = {each.flags: each for each in found.choices}
    tensor, ranks = by_flags["--tp-size 4"], found.choices[-2]
    # Two kv heads on four devices are there twice; ranks have other tokens each.
    assert ranks.kv_tokens > 1.9 * tensor.kv_tokens


def test_the_command_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair: TinyPair = write_tiny_pair(tmp_path)
    target, draft = str(pair.target_path), str(pair.draft_path)
    assert main(["info", target, "--devices", "2xv6e", "--dtype", "float32"]) == 0
    alone = capsys.readouterr().out.splitlines()
    assert alone[-1] == "  quickest single request: 2 engines, each with --tp-size 1"
    assert main(["info", draft, "--target", target, "--devices", "v6e"]) == 0
    capsys.readouterr()
    assert main(["info", draft, "--devices", "v6e"]) == 2
    assert "expected --target too" in capsys.readouterr().err
    assert main(["info", target, "--devices", "8xH900"]) == 2
    assert "such as 8xH200 or 4xv6e, of A100, H100" in capsys.readouterr().err
    assert main(["info", target, "--devices", "8xH200", "--requests", "0"]) == 2
    assert "--requests is 0; expected at least 1" in capsys.readouterr().err


def test_a_model_that_does_not_fit_is_refused() -> None:
    spec = tiny_target_config()
    load = Load(requests=1, context=10**9)
    with pytest.raises(ConfigError, match="--devices is 8xH200; expected more or larger ones"):
        advise(served(spec), H200, load, fraction=0.85)
