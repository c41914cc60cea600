"""The one step from arguments, checkpoint and devices to a configuration; it needs no device."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.workloads import LLAMA_8B
from jspec.config.engine_args import EngineArgs
from jspec.config.limits import PriorityOrder
from jspec.config.resolved_config import ResolvedConfig
from jspec.config.shared_prefixes import SharingLimits
from jspec.engine.memory.pool_sizes import sharing_limits
from jspec.engine.resolving import CheckpointFacts, DeviceFacts, ops_of, resolve
from jspec.errors import ConfigError
from jspec.pallas_kernels import hopper
from jspec.pallas_kernels.bundles import OPS
from jspec.pallas_kernels.ops_gpu import GpuOps
from jspec.server.serve import describe_config

PLAIN = CheckpointFacts(
    model_path="/m", tokenizer_path="/t", max_position=4096, head_dims=(128, 64)
)
DRAFTED = dataclasses.replace(PLAIN, draft_path="/d")
CPU, TPU = DeviceFacts(platform="cpu"), DeviceFacts(platform="tpu", bytes_limit=16 * 10**9)
H200 = DeviceFacts(platform="gpu", compute_capability="9.0", bytes_limit=140 * 10**9)
A100 = DeviceFacts(platform="gpu", compute_capability="8.0", bytes_limit=80 * 10**9)
EAGLE: dict[str, Any] = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "d"}


def resolved(
    device: DeviceFacts = CPU, checkpoint: CheckpointFacts = PLAIN, **arguments: Any
) -> ResolvedConfig:
    return resolve(EngineArgs(**{"model_path": "m", **arguments}), checkpoint, device)


@pytest.fixture
def mosaic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this jax has the Hopper kernels' compiler."""
    monkeypatch.setattr(hopper, "has_mosaic_gpu", lambda: True)


def test_a_cpu() -> None:
    config = resolved(checkpoint=DRAFTED, **EAGLE)
    assert (config.dtype, config.kernels, config.attention_backend) == ("float32", "xla", "xla")
    assert (config.page_size, config.chunked_prefill_size, config.max_running_requests) == (
        16,
        256,
        8,
    )
    assert (config.decode_buckets, config.prefill_buckets) == ((1, 4, 8), (32, 256))
    assert (config.prefill_rows, config.max_queued_requests) == (4, 1024)
    assert config.compile_at_start == "common"  # eight programs are few
    assert config.context_length == 4096
    assert (config.model_path, config.tokenizer_path) == ("/m", "/t")
    assert config.speculative_draft_model_path == "/d"
    spec = config.speculative
    assert (spec.algorithm.name, spec.num_steps, spec.topk, spec.num_draft_tokens) == (
        "EAGLE3",
        3,
        1,
        4,
    )


def test_a_tpu() -> None:
    config = resolved(TPU)
    assert (config.dtype, config.kernels, config.attention_backend) == ("bfloat16", "tpu", "pallas")
    assert (config.page_size, config.chunked_prefill_size) == (64, 2048)
    v7x = dataclasses.replace(TPU, kind="TPU7x")
    assert (resolved(v7x).page_size, resolved(v7x, page_size=32).page_size) == (128, 32)
    assert config.decode_buckets == (1, 2, 4, 8, 16, 32, 48)
    assert config.compile_at_start == "first"
    assert not config.column_major


@pytest.mark.usefixtures("mosaic")
def test_a_hopper_gpu_has_its_own_kernels_where_they_serve() -> None:
    config = resolved(H200, DRAFTED, **EAGLE)
    assert (config.kernels, config.page_size, config.chunked_prefill_size) == ("gpu", 64, 8192)
    ops = ops_of(config)
    assert isinstance(ops, GpuOps)
    assert ops.column_major
    assert not ops_of(resolved(H200)).column_major
    assert ops_of(
        resolved(H200, speculative_algorithm="NGRAM")
    ).column_major  # no model, but a tree
    for device, arguments in ((A100, {}), (H200, {"dtype": "float32"}), (H200, {"page_size": 24})):
        other = resolved(device, **arguments)
        assert (other.kernels, other.attention_backend) == ("xla", "xla")
        assert other.chunked_prefill_size == 2048
    with pytest.raises(ConfigError, match=r"'pallas', with the GPU's compute capability 8.0"):
        resolved(A100, attention_backend="pallas")
    odd = dataclasses.replace(PLAIN, head_dims=(128, 80))
    with pytest.raises(ConfigError, match="'pallas', with head_dim 80; expected 64, 128 or 256"):
        resolved(H200, odd, attention_backend="pallas")


