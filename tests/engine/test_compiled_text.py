"""The searches of compiled text find what they look for, in real programs and in TPU text."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from tests.engine.compiled_text import instructions
from tests.engine.pool_copies import pool_copies
from tests.engine.weight_copies import weight_copies

# As the TPU compiler writes it: a fusion with a copy inside, then one line of each kind.
TPU_TEXT = """HloModule jit_step, is_scheduled=true
%fused_computation.1 (param_0.1: bf16[64,32]) -> bf16[64,32] {
  %param_0.1 = bf16[64,32]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %INSIDE
}

ENTRY %main.9 (p.1: bf16[64,32], p.2: bf16[9,16,4,128]) -> bf16[64,32] {
  %p.1 = bf16[64,32]{1,0:T(8,128)(2,1)} parameter(0), metadata={op_name="params"}
  %p.2 = bf16[9,16,4,128]{3,2,1,0:T(4,128)(2,1)} parameter(1)
  %bitcast.1 = bf16[64,32]{1,0:T(8,128)(2,1)} bitcast(%p.1)
  %dot.1 = bf16[64,32]{1,0:T(8,128)(2,1)} dot(%p.1, %p.1)
  %LINE
  ROOT %fusion.1 = bf16[64,32]{1,0} fusion(%p.1), kind=kLoop, calls=%fused_computation.1
}
"""
HARMLESS = "add.1 = bf16[64,32]{1,0} add(%param_0.1, %param_0.1)"
ROWS = "{1,0:T(8,128)(2,1)}"
COLUMNS = "{0,1:T(8,128)(2,1)}"


def program(line: str = "nothing.1 = s32[] constant(1)", inside: str = HARMLESS) -> str:
    return TPU_TEXT.replace("%LINE", f"%{line}").replace("%INSIDE", f"%{inside}")


def test_instructions_are_read() -> None:
    line = (
        f"copy-start.1 = (bf16[64,32]{COLUMNS[:-1]}S(1)}}, bf16[64,32]{ROWS}, u32[]{{:S(2)}}) "
        'copy-start(%p.1), metadata={op_name="jit(f)/copy(x)"}'
    )
    found = {x.name: x for x in instructions(program(line))}
    start = found["copy-start.1"]
    assert (start.opcode, start.operands, start.in_entry, start.in_fusion) == (
        "copy-start",
        ("p.1",),
        True,
        False,
    )
    to, source, flag = start.types
    assert (to.layout, to.space, source.layout, source.space) == ("0,1", 1, "1,0", 0)
    assert (to.shape, to.dtype, flag.shape, flag.space) == ((64, 32), "bf16", (), 2)
    assert found["add.1"].in_fusion
    assert found["add.1"].is_root
    assert not found["add.1"].in_entry


@pytest.mark.parametrize(
    "line",
    [
        f"copy.1 = bf16[64,32]{COLUMNS} copy(%p.1)",
        f"copy.1 = bf16[64,32]{COLUMNS} copy(%bitcast.1)",
        f"transpose.1 = bf16[32,64]{ROWS} transpose(%p.1), dimensions={{1,0}}",
        "reshape.1 = bf16[2048]{0} reshape(%bitcast.1)",
        f"convert.1 = f32[64,32]{ROWS} convert(%p.1)",
        f"copy-start.1 = (bf16[64,32]{COLUMNS[:-1]}S(1)}}, bf16[64,32]{ROWS}, u32[]) "
        "copy-start(%p.1)",
        f"copy-start.1 = (bf16[64,32]{ROWS}, bf16[64,32]{ROWS}, u32[]) copy-start(%p.1)",
    ],
)
def test_a_rewritten_weight_is_found(line: str) -> None:
    assert len(weight_copies(program(line), [(64, 32)])) == 1
    assert weight_copies(program(line), [(64, 16)]) == []


@pytest.mark.parametrize(
    "inside",
    [
        f"copy.1 = bf16[64,32]{COLUMNS} copy(%param_0.1)",
        f"transpose.1 = bf16[32,64]{ROWS} transpose(%param_0.1), dimensions={{1,0}}",
    ],
)
def test_a_weight_rewritten_inside_a_fusion_is_found(inside: str) -> None:
    assert len(weight_copies(program(inside=inside), [(64, 32)])) == 1


def test_other_tiles_in_a_fusion_rewrite_no_weight() -> None:
    inside = "copy.1 = bf16[64,32]{1,0:T(16,128)(2,1)} copy(%param_0.1)"
    assert weight_copies(program(inside=inside), [(64, 32)]) == []


@pytest.mark.parametrize(
    "line",
    [
        f"copy-start.1 = (bf16[64,32]{ROWS[:-1]}S(1)}}, bf16[64,32]{ROWS}, u32[]) "
        "copy-start(%p.1)",  # streamed into fast memory
        f"copy.1 = bf16[64,32]{COLUMNS} copy(%dot.1)",  # an activation as large as a weight
        f"dot.2 = bf16[64,32]{ROWS} dot(%p.1, %p.1)",
    ],
)
def test_what_rewrites_no_weight_is_not_found(line: str) -> None:
    assert weight_copies(program(line), [(64, 32)]) == []


@pytest.mark.parametrize(
    ("line", "copies"),
    [
        ("copy.1 = bf16[9,16,4,128]{3,2,1,0:T(4,128)(2,1)} copy(%p.2)", 1),
        ("reshape.1 = bf16[9,8192]{1,0:T(8,128)(2,1)} reshape(%p.2)", 1),
        ("copy-start.1 = (bf16[9,16,4,128]{3,2,1,0}, bf16[9,16,4,128]{3,2,1,0}, u32[]) "
         "copy-start(%p.2)", 1),
        ("bitcast.2 = bf16[9,64,128]{2,1,0:T(8,128)(2,1)} bitcast(%p.2)", 0),
        ("fusion.2 = bf16[9,16,4,128]{3,2,1,0} fusion(%p.2), calls=%fused_computation.1", 0),
    ],
)  # fmt: skip
def test_copies_of_a_pool_in_tpu_text(line: str, copies: int) -> None:
    assert len(pool_copies(program(line), (9, 16, 4, 128))) == copies


def test_a_fusion_that_writes_a_pool_is_found() -> None:
    inside = "convert.1 = f32[9,16,4,128]{3,2,1,0} convert(%param_0.1)"
    assert len(pool_copies(program(inside=inside), (9, 16, 4, 128))) == 1
    inside = "scatter.1 = bf16[9,16,4,128]{3,2,1,0} scatter(%param_0.1, %param_0.1)"
    assert pool_copies(program(inside=inside), (9, 16, 4, 128)) == []


def test_a_real_program_that_keeps_a_transposed_weight_is_caught() -> None:
    weight, x = jnp.zeros((64, 32)), jnp.zeros((4, 64))
    turned = jax.jit(lambda w: w.T.copy()).lower(weight).compile().as_text()
    assert weight_copies(turned, [weight.shape])
    read = jax.jit(lambda w, x: x @ w).lower(weight, x).compile().as_text()
    assert weight_copies(read, [weight.shape]) == []
