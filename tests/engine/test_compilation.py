"""The compiler options and the order of lowering for each program."""

from __future__ import annotations

import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.config.limits import Algorithm, ServeLimits, SpeculativeConfig
from jspec.device.parallel import Parallel
from jspec.engine.programs import compilation
from jspec.engine.programs.compilation import compiler_options
from jspec.engine.programs.program_keys import program_keys
from jspec.engine.steps.step_def import ProgramKey, ProgramShape
from jspec.engine.transfer import shape_of
from jspec.messages.plan import StepKind
from jspec.messages.step_options import PLAIN
from jspec.models.decoder import Decoder
from jspec.pallas_kernels.bundles import OPS
from jspec.speculative.drafter import NoDrafter
from jspec.speculative.step import StepProgram
from tests.support.flat_limits import flat_limits
from tests.support.tiny_models import tiny_target_config


def limits_of(shape: str) -> ServeLimits:
    steps, topk, nodes = (int(n) for n in shape.split("/"))
    draft_shape = SpeculativeConfig.plain()
    if steps:
        draft_shape = SpeculativeConfig(
            algorithm=Algorithm.EAGLE3, num_steps=steps, topk=topk, num_draft_tokens=nodes
        )
    return flat_limits(
        draft_shape=draft_shape,
        num_slots=64,
        num_pages=4096,
        page_size=16,
        context_length=512,
        decode_buckets=(16, 64),
        prefill_buckets=(64, 2048),
        prefill_rows=4,
    )


@pytest.mark.parametrize(
    ("kind", "bucket", "shape", "has_triton"),
    [
        (StepKind.DECODE, 64, "0/1/1", False),
        (StepKind.DECODE, 16, "3/1/4", False),  # 64 tokens as well
        (StepKind.DECODE, 16, "0/1/1", True),
        (StepKind.DECODE, 64, "3/1/4", False),
        (StepKind.DECODE, 64, "3/4/16", True),
        (StepKind.PREFILL, 64, "3/4/16", True),  # only decoding was measured
    ],
)
def test_the_tokens_of_a_gpu_step_choose_its_products(
    kind: StepKind, bucket: int, shape: str, has_triton: bool
) -> None:
    key = ProgramKey(kind, bucket, PLAIN)
    options = compiler_options(key, limits_of(shape), platform="gpu", ops=OPS["gpu"])
    assert options.get("xla_gpu_enable_triton_gemm", True) is has_triton
    passes = options["xla_disable_hlo_passes"].split(",")
    assert passes[0] == "rematerialization"
    of_decoding = ["dot-strength-reduction", "dot-merger"]
    assert passes[1:] == (of_decoding if kind is StepKind.DECODE else [])


@pytest.mark.parametrize(
    ("bucket", "has_fp8", "has_triton"),
    [(512, True, True), (1024, True, False), (1024, False, True)],
)
def test_a_prompt_s_fp8_products_are_not_tuned_among_tritons(
    bucket: int, has_fp8: bool, has_triton: bool
) -> None:
    key = ProgramKey(StepKind.PREFILL, bucket, PLAIN)
    how: Any = {"platform": "gpu", "ops": OPS["gpu"], "has_fp8": has_fp8}
    options = compiler_options(key, limits_of("0/1/1"), **how)
    assert options.get("xla_gpu_enable_triton_gemm", True) is has_triton


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_elsewhere_the_compiler_is_left_alone(platform: str) -> None:
    key = ProgramKey(StepKind.DECODE, 64, PLAIN)
    assert compiler_options(key, limits_of("0/1/1"), platform=platform, ops=OPS["xla"]) == {}


@pytest.mark.parametrize(
    ("device_kind", "is_async"), [("TPU v5 lite", True), ("TPU v6 lite", False)]
)
def test_only_a_v5e_sums_while_it_multiplies(device_kind: str, *, is_async: bool) -> None:
    """Newer compilers refuse the option on other chips, and then no program would compile."""
    key, ops = ProgramKey(StepKind.DECODE, 64, PLAIN), OPS["tpu"].on(device_kind)
    options = compiler_options(key, limits_of("0/1/1"), platform="tpu", ops=ops)
    assert ("xla_tpu_enable_async_collective_fusion" in options) == is_async
    down = jnp.zeros((3584, 4096), jnp.bfloat16)
    assert [ops.sums_halves(down, shards) for shards in (1, 4)] == [False, is_async]


def test_a_gpu_without_the_kernels_keeps_its_products() -> None:
    key = ProgramKey(StepKind.DECODE, 64, PLAIN)
    options = compiler_options(key, limits_of("0/1/1"), platform="gpu", ops=OPS["xla"])
    passes = "rematerialization,dot-strength-reduction,dot-merger"
    assert options == {"xla_disable_hlo_passes": passes}


def test_an_option_that_the_compiler_does_not_know_is_left_out() -> None:
    lowered = jax.jit(lambda x: x + 1).lower(jnp.zeros(3))
    options = {"xla_of_another_day": 1, "xla_cpu_enable_fast_math": False, "xla_nor_this": True}
    compiled = compilation.compile_with(lowered, options)
    np.testing.assert_array_equal(compiled(jnp.zeros(3)), [1, 1, 1])


def test_an_option_with_a_wrong_value_is_still_an_error() -> None:
    lowered = jax.jit(lambda x: x + 1).lower(jnp.zeros(3))
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_cpu_enable_fast_math"):
        compilation.compile_with(lowered, {"xla_cpu_enable_fast_math": "perhaps"})


def test_programs_are_lowered_in_order_so_that_the_cache_knows_them_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A Pallas kernel's text depends on the kernels that were lowered before it."""
    lowered: list[tuple[ProgramKey, str]] = []

    class Lowered:
        def __init__(self, key: ProgramKey) -> None:
            self.key = key

        def compile(self, **_: Any) -> ProgramKey:
            time.sleep(0.01 if self.key[1] == 64 else 0.0)  # takes longer, so it ends later
            return self.key

    def lower(shape: ProgramShape, program: Any, **_: Any) -> Lowered:
        key = key_of[shape, program.options]
        lowered.append((key, threading.current_thread().name))
        return Lowered(key)

    monkeypatch.setattr(compilation, "lower", lower)
    limits = limits_of("0/1/1")
    mesh = Parallel().mesh(jax.devices()[:1])
    target = Decoder(tiny_target_config(), OPS["xla"])
    program = StepProgram(target=target, drafter=NoDrafter(), draft_shape=limits.draft_shape)
    keys = program_keys(limits)
    key_of = {(shape_of(key, limits), key.options): key for key in keys}
    found = compilation.compile_all(program, limits, mesh=mesh, params={}, state={})
    assert [key for key, _ in lowered] == list(keys)
    assert {name for _, name in lowered} == {threading.current_thread().name}
    assert found == {key: key for key in keys}


def test_no_array_without_elements_is_returned_as_it_came() -> None:
    state = {"features": jnp.zeros((4, 2, 0)), "ids": jnp.zeros((4, 2), jnp.int32)}
    run = compilation.of_rank(lambda _, state, flat: (state, flat))
    program = jax.make_jaxpr(run)({}, state, jnp.zeros((1, 3), jnp.int32))
    came = [x for x in program.jaxpr.outvars if any(x is taken for taken in program.jaxpr.invars)]
    assert [x.aval.shape for x in came] == [(4, 2)]