@pytest.mark.usefixtures("mosaic")
def test_a_hopper_gpu_reads_shared_prefixes_once_where_two_rows_fit_a_tile() -> None:
    def limits(device: DeviceFacts = H200, **arguments: Any) -> SharingLimits | None:
        config = resolved(device, DRAFTED, **{**EAGLE, **arguments})
        return sharing_limits(config, LLAMA_8B, ops_of(config))

    # 32 heads over 8: 16 queries of a chain, 4 rows a tile of 64; 4,096 bytes a key.
    expected = SharingLimits(rows_a_pack=4, pays_from=96 * 256, least_rows=16)
    assert limits() == expected
    plain = limits(speculative_algorithm="NONE", speculative_draft_model_path=None)
    assert plain == dataclasses.replace(expected, rows_a_pack=16)
    of_two = limits(tp_size=2)
    assert of_two == dataclasses.replace(expected, pays_from=2 * 96 * 256)
    tree = {"speculative_eagle_topk": 4, "speculative_num_draft_tokens": 16}
    assert limits(**tree) is None
    assert limits(disable_radix_cache=True) is None
    assert limits(disable_cascade_attn=True) is None
    assert limits(A100) is None


def test_prefill_programs_lie_close_where_prompts_do() -> None:
    config = resolved(TPU, chunked_prefill_size=8192)
    assert config.prefill_buckets == (
        *(128, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048),
        *(3072, 4096, 6144, 8192),
    )
    assert resolved(TPU, chunked_prefill_size=700).prefill_buckets == (
        *(128, 256, 384, 512, 640),
        700,
    )
    assert resolved(TPU, chunked_prefill_size=100).prefill_buckets == (100,)
    assert (config.prefill_budget_tokens, config.prefill_rows) == (2048, 16)
    assert resolved(TPU, prefill_max_requests=3).prefill_rows == 3
    assert resolved(TPU, prefill_budget_tokens=300).prefill_budget_tokens == 300
    assert resolved().prefill_budget_tokens == resolved().chunked_prefill_size
    assert resolved(prefill_budget_ms=20).prefill_budget_ms == 20
    with pytest.raises(
        ConfigError,
        match="prefill_budget_tokens is 300 and prefill_budget_ms 20; expected one of the two",
    ):
        resolved(prefill_budget_ms=20, prefill_budget_tokens=300)
    with pytest.raises(ConfigError, match="prefill_budget_ms is 0; expected a number above 0"):
        resolved(prefill_budget_ms=0)


def test_an_order_of_priorities() -> None:
    assert resolved().priority_order is PriorityOrder.OFF
    order: dict[str, Any] = {"enable_priority_scheduling": True}
    assert resolved(**order).priority_order is PriorityOrder.HIGH_FIRST
    both = {**order, "schedule_low_priority_values_first": True}
    assert resolved(**both).priority_order is PriorityOrder.LOW_FIRST
    with pytest.raises(ConfigError, match="enable_priority_scheduling is False; expected both"):
        resolved(schedule_low_priority_values_first=True)
    with pytest.raises(ConfigError, match="queue_time_limit is 0; expected seconds, more than 0"):
        resolved(queue_time_limit=0)


def test_what_was_given_wins() -> None:
    asked: dict[str, Any] = {
        "dtype": "float16",
        "page_size": 32,
        "max_running_requests": 2,
        "max_queued_requests": 5,
        "chunked_prefill_size": 64,
        "context_length": 100,
        "compile_at_start": "first",
        "overlap_depth": 2,
        "random_seed": 4,
        "max_total_tokens": 640,
    }
    config = resolved(**asked)
    assert {name: getattr(config, name) for name in asked} == asked


def test_plain_decoding_is_a_tree_of_one_node() -> None:
    config = resolved()
    assert config.speculative_algorithm == "NONE"
    assert (
        config.speculative_num_steps,
        config.speculative_eagle_topk,
        config.speculative_num_draft_tokens,
    ) == (0, 1, 1)
    assert config.speculative == EngineArgs(model_path="m").speculative


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        *(("NGRAM", {}), ("NEXTN", {}), ("EAGLE", {"enable_multi_layer_eagle": True})),
        *((name, {"speculative_draft_model_path": "d"}) for name in ("EAGLE", "STANDALONE")),
    ],
)
def test_a_drafter_is_resolved_to_itself(algorithm: str, more: dict[str, Any]) -> None:
    """The pool is sized for the resolved drafter, by whatever name the flags gave it."""
    given = {"speculative_algorithm": algorithm, **more}
    config = resolved(checkpoint=DRAFTED, **given)
    assert config.speculative == EngineArgs(model_path="m", **given).speculative
    assert resolve(config, DRAFTED, CPU) == config


