"""The benchmarks themselves, on a CPU at tiny shapes: they run, survive failures and say the truth.

Whether anything is fast is not asked here.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks import peers
from benchmarks.environment import without_paths
from benchmarks.floors import experts_touched, read_bytes
from benchmarks.h200_table import (
    Options,
    Record,
    cells_of,
    engine_arguments,
    main,
    run_mode,
    start_kind,
    table,
    target_floor_ms,
)
from benchmarks.step_parts import (
    ACCEPT,
    ADVANCE,
    ATTENTION_AND_WRITES,
    KV_WRITES,
    PRODUCTS,
    PROPOSE,
    Step,
    floors_ms,
    parts,
)
from benchmarks.step_profile import compiled, prepare, profile, step_of
from benchmarks.step_profile import table as profile_table
from benchmarks.step_timing import on_mesh
from benchmarks.workloads import MODES, WORKLOADS, Workload
from jspec.config.engine_args import EngineArgs
from jspec.config.limits import SpeculativeConfig
from jspec.device.batch import DraftTree
from jspec.models.decoder import Decoder
from jspec.models.files.checkpoint import load_model_spec, read_formats
from jspec.models.heads.eagle3_config import load_eagle3_config
from jspec.models.placement import abstract_params
from jspec.pallas_kernels.bundles import OPS
from jspec.pallas_kernels.shapes import MODELS
from jspec.spec.model_spec import DenseSpec, MoESpec
from jspec.speculative.drafter import NoDrafter
from jspec.speculative.step import StepProgram

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
    found = read_formats(tmp_path / "target", target, has_files=False)
    assert found == dict(workload.formats)
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


def test_the_table_is_the_one_of_the_peers() -> None:
    """Every figure of a peer has a cell, and the other way round but for sizes nobody measured."""
    cells = WORKLOADS["llama-3.1-8b"].cells()
    assert len(cells) == len(set(cells)) == 12 + 4 + 3
    assert all(peers.better_peer(*cell.split("/")) is not None for cell in cells)
    assert peers.better_peer("plain", "64") == ("SGLang", 8370.0)
    assert peers.better_peer("prefill", "1x1024") == ("vLLM", 28.8)
    assert peers.better_peer("tree", "2") is None
    assert peers.ratio("plain", "1", 2 * 210.3) == 2.0
    assert peers.ratio("prefill", "1x128", 6.1) == pytest.approx(2.0)
    assert peers.ratio("startup", "chain", 23.5) == 2.0


def test_cells_of_a_process() -> None:
    names = WORKLOADS["tiny"].cells()
    assert cells_of("tree", names) == ["tree/1", "tree/2", "startup/tree"]
    assert cells_of("plain", ["prefill/1x8", "chain/1", "plain/2"]) == ["prefill/1x8", "plain/2"]


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


def test_the_printed_table() -> None:
    cells = {
        "plain/1": {"tokens_per_second": 420.6},
        "chain/8": {"error": "XlaRuntimeError: no"},
        "prefill/1x128": {"ms": 6.1},
        "startup/tree": {"cold_seconds": 90.0, "warm_seconds": 23.5},
    }
    lines = table(cells, WORKLOADS["llama-3.1-8b"]).splitlines()
    assert peers.SOURCE in lines[0]
    assert lines[4:] == [
        "| plain/1 | 420.6 tokens/s | SGLang 210.3 | 2.00 |",
        "| chain/8 | XlaRuntimeError: no | SGLang 3592 |  |",
        "| prefill/1x128 | 6.1 ms | vLLM 12.2 | 2.00 |",
        "| startup/tree | 23.5 s warm | SGLang 47 | 2.00 |",
    ]


def test_arguments_and_paths() -> None:
    pairs = ["page_size=64", "compilation_cache_dir=", "dtype=float32"]
    expected = {"page_size": 64, "compilation_cache_dir": "", "dtype": "float32"}
    assert engine_arguments(pairs) == expected
    words = ["--output", "/a/b/c.json", "--engine", "compilation_cache_dir=/a/d", "--cells=x/1"]
    assert " ".join(without_paths(words)) == (
        "--output c.json --engine compilation_cache_dir=d --cells=x/1"
    )


def test_no_cell_matches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "tiny", "--cells", "nothing/*"]) == 2
    assert "no cell matches" in capsys.readouterr().err


@pytest.mark.slow
def test_one_mode_end_to_end(tmp_path: Path) -> None:
    """A cell that cannot run (a prompt longer than the context) costs only itself."""
    workload = replace(TINY, prefills=((1, 8), (1, 400)))
    names = ["prefill/1x8", "prefill/1x400", "plain/1", "startup/plain"]
    record = record_at(tmp_path / "table.json")
    run_mode("plain", names, record, options_of(workload, tmp_path / "programs"))
    cells = record.cells
    assert cells["prefill/1x8"]["ms"] > 0
    assert "expected fewer than the context length" in cells["prefill/1x400"]["error"]
    assert len(cells["plain/1"]["all_tokens_per_second"]) == 3
    assert cells["plain/1"]["acceptance_length"] == 1.0
    assert cells["startup/plain"]["cold_seconds"] > 0


@pytest.mark.parametrize(
    ("before", "is_warm", "kind"),
    [
        ({}, False, "cold_seconds"),
        ({"cold_seconds": 40.0}, True, "warm_seconds"),
        ({"cold_seconds": 40.0}, False, "second_seconds"),  # the cache did not know the programs
    ],
)
def test_a_second_start_that_compiles_again_does_not_pass_for_the_first(
    before: dict[str, float], is_warm: bool, kind: str
) -> None:
    assert start_kind(before, is_warm=is_warm) == kind


def test_an_engine_that_does_not_start(tmp_path: Path) -> None:
    record = record_at(tmp_path / "table.json")
    options = options_of(TINY, tmp_path, page_size=0)
    run_mode("chain", ["chain/1", "startup/chain"], record, options)
    assert [cell["error"].split(";")[0] for cell in record.cells.values()] == [
        "ConfigError: page_size is 0"
    ] * 2


def test_out_of_time(tmp_path: Path) -> None:
    code = main(["--model", "tiny", "--seconds", "0", "--output", str(tmp_path / "t.json")])
    assert code == 1
    cells = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))["cells"]
    assert set(cells) == set(WORKLOADS["tiny"].cells())
    assert {cell["skipped"] for cell in cells.values()} == {"out of time"}


@pytest.mark.slow_cases("tree]")
@pytest.mark.parametrize("mode", MODES)
def test_every_part_goes_round_in_a_loop(mode: str, tmp_path: Path) -> None:
    """What a part returns has the shapes of what it takes; traced only."""
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


@pytest.mark.slow
def test_a_step_profile(tmp_path: Path) -> None:
    """Every part of a tree's step is timed; nothing is claimed about the times."""
    extra = {"compilation_cache_dir": str(tmp_path / "programs")}
    bench = compiled(prepare(TINY, "tree", 1, tmp_path, extra))
    seen: list[dict[str, Any]] = []
    profile(bench, trace=False, put=lambda cell: seen.append(json.loads(json.dumps(cell))))
    last = seen[-1]
    assert {PRODUCTS, KV_WRITES, PROPOSE, ADVANCE, ACCEPT} < set(last["parts"])
    assert not [part for part, row in last["parts"].items() if "error" in row]
    assert last["whole_ms"] > 0
    assert last["engine_step_ms"] > 0
    assert len(seen) >= 8
    assert "| draft propose |" in profile_table("tree/1", last)


