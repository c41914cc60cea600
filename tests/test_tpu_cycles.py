"""The estimates of TPU times: bundles, the simulator, the costs of a step, and CI's bounds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.tpu_cycles.bundles import inner_loop, loops, read
from benchmarks.tpu_cycles.chips import CHIPS, collective_us
from benchmarks.tpu_cycles.hlo import Module
from benchmarks.tpu_cycles.nodes import crossing
from benchmarks.tpu_cycles.scalar_core import GRANULE_BYTES, Core, Program
from benchmarks.tpu_cycles.step_time import KernelTime, StepTime
from benchmarks.tpu_programs import Job
from tests.engine import step_watch
from tests.engine.compiled_text import Instruction
from tests.engine.step_watch import Bounds, over_bounds, watched

V6E = CHIPS["v6e"]
GRANULES = 2048
# A kernel that copies as many blocks as its operand says, one after the other.
LISTING = """
     0   :  { %s0_s0 = inlined_call_operand.<no memory space> [shape: s32[1], index: 0, kind: input, shape index: {}]  ;;  %s1_s1 = inlined_call_operand.hbm [shape: f32[8], index: 1, kind: input, shape index: {}]  ;;  %s9_s2 = smov 0 }
   0x1 LB: > { %s2_s2 = sphi %s9_s2, %s3_s2  ;;  %7 = dma.hbm_to_vmem [thread:$0]  /*hbm=*/%s1_s1, /*size_in_granules=*/2048, /*vmem=*/[#allocation2], /*dst_syncflagno=*/[#allocation3] /* loc("/a/kernel.py":7:1) a comment
of two lines */ } /* Start region 5 */
   0x2   : > { %8 = dma.done.wait [#allocation3], 2048  ;;  %s3_s2 = sadd.s32 1, %s2_s2 }
   0x3   : > { %p4_p0 = scmp.ge.s32.totalorder %s3_s2, %s0_s0  ;;  %v1 = vmatmul.bf16.gmra.mxu0 %v0 }
   0x4   : > { %9 = sbr.rel (!%p4_p0) target = $region5 }
   0x5   : > { %v2_v2 = vld [vmem:[%s1_s1]] }
   0x6   : > {  }
   0x7   : > {  }
   0x8   :  {  } /* End region 5 */
   0x9 PF:  { %10 = sfence }
"""  # noqa: E501


@pytest.fixture
def program(tmp_path: Path) -> Program:
    path = tmp_path / "kernel-01-final_bundles.txt"
    path.write_text(LISTING)
    return Program(read(path))


def test_a_listing_is_read_with_its_loop(program: Program) -> None:
    assert len(program.bundles) == 10
    (loop,) = loops(program.bundles)
    assert loop == inner_loop(program.bundles)
    assert (loop.start, loop.depth, loop.own, loop.products) == (1, 1, 8, 1)
    assert program.bundles[1].location == "kernel.py:7"


def test_a_kernel_takes_its_bundles_and_its_waits(program: Program) -> None:
    run = Core(program, V6E, {0: [3]}).run()
    copied = GRANULES * GRANULE_BYTES
    # A copy is awaited one bundle after it starts: its latency and its share of the bandwidth.
    wait = copied / (V6E.hbm_gb_s / V6E.ghz) + V6E.latency_us * V6E.ghz * 1e3 - 1
    assert run.bundles == 2 + 3 * 8
    assert run.waits == pytest.approx(3 * wait)
    assert run.cycles == pytest.approx(run.bundles + run.waits)
    assert (run.hbm_bytes, run.copies) == (3 * copied, {"hbm_to_vmem": 3})
    assert run.faults == {}
    assert run.us(V6E) == pytest.approx(run.cycles / V6E.ghz / 1e3)


HLO = """HloModule step

%region_2 (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %sum = bf16[] add(%a, %b)
}

%fused_product (p0: bf16[1024,4096], p1: bf16[64,1024]) -> bf16[64,4096] {
  %p0 = bf16[1024,4096]{1,0:T(8,128)(2,1)} parameter(0)
  %p1 = bf16[64,1024]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  ROOT %dot = bf16[64,4096]{1,0:T(8,128)(2,1)S(1)} convolution(%p1, %p0), dim_labels=bf_io->bf
}

%fused_rows (t: bf16[9999,4096], i: s32[64]) -> bf16[64,4096] {
  %t = bf16[9999,4096]{1,0:T(8,128)(2,1)} parameter(0)
  %i = s32[64]{0:T(128)S(1)} parameter(1)
  ROOT %rows = bf16[64,4096]{1,0:T(8,128)(2,1)S(1)} gather(%t, %i), offset_dims={1}
}

ENTRY %main (w: bf16[1024,4096]) -> bf16[64,4096] {
  %w = bf16[1024,4096]{1,0:T(8,128)(2,1)} parameter(0), metadata={op_name="params[\\'target\\'][\\'layers\\'][0][\\'out\\'][\\'kernel\\']"}
  %table = bf16[9999,4096]{1,0:T(8,128)(2,1)} parameter(1)
  %ids = s32[64]{0:T(128)S(1)} parameter(2)
  %x = bf16[64,1024]{1,0:T(8,128)(2,1)S(1)} parameter(3)
  %gather_fusion = bf16[64,4096]{1,0:T(8,128)(2,1)S(1)} fusion(%table, %ids), kind=kCustom, calls=%fused_rows
  %copy-start = (bf16[1024,4096]{1,0:T(8,128)(2,1)S(1)}, bf16[1024,4096]{1,0:T(8,128)(2,1)}, u32[]) copy-start(%w)
  %fusion.1 = bf16[64,4096]{1,0:T(8,128)(2,1)S(1)} fusion(%w, %x), kind=kOutput, calls=%fused_product, backend_config={"window_config":{"estimated_cycles":"100","cost_model_type":"COST_MODEL_TYPE_CLASSIC"}}
  %psum.1 = bf16[64,4096]{1,0:T(8,128)(2,1)S(1)} all-reduce(%fusion.1), to_apply=%region_2
  %stub_paged_attention_rows_4.1 = bf16[64,4096]{1,0:T(8,128)(2,1)S(1)} custom-call(%psum.1), custom_call_target="tpu_custom_call"
  %copy-done = bf16[1024,4096]{1,0:T(8,128)(2,1)S(1)} copy-done(%copy-start)
  ROOT %fusion.2 = bf16[64,4096]{1,0:T(8,128)(2,1)S(1)} fusion(%copy-done, %x), kind=kOutput, calls=%fused_product, backend_config={"bundle_analysis_data":{"estimated_cycles":"17510"},"window_config":{"estimated_cycles":"1"}}
}
"""  # noqa: E501


def four_us(_: Instruction) -> KernelTime:
    return KernelTime(us=4.0, num_bytes=0.0)


def test_a_step_is_the_sum_of_its_operations() -> None:
    time = StepTime(Module(HLO), chip=V6E, devices=4, kernels=four_us)
    by_name = {cost.name: cost for cost in time.costs}
    weight = 1024 * 4096 * 2
    # Bound by bytes, since the cost model's cycles are fewer; then by the evaluator's cycles.
    assert by_name["fusion.1"].us == pytest.approx(weight / V6E.bytes_per_us)
    assert by_name["fusion.2"].us == pytest.approx(10.0)
    assert by_name["fusion.1"].flops == 2 * 64 * 1024 * 4096
    # A gather reads its rows, not the table.
    assert by_name["gather_fusion"].num_bytes == 64 * 4096 * 2
    ring = collective_us("all-reduce", num_bytes=64 * 4096 * 2, devices=4, chip=V6E)
    assert by_name["psum.1"].us == pytest.approx(ring)
    # The prefetch has what the kernel and the sum leave, which is enough.
    assert "copy-done" not in by_name
    assert time.missing == []
    layers = time.by("part")["layers"]
    assert layers == pytest.approx(time.us - by_name["gather_fusion"].us)
    assert time.at_depth(10, compiled=2) == pytest.approx(time.us + 4 * layers)


def test_a_collective_that_is_started_runs_beside_a_kernel() -> None:
    sync = StepTime(Module(HLO), chip=V6E, devices=4, kernels=four_us)
    text = HLO.replace(
        "%psum.1 = bf16[64,4096]{1,0:T(8,128)(2,1)S(1)} all-reduce(",
        "%psum.1 = (bf16[64,4096]{1,0:T(8,128)(2,1)S(1)}, bf16[64,4096]{1,0:T(8,128)(2,1)S(1)})"
        " all-reduce-start(",
    ).replace(
        "  %copy-done =",
        "  %sum-done = bf16[64,4096]{1,0:T(8,128)(2,1)S(1)} all-reduce-done(%psum.1)\n"
        "  %copy-done =",
    )
    beside = StepTime(Module(text), chip=V6E, devices=4, kernels=four_us)
    assert sync.us - beside.us == pytest.approx(4.0)  # the kernel's


def test_a_wait_for_weights_is_counted() -> None:
    text = HLO.replace("all-reduce(%fusion.1), to_apply=%region_2", "bitcast(%fusion.1)")
    time = StepTime(Module(text), chip=V6E, devices=4, kernels=lambda _: None)
    assert time.by("kind")["wait for weights"] > 4.0  # 5.1 us of copying had nothing to hide it
    assert time.missing == ["paged_attention_rows_4: no time is given for the kernel"]


def test_the_crossing_of_a_ratio() -> None:
    points = [(1, 1.0), (16, 1.2), (64, 1.6)]
    assert crossing(points, 1.1) == pytest.approx(8.5)
    assert crossing(points, 1.4) == pytest.approx(40.0)
    assert crossing(points, 2.0) is None


JOB = Job(model="small", topology="v6e:2x2", shape="0/1/1", program="decode B=64")
GOOD = Bounds(collectives=1, large_copies=0, loops=0, sorts=0, inner_loops={"attention": 100})


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("%r = bf16[64,4096]{1,0} all-reduce(%fusion.1)", "collectives is 2; expected at most 1"),
        ("%c = bf16[1024,4096]{0,1} copy(%w)", "large_copies is 1; expected at most 0"),
        ("%l = (s32[], f32[64]) while(%w), body=%region_2", "loops is 1; expected at most 0"),
        ("%s = f32[64,32064] sort(%w), to_apply=%region_2", "sorts is 1; expected at most 0"),
    ],
    ids=["collective", "copy", "loop", "sort"],
)
def test_a_planted_regression_exceeds_the_bounds(
    line: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_watch, "BOUNDS", {str(JOB): GOOD})
    assert over_bounds(JOB, watched(HLO), {"attention": 100}) == []
    planted = re.sub(r"(  ROOT %fusion\.2)", rf"  {line}\n\1", HLO)
    assert over_bounds(JOB, watched(planted), {"attention": 100}) == [fault]


def test_a_longer_inner_loop_and_a_lost_kernel_exceed_the_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_watch, "BOUNDS", {str(JOB): GOOD})
    assert over_bounds(JOB, watched(HLO), {"attention": 101}) == [
        "the inner loop of attention has 101 bundles; expected at most 100"
    ]
    assert over_bounds(JOB, watched(HLO), {}) == ["the kernels are []; expected ['attention']"]
