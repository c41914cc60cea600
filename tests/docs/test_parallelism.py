"""The table of docs/guides/parallelism.md is what `jspec info --devices` counts."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from benchmarks.workloads import GPT_OSS_20B, LLAMA_8B, LLAMA_70B, QWEN3_30B_A3B
from jspec.engine.memory.parallel_choices import Choice, Load, Served, advise
from jspec.models.registry import table_of
from jspec.spec.accelerators import GIB, read_devices
from jspec.spec.model_spec import cache_groups

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "parallelism.md"
MODELS = {
    "Llama-3.1-8B": LLAMA_8B,
    "Llama-3.1-70B": LLAMA_70B,
    "Qwen3-30B-A3B": QWEN3_30B_A3B,
    "gpt-oss-20b": GPT_OSS_20B,
}


def shown(choice: Choice) -> str:
    count = "" if choice.replicas == 1 else f"{choice.replicas} x "
    return f"{count}`{choice.flags}`"


@cache
def served(model: str) -> Served:
    spec = MODELS[model]
    groups, table = cache_groups(spec, name="target"), table_of(spec)
    return Served(spec=spec, groups=groups, tables=lambda _: (table, ()), dtype="bfloat16")


def row(model: str, devices: str) -> str:
    group = read_devices("--devices", devices)
    load = Load(requests=64 * group.num_devices, context=2048)
    found = advise(served(model), group, load, fraction=0.85)
    most, first = found.fastest, found.quickest
    cells = (
        *(model, devices, shown(most), f"{most.weight_bytes / GIB:.1f}", f"{most.kv_tokens:,}"),
        *(f"{most.tokens_per_second:,.0f}", shown(first), f"{first.one_row_ms:.2f}"),
    )
    return f"| {' | '.join(cells)} |"


def test_the_table_is_counted() -> None:
    lines = PAGE.read_text("utf-8").splitlines()
    rows = [line for line in lines if line.split(" | ")[0].removeprefix("| ") in MODELS]
    assert len(rows) > 20
    for line in rows:
        model, devices = (cell.strip() for cell in line.split("|")[1:3])
        assert line == row(model, devices)
