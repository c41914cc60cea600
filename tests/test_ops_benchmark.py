"""The benchmark of ops on a CPU at tiny sizes: every op runs, and equals XLA's in other bundles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ops
from benchmarks.op_cases import MODELS, OPS, experts
from jspec.pallas_kernels.shapes import GPT_OSS_20B, GPT_OSS_20B_MXFP4, QWEN3_30B_A3B

SIZES: dict[str, str] = {
    "attention": "batch=2 queries=16 context=70",
    "attention_fp8": "batch=2 queries=4 context=70 kv=fp8_e4m3",
    "prefill": "packed=true batch=2 queries=12 context=70",
    "kv_write": "batch=2 queries=3",
    "kv_write_fp8": "batch=2 queries=3 kv=fp8_e4m3",
    "compaction": "batch=2 nodes=5 levels=2 layers=2",
    "bonus_token": "batch=2 nodes=5 levels=2",
    "add_norm": "tokens=3",
    "gated_mlp": "tokens=3 columns=true",
    "fp8_product": "product=gate_up tokens=3 blocks=true",
    "experts": "tokens=3",
    "moe": "tokens=3",
    "sample": "batch=2 nodes=3 temperature=1.0",
    "rank": "batch=2 topk=2 temperature=1.0",
    "delta_prefill": "batch=2 queries=70",
}
FAST = ("attention", "gated_mlp", "sample")  # the kernels' tests cover all of them


def measured(op: str, bundle: str, folder: Path, *options: str) -> list[dict[str, Any]]:
    """The rows of one op at the tiny models that have it: an MLP or an MoE, or a delta net."""
    output = folder / "ops.json"
    models = ["tiny", "tiny-moe"] if op in OPS else ["tiny-delta"]
    words = ["--op", op, "--model", *models, "--size", *SIZES[op].split()]
    words += [
        "--bundle",
        bundle,
        "--samples",
        "1",
        "--copies",
        "1",
        "--output",
        str(output),
        *options,
    ]
    ops.main(words)
    stored = json.loads(output.read_text(encoding="utf-8"))
    assert stored["environment"]["command"].startswith("python -m benchmarks.")
    rows: list[dict[str, Any]] = stored["rows"]
    return rows


@pytest.mark.parametrize(
    ("op", "bundle"),
    [
        *((op, "reference") for op in FAST),
        *(pytest.param(op, "reference", marks=pytest.mark.slow) for op in OPS if op not in FAST),
        ("add_norm", "gpu_interpret"),
        pytest.param("compaction", "tpu_interpret", marks=pytest.mark.slow),
        pytest.param("delta_prefill", "gpu_interpret", marks=pytest.mark.slow),
    ],
)
def test_every_op_runs_and_equals_xla(op: str, bundle: str, tmp_path: Path) -> None:
    """It checks no times, which mean nothing on a CPU."""
    rows = measured(op, bundle, tmp_path)
    assert rows
    for row in rows:
        assert "error" not in row, row
        assert row["microseconds"] > 0
        assert row["floor_microseconds"] >= 0


def test_a_tuning_replaces_fields_of_the_planned_one(tmp_path: Path) -> None:
    rows = measured("rank", "gpu_interpret", tmp_path, "--tuning", "chunk=64", "--tuning", "odd=1")
    assert [row.get("tuning") for row in rows] == [None, {"chunk": 64}, {"odd": 1}] * 2
    assert ["error" in row for row in rows] == [False, False, True] * 2
    assert "no tuning with odd was chosen" in rows[2]["error"]


def test_a_result_that_differs_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "difference", lambda *_, **_named: 1.0)
    (row, _) = measured("add_norm", "reference", tmp_path)
    assert "differs by 1; expected 0.02" in row["error"]


def test_the_floor_of_experts_is_what_the_tokens_touch() -> None:
    """One token: 8 of 128 experts of 9.4 MB; 2,048 tokens of gpt-oss: all, and the arithmetic."""
    assert experts(QWEN3_30B_A3B, tokens=1).num_bytes == pytest.approx(8 * 3 * 2048 * 768 * 2)
    many = experts(GPT_OSS_20B, tokens=2048)
    assert many.num_bytes == pytest.approx(32 * 3 * 2880 * 2880 * 2)
    assert many.flops == 2048 * 4 * 6 * 2880 * 2880
    packed = experts(GPT_OSS_20B_MXFP4, tokens=2048).num_bytes
    assert packed == pytest.approx(many.num_bytes * 17 / 64)


@pytest.mark.slow
def test_every_default_size_has_a_case() -> None:
    """Built, not run: no array of a real model is made."""
    for build, sizes in OPS.values():
        found = 0
        for each in sizes:
            for shape in (MODELS["llama-3.1-8b"], MODELS["gpt-oss-20b"]):
                try:
                    found += build(shape, **each).num_bytes > 0
                except ValueError:
                    continue
        assert found >= len(sizes)
