"""Steps at real shapes compile for TPUs, ahead of time, and fit: plain, chain and tree.

With two layers of each model and a pool that fills the chips, the pool is not copied, and weights
are read in the order in which they are stored. By hand every chip and every model compiles all nine
kinds of program (tpu_programs.few); CI compiles one of each model for a v6e (fewest).
Needs the TPU compiler (`pip install -e '.[tpu]'`), not a TPU: no program runs. All layers:
`python -m benchmarks.tpu_compile`.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tpu_compile import main as compile_all
from benchmarks.tpu_compile import what
from benchmarks.tpu_programs import (
    LEAST_EFFORT,
    MODELS,
    PROGRAMS,
    SHAPES,
    SLICES,
    CompileError,
    Job,
    blocks,
    few,
    fewest,
    full_depth,
    hybrid,
    multi_layer,
    quantized,
    run_job,
    sparse,
)
from benchmarks.workloads import WORKLOADS
from jspec.pallas_kernels.attention.tpu import MAX_QUERIES_PER_ROW
from jspec.pallas_kernels.experts.tpu import choose_tile_m
from jspec.spec.layers.feed_forward import MoESpec
from tests.engine.step_watch import BOUNDS, dump_environment, inner_loops, over_bounds

LAYERS = 2
CI = fewest(LAYERS)
# Listing the kernels of a step takes as long as compiling it, so CI lists those of one step.
LISTED = tuple(job for job in CI if str(job) in BOUNDS and BOUNDS[str(job)].inner_loops)
LISTED_IN_CI = next(job for job in LISTED if job.model == "qwen3-30b-a3b")
# The cheapest: a block's forward without a tree.
CI_BLOCK = next(job for job in blocks() if (job.drafter, job.shape) == ("dflash", "7/1/8"))
# Seconds of one process, after which it begins again. On slow cores beside two suites a program
# took 170.
TIMEOUT = 600.0

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="the TPU compiler (libtpu) is not installed"
)


def chip(job: Job) -> str:
    return job.topology.partition(":")[0]


def test_every_chip_and_every_model_meets_every_kind() -> None:
    jobs = few(LAYERS)
    kinds = set(itertools.product(SHAPES, PROGRAMS))
    chips = {"v5e", "v5p", "v6e", "tpu7x"}
    assert {(job.model, chip(job)) for job in jobs} == set(itertools.product(MODELS, chips))
    for name in MODELS:
        assert {(job.shape, job.program) for job in jobs if job.model == name} == kinds
    for name in chips:
        assert {(job.shape, job.program) for job in jobs if chip(job) == name} == kinds
    assert len(jobs) == len(set(jobs)) == 9 * len(chips)
    assert {job.model for job in CI} == set(MODELS)
    assert {job.shape for job in CI} == set(SHAPES)
    assert {job.program for job in CI} == set(PROGRAMS)
    assert {chip(job) for job in CI} == {"v6e"}


def test_the_full_matrix_names_each_program_once() -> None:
    jobs = full_depth()
    assert len(jobs) == len({str(job) for job in jobs})
    assert len(jobs) == 9 * sum(len(topologies) for topologies in SLICES.values())
    assert all(job.layers is None for job in jobs)


def of_experts(line: str) -> bool:
    """Return True if the line rewrites a stack of experts, [X, K, N]."""
    return what(line).partition("]")[0].count(",") == 2


def experts_are_xla(job: Job) -> bool:
    """Return True if a step has enough tokens per expert for XLA's product instead of the
    kernel."""
    moe = WORKLOADS[job.model].target.layers[0].ffn
    if not isinstance(moe, MoESpec):
        return False
    nodes = int(job.shape.rpartition("/")[2])
    tokens = 1920 if job.program.startswith("prefill") else 64 * nodes
    return choose_tile_m(tokens * moe.top_k, moe.num_experts) is None


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT + 60)
@needs_compiler
@pytest.mark.parametrize(
    ("job", "is_listed"),
    [
        *(
            pytest.param(
                job,
                job == LISTED_IN_CI,
                id=str(job),
                marks=() if job in CI else pytest.mark.exhaustive,
            )
            for job in few(LAYERS)
        ),
        *(
            pytest.param(job, True, id=f"{job} listed", marks=pytest.mark.exhaustive)
            for job in LISTED
            if job != LISTED_IN_CI
        ),
    ],
)
def test_a_step_compiles_for_a_tpu(job: Job, is_listed: bool, tmp_path: Path) -> None:
    is_watched = str(job) in BOUNDS
    environment = {**LEAST_EFFORT, **(dump_environment(tmp_path) if is_listed else {})}
    found = run_job(job, timeout=TIMEOUT, environment=environment)
    print({name: value for name, value in found.items() if "copies" not in name})
    if is_watched:
        loops = inner_loops(tmp_path) if is_listed else BOUNDS[str(job)].inner_loops
        assert over_bounds(job, found["watched"], loops) == []
    assert found["program"] == job.program
    assert found["layers"] == LAYERS
    assert found["kernels"] >= LAYERS, "a layer without a Mosaic kernel"
    assert found["pool_copies"] == []
    known = experts_are_xla(job)  # its grouped product transposes stacks that are stored transposed
    assert [x for x in found["weight_copies"] if not (known and of_experts(x))] == []
    assert found["device_bytes"] < found["hbm_bytes"]
    assert found["pool_bytes"] > found["hbm_bytes"] / 3


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(2 * TIMEOUT + 60)
@needs_compiler
@pytest.mark.parametrize("job", multi_layer()[1:3], ids=str)
def test_a_multi_layer_draft_compiles_for_a_tpu(job: Job) -> None:
    """Decode steps of layers with different pools, none of which is copied."""
    found = run_job(job, timeout=TIMEOUT, environment=LEAST_EFFORT)
    assert (found["program"], found["layers"]) == (job.program, 2)
    assert found["kernels"] >= 2 + 5, "a forward of a layer without a Mosaic kernel"
    assert (found["pool_copies"], found["weight_copies"]) == ([], [])
    assert found["device_bytes"] < found["hbm_bytes"]
    assert found["pool_bytes"] > found["hbm_bytes"] / 3


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT + 60)
@needs_compiler
@pytest.mark.parametrize(
    "job",
    [
        pytest.param(job, id=str(job), marks=() if job == CI_BLOCK else pytest.mark.exhaustive)
        for job in blocks()
    ],
)
def test_a_block_drafter_compiles_for_a_tpu(job: Job) -> None:
    """A chain and trees of 64 and 256 nodes, whose block is one forward of the draft's layers."""
    found = run_job(job, timeout=TIMEOUT, environment=LEAST_EFFORT)
    assert (found["program"], found["layers"]) == (job.program, 2)
    nodes = int(job.shape.rpartition("/")[2])
    layers = 2 + 2 * (nodes <= MAX_QUERIES_PER_ROW)  # the target's are XLA's for larger trees
    assert found["kernels"] >= layers, "a layer of the draft or the target without a Mosaic kernel"
    assert (found["pool_copies"], found["weight_copies"]) == ([], [])
    assert found["device_bytes"] < found["hbm_bytes"]
    assert found["pool_bytes"] > found["hbm_bytes"] / 3


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT + 60)
@needs_compiler
@pytest.mark.parametrize(
    "job",
    [
        pytest.param(job, id=str(job), marks=pytest.mark.exhaustive if number else ())
        for number, job in enumerate(quantized())
    ],
)
def test_weights_of_8_bits_are_multiplied_as_they_are(job: Job) -> None:
    """Each of a layer's four products is native, of codes by codes; lm_head and the draft are
    bfloat16, and no weight is unpacked."""
    found = run_job(job, timeout=TIMEOUT, environment=LEAST_EFFORT)
    assert (found["program"], found["layers"]) == (job.program, 2)
    assert (found["pool_copies"], found["weight_copies"]) == ([], [])
    products = found["products"]
    native = {"w8a8_int8": "s8 s8 s32", "fp8": "f8e4m3fn f8e4m3fn f32"}[job.quantization or ""]
    assert products.pop(native) == 4 * 2
    assert set(products) <= {"bf16 bf16 f32", "bf16 bf16 bf16", "f32 f32 f32"}


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(2 * TIMEOUT + 60)
@needs_compiler
@pytest.mark.parametrize("job", hybrid(), ids=str)
def test_a_hybrid_target_and_its_layer_compile_for_a_tpu(job: Job) -> None:
    """States of rows stay where they are, as pages do; delta nets have no kernel."""
    found = run_job(job, timeout=TIMEOUT, environment=LEAST_EFFORT)
    assert (found["program"], found["layers"]) == (job.program, job.layers)
    assert found["kernels"] >= 2, "a layer with attention without a Mosaic kernel"
    assert (found["pool_copies"], found["weight_copies"]) == ([], [])
    assert found["device_bytes"] < found["hbm_bytes"]
    assert found["pool_bytes"] > found["hbm_bytes"] / 3


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(2 * TIMEOUT + 60)
@needs_compiler
@pytest.mark.parametrize("job", sparse(), ids=str)
def test_sparse_attention_compiles_for_a_tpu(job: Job) -> None:
    """Pools of latents and of index keys stay where they are; nothing here has a kernel."""
    found = run_job(job, timeout=TIMEOUT, environment=LEAST_EFFORT)
    assert (found["program"], found["layers"]) == (job.program, job.layers)
    assert (found["pool_copies"], found["weight_copies"]) == ([], [])
    assert found["device_bytes"] < found["hbm_bytes"]
    assert found["pool_bytes"] > found["hbm_bytes"] / 3


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT + 60)
@needs_compiler
def test_several_rounds_compile_for_a_tpu_and_copy_nothing() -> None:
    job = Job(
        model="small",
        topology="v6e:2x2",
        shape="3/1/4",
        program="decode B=64",
        layers=2,
        page_size=16,
        rounds=2,
    )
    found = run_job(job, timeout=TIMEOUT, environment=LEAST_EFFORT)
    assert found["pool_copies"] == []
    assert found["weight_copies"] == []
    assert found["kernels"] >= 2 * 2, "a layer of a round without a Mosaic kernel"


