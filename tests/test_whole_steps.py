"""The benchmark of whole steps, on a CPU at tiny shapes: it runs, and names what is no cell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.whole_steps import batches_of, main


def test_cells_are_parted_by_mode() -> None:
    assert batches_of(["plain/8", "chain/1", "plain/1", "plain/8"]) == {
        "plain": (1, 8),
        "chain": (1,),
    }


@pytest.mark.parametrize("cell", ["plan/1", "plain", "plain/0", "plain/x"])
def test_what_is_no_cell_is_named(cell: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--model", "tiny", "--cells", cell])
    assert f"cell '{cell}'; expected one of plain, chain, tree" in capsys.readouterr().err


@pytest.mark.slow
def test_every_cell_has_its_times(tmp_path: Path) -> None:
    """Nothing is claimed about the times of a CPU."""
    output = tmp_path / "steps.json"
    options = ["--model", "tiny-moe", "--cells", "chain/1", "chain/2", "--output", str(output)]
    assert main([*options, f"--engine=compilation_cache_dir={tmp_path / 'programs'}"]) == 0
    cells = json.loads(output.read_text(encoding="utf-8"))["cells"]
    assert set(cells) == {"chain/1", "chain/2"}
    for cell in cells.values():
        assert cell["device_ms"] > 0
        assert cell["engine_ms"] > 0
        assert cell["share_of_floor"] < 1
