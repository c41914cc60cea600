"""The benchmarks run on a CPU at tiny shapes; times are not checked."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import pytest

from benchmarks import peers
from benchmarks.floors import experts_touched, read_bytes
from benchmarks.h200_table import Options, Record, run_mode, target_floor_ms
from benchmarks.step_parts import ATTENTION_AND_WRITES, floors_ms, parts
from benchmarks.step_profile import prepare, step_of
from benchmarks.step_timing import on_mesh
from benchmarks.workloads import MODES, WORKLOADS, Workload
from jspec.config.engine_args import EngineArgs
from jspec.engine.weights.resident_formats import Wanted, resident_formats
from jspec.models.files.checkpoint import load_model_spec
from jspec.models.heads.eagle3_config import load_eagle3_config
from jspec.models.registry import table_of
from jspec.pallas_kernels.shapes import MODELS
from jspec.spec.layers.feed_forward import MoESpec

ROOT = Path(__file__).resolve().parents[1]
TINY = replace(WORKLOADS["tiny"], batches=(1,), prefills=((1, 8),))


def options_of(workload: Workload, cache: Path, **engine: Any) -> Options:
    return Options(
        workload=workload,
        acceptance=3.0,
        deadline=time.monotonic() + 600,
        engine={"compilation_cache_dir": str(cache), **engine},
    )


def record_at(path: Path) -> Record:
    return Record(path, environment=lambda: {"chip": "test"})


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=lambda w: w.name)
def test_workloads_are_what_the_loaders_read(workload: Workload, tmp_path: Path) -> None:
    workload.write_configs(tmp_path)
    target = load_model_spec(tmp_path / "target")
    assert target == workload.target
    wanted = Wanted(bundle="gpu", dtype="bfloat16", shards=1)
    found = resident_formats(tmp_path / "target", table_of(target), wanted, has_files=False)
    assert found == workload.formats
    assert load_eagle3_config(tmp_path / "draft", target=target) == workload.draft
    for mode, shape in MODES.items():
        args = EngineArgs.from_mapping(workload.arguments(mode, tmp_path, acceptance=3.0))
        spec = args.speculative
        expected = shape or (0, 1, 1)
        assert (spec.num_steps, spec.topk, spec.num_draft_tokens) == expected
        assert spec.simulate_acceptance == (3.0 if shape else None)
        assert args.max_running_requests == max(workload.batches)
        assert args.max_total_tokens is not None
        assert args.context_length is not None
        longest = workload.prompt_len + workload.long_run
        assert args.max_total_tokens >= max(workload.batches) * longest
        assert args.context_length > max(length for _, length in workload.prefills)


def test_a_record_is_whole_after_every_cell(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "table.json"
    record = record_at(path)
    record.put("startup/plain", {"cold_seconds": 9.0})
    record.put("plain/1", {"error": "it broke"})
    again = record_at(path)
    assert again.is_done("startup/plain")
    assert not again.is_done("plain/1")
    again.put("startup/plain", {"warm_seconds": 2.0})
    again.forget_failures()
    stored = json.loads(path.read_text(encoding="utf-8"))
    assert stored["cells"] == {"startup/plain": {"cold_seconds": 9.0, "warm_seconds": 2.0}}
    assert stored["environment"] == {"chip": "test"}
    assert stored["peers"] == peers.SOURCE


@pytest.mark.slow
def test_one_mode_end_to_end(tmp_path: Path) -> None:
    """A cell that fails (a prompt longer than the context) leaves the others alone."""
    workload = replace(TINY, prefills=((1, 8), (1, 400)))
    names = ["prefill/1x8", "prefill/1x400", "plain/1", "startup/plain"]
    record = record_at(tmp_path / "table.json")
    run_mode("plain", names, record, options_of(workload, tmp_path / "programs"))
    cells = record.cells
    assert cells["prefill/1x8"]["ms"] > 0
    assert "maximum context length is" in cells["prefill/1x400"]["error"]
    assert len(cells["plain/1"]["all_tokens_per_second"]) == 3
    assert cells["plain/1"]["acceptance_length"] == 1.0
    assert cells["startup/plain"]["cold_seconds"] > 0


@pytest.mark.slow_cases("tree]")
@pytest.mark.parametrize("mode", ["plain", "tree"])
def test_every_part_goes_round_in_a_loop(mode: str, tmp_path: Path) -> None:
    """A part returns the shapes that it takes; traced only."""
    bench = prepare(TINY, mode, 1, tmp_path, {"compilation_cache_dir": ""})
    names: list[str] = []

    def trace_all(state: Any, params: Any) -> None:
        models = replace(bench.models, params=params)
        step = step_of(replace(bench, models=models), state)
        for part in parts(step, state):
            body = on_mesh(part.body, bench.mesh)
            out = body(part.carry, step.rows, step.tree, part.arrays)
            shapes = jax.tree.map(lambda x: (x.shape, x.dtype), (out, part.carry))
            assert shapes[0] == shapes[1], part.name
            names.append(part.name)
        assert set(floors_ms(step, committed=40)) >= set(names) - {ATTENTION_AND_WRITES}

    jax.eval_shape(trace_all, bench.state(), bench.models.params)
    assert len(names) == (4 if mode == "plain" else 7)


def test_what_a_step_of_a_mixture_reads_at_least() -> None:
    """The figures of docs/benchmarks.md; gpt-oss's windowed layers read 128 tokens of KV."""
    qwen, oss = WORKLOADS["qwen3-30b-a3b"], WORKLOADS["gpt-oss-20b"]
    found = [target_floor_ms(qwen, "plain", batch) for batch in (1, 8, 32, 64)]
    assert found == pytest.approx([1.37, 5.96, 12.6, 14.9], rel=0.03)
    moe = oss.target.layers[0].ffn
    assert isinstance(moe, MoESpec)
    assert experts_touched(moe, tokens=1) == pytest.approx(4)
    assert 31.9 < experts_touched(moe, tokens=256) <= 32
    of = partial(read_bytes, oss.target, batch=64, nodes=1, dtype="bfloat16")
    assert of(context=1128) - of(context=128) == 64 * 12 * 1000 * 2 * 8 * 64 * 2
    # All experts once: 32 of 24.9 million matrices' numbers in each of 24 layers.
    assert of(context=0) > 2 * 24 * 0.999 * 32 * 3 * 2880 * 2880
    llama = WORKLOADS["llama-3.1-8b"]
    assert target_floor_ms(llama, "plain", 1) == pytest.approx(3.38, rel=0.02)


@pytest.mark.parametrize("name", [name for name in MODELS if name in WORKLOADS])
def test_the_kernels_shapes_are_the_models(name: str) -> None:
    """A shape leaves out windows and RoPE."""
    workload, shape = WORKLOADS[name], MODELS[name]
    target = workload.target
    assert (target.hidden_size, target.vocab_size) == (shape.hidden_size, shape.vocab_size)
    assert workload.formats == shape.formats
    for layer in target.layers:
        plain = replace(layer.attention, window=None, rope=shape.attention.rope)
        assert (plain, layer.ffn) == (shape.attention, shape.ffn)