def test_the_model_bounds_the_context() -> None:
    with pytest.raises(ConfigError, match="context_length is 4097; expected at most 4096, max_pos"):
        resolved(context_length=4097)


MAYBE_SIZE = st.none() | st.integers(1, 64)


@settings(deadline=None)
@given(
    device=st.sampled_from([CPU, TPU, H200, A100]),
    algorithm=st.sampled_from(["NONE", "NGRAM", "EAGLE3"]),
    slots=MAYBE_SIZE,
    chunk=MAYBE_SIZE,
    page=MAYBE_SIZE,
    start=st.sampled_from(["auto", "first", "all"]),
)
def test_nothing_is_left_open(
    device: DeviceFacts,
    algorithm: str,
    slots: int | None,
    chunk: int | None,
    page: int | None,
    start: str,
) -> None:
    """So resolving a resolved configuration changes nothing, and it can be a key."""
    path = "d" if algorithm == "EAGLE3" else None
    checkpoint = DRAFTED if path else PLAIN
    config = resolved(
        device,
        checkpoint,
        speculative_algorithm=algorithm,
        speculative_draft_model_path=path,
        max_running_requests=slots,
        chunked_prefill_size=chunk,
        page_size=page,
        compile_at_start=start,
    )
    assert resolve(config, checkpoint, device) == config
    assert hash(resolve(config, checkpoint, device)) == hash(config)
    assert "auto" not in {config.dtype, config.attention_backend, config.compile_at_start}
    assert config.kernels in OPS
    assert config.decode_buckets[-1] == config.max_running_requests
    assert config.prefill_buckets[-1] == config.chunked_prefill_size
    annotations = ResolvedConfig.__annotations__
    for name, kind in annotations.items():
        assert type(getattr(config, name)).__name__ == str(kind).split("[")[0], name


def test_all_of_it_is_shown() -> None:
    config = resolved(simulate_acceptance=2.5, checkpoint=DRAFTED, **EAGLE)
    values = config.values()
    assert {*EngineArgs.names(), "kernels", "decode_buckets"} <= set(values)
    assert json.loads(json.dumps(values))["prefill_buckets"] == [32, 256]
    line = describe_config(config)
    assert "simulate_acceptance=2.5" in line
    assert "dtype=float32" in line
    assert "None" not in line


def test_an_adaptive_engine_has_shapes_and_another_one_none() -> None:
    assert resolved(checkpoint=DRAFTED, **EAGLE).other_shapes == ()
    adaptive = resolved(speculative_adaptive=True, checkpoint=DRAFTED, **EAGLE)
    assert json.loads(json.dumps(adaptive.values()))["other_shapes"] == ["0/1/1", "1/1/2"]
    assert adaptive.speculative.num_steps == 3


def test_an_adaptive_engine_has_the_levels_of_its_file(tmp_path: Path) -> None:
    file = tmp_path / "candidates.json"
    file.write_text('{"candidate_steps": [2, 5]}')
    named = {"speculative_adaptive_config": str(file), "speculative_adaptive": True}
    adaptive = resolved(checkpoint=DRAFTED, **named, **EAGLE)
    assert [str(shape) for shape in adaptive.other_shapes] == ["2/1/3"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"speculative_adaptive": True}, "speculative_adaptive is True, but .* is NONE"),
        (
            {"speculative_adaptive": True, "simulate_acceptance": 2.0, **EAGLE},
            "speculative_adaptive is True, but simulate_acceptance is set",
        ),
        ({"speculative_adaptive_config": "f", **EAGLE}, "but speculative_adaptive is False"),
    ],
)
def test_shapes_are_chosen_only_where_acceptance_says_something(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(checkpoint=DRAFTED, **arguments)


def test_rows_are_divided_among_data_ranks_and_rounded_up() -> None:
    config = resolved(dp_size=4, max_running_requests=30)
    assert (config.max_running_requests, config.decode_buckets) == (32, (1, 4, 8))
    config = resolved(dp_size=2, tp_size=4, enable_dp_attention=True)
    assert (config.max_running_requests, config.decode_buckets, config.rank_size) == (
        16,
        (1, 4, 8),
        2,
    )
    with pytest.raises(ConfigError, match="tp_size is 4; expected a multiple of dp_size 3 with"):
        resolved(dp_size=3, tp_size=4, enable_dp_attention=True)