JOB = Job(model="small", topology="v5e:2x2", shape="0/1/1", program="decode B=64")


def process(*scripts: str) -> Callable[[Job], Sequence[str]]:
    """Return the commands of the first process of a job, the second, ..."""
    left = iter(scripts)
    return lambda _: [sys.executable, "-c", next(left)]


CRASH = "import os, signal, sys; print('at', file=sys.stderr); os.kill(os.getpid(), signal.SIGSEGV)"
HANG = "import time; time.sleep(60)"
GOOD = """print('a warning'); print('{"seconds": 1.5}')"""
WRONG = "raise ValueError('no such tile')"


@pytest.mark.slow_cases("hang]")
@pytest.mark.parametrize(
    ("bad", "ended"), [(CRASH, "signal 11"), (HANG, "no end within 5 s")], ids=["crash", "hang"]
)
def test_a_program_is_started_again_once_if_its_process_was_ended(bad: str, ended: str) -> None:
    found = run_job(JOB, timeout=5.0, command=process(bad, GOOD))
    assert found == {"seconds": 1.5, "ended": [ended]}


def test_two_crashes_or_an_error_are_errors_with_what_was_said() -> None:
    with pytest.raises(CompileError, match=r"(?s)decode B=64: signal 11, then signal 11.*at"):
        run_job(JOB, timeout=30.0, command=process(CRASH, CRASH))
    with pytest.raises(CompileError, match="no such tile"):
        run_job(JOB, timeout=30.0, command=process(WRONG))
    with pytest.raises(CompileError, match="0 programs are called so; expected one"):
        run_job(JOB, timeout=30.0, command=process("pass"))