def test_the_floor_of_a_plain_step_at_batch_1_is_known() -> None:
    """3.34 ms for the target's weights at any small batch, 2.2 ms for 64 rows of 1,168 tokens."""
    config = WORKLOADS["llama-3.1-8b"].target
    target = Decoder(config, OPS["xla"])
    abstract = abstract_params(target.table, dtype=jnp.bfloat16)
    abstract = jax.tree.map(lambda x: Sized(x.shape, x.dtype), abstract)
    program = StepProgram(target=target, drafter=NoDrafter(), spec=SpeculativeConfig.plain())
    ids = jnp.zeros((64, 1), jnp.int32)
    step = Step(
        program=program,
        params={"target": abstract},
        rows=None,  # type: ignore[arg-type]
        tree=DraftTree(tokens=ids, parents=ids, depths=ids),
    )
    floors = floors_ms(step, committed=1167)
    assert floors["target products"] == pytest.approx(3.34, abs=0.02)
    assert floors["target attention"] == pytest.approx(2.2, abs=0.03)


class Sized:
    """A shape with its bytes, in place of an array."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.shape, self.dtype = shape, dtype
        self.size = 1
        for n in shape:
            self.size *= n
        self.nbytes = self.size * dtype.itemsize


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param("tiny-moe", marks=pytest.mark.exhaustive), "tiny-gpt-oss"]
)
def test_a_mixture_end_to_end(name: str, tmp_path: Path) -> None:
    workload = replace(WORKLOADS[name], batches=(1,), prefills=())
    record = record_at(tmp_path / "table.json")
    run_mode("chain", ["chain/1"], record, options_of(workload, tmp_path / "programs"))
    assert record.cells["chain/1"]["acceptance_length"] == 3.0
    assert record.cells["chain/1"]["target_floor_ms"] > 0


def test_what_a_step_of_a_mixture_reads_at_least() -> None:
    """The floors of Qwen3-30B-A3B that docs/benchmarks.md has, and gpt-oss's, whose windowed half
    of the layers reads 128 tokens of KV."""
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


def test_the_head_of_a_mixture_is_a_plain_dense_layer() -> None:
    head = WORKLOADS["gpt-oss-20b"].draft.layer.one_layer
    attention = head.attention
    assert (attention.window, attention.sinks, attention.qkv_bias) == (None, False, False)
    assert (attention.out_bias, attention.head_dim, attention.num_heads) == (False, 64, 64)
    assert head.ffn == DenseSpec(inner=4 * 2880)
    assert WORKLOADS["gpt-oss-20b"].draft.layer.hidden_size == 2880


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_the_whole_table_as_a_command(tmp_path: Path) -> None:
    """Started as a file; processes of its own; a second start with a warm cache."""
    command = [sys.executable, str(ROOT / "benchmarks" / "h200_table.py"), "--model", "tiny"]
    command += ["--output", str(tmp_path / "table.json")]
    wanted = ["prefill/1x8", "tree/2", "startup/tree"]
    command += ["--cells", *wanted, "--engine", f"compilation_cache_dir={tmp_path / 'programs'}"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=800
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "table.json").read_text(encoding="utf-8"))
    assert set(result["cells"]) == {*wanted, "startup/plain"}
    start = result["cells"]["startup/tree"]
    assert start["warm_seconds"] > 0
    assert start["cold_seconds"] > 0
    assert result["cells"]["tree/2"]["acceptance_length"] == 3.0
    assert str(tmp_path) not in json.dumps(result)
    assert "| tree/2 |" in done.stdout


@pytest.mark.parametrize("name", [name for name in MODELS if name in WORKLOADS])
def test_the_kernels_shapes_are_the_models(name: str) -> None:
    """Layers differ from the shape only by what it leaves out: windows and RoPE."""
    workload, shape = WORKLOADS[name], MODELS[name]
    target = workload.target
    assert (target.hidden_size, target.vocab_size) == (shape.hidden_size, shape.vocab_size)
    assert workload.formats == shape.formats
    for layer in target.layers:
        plain = replace(layer.attention, window=None, rope=shape.attention.rope)
        assert (plain, layer.ffn) == (shape.attention, shape.ffn)