def test_what_a_line_rewrites() -> None:
    line = "  %copy.7 = bf16[32,2880,720]{2,1,0:T(16,128)(2,1)} copy(%param.57), sharding={}"
    assert what(line) == "bf16[32,2880,720] copy"
    assert of_experts(line)
    assert not of_experts("  %copy.1 = bf16[201088,2880]{1,0:T(8,128)} copy(%param.48)")


def test_the_file_of_results_grows_and_keeps_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seen(job: Job, *, timeout: float) -> dict[str, Any]:
        assert timeout == 7.0
        if job.shape == "3/1/4":
            raise CompileError("signal 11, then signal 11")
        made = dict.fromkeys(("layers", "devices", "seconds", "temp_bytes", "pool_bytes"), 1)
        made |= {"num_pages": 1, "kernels": 2, "hbm_bytes": 4, "device_bytes": 3, "ended": []}
        return made | {"pool_copies": [], "weight_copies": ["%a = f32[2]{0} copy(%b)"]}

    monkeypatch.setattr("benchmarks.tpu_compile.run_job", seen)
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"{name} 1")
    path = tmp_path / "deep" / "tpu.json"
    words = ["--only", "*70b* decode B=64", "--timeout", "7", "--output", str(path)]
    assert compile_all(words) == 1
    stored = json.loads(path.read_text("utf-8"))
    assert stored["command"].startswith("python -m benchmarks.tpu_compile --only")
    plain, chain, tree = stored["cells"].values()
    assert plain == tree | {"command": plain["command"]}
    assert (plain["fits"], plain["pool_copies"], plain["weight_copies"]) == (True, 0, 1)
    assert (plain["copied"], plain["libtpu"]) == (["f32[2] copy"], "libtpu 1")
    assert "0/1/1" in plain["command"]
    assert chain["error"] == "signal 11, then signal 11"
    assert compile_all(["--only", "nothing", "--output", str(path)]) == 2
