"""Step times of modes and drafters on a CPU at tiny shapes: they run, and the floors are known."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from benchmarks.decode_steps import floor_of, main, table
from benchmarks.floors import Rows, draft_floor, target_floor
from benchmarks.step_parts import advance_part, propose_part
from benchmarks.step_profile import prepare, step_of
from benchmarks.step_timing import on_mesh
from benchmarks.workloads import (
    LLAMA_1B,
    LLAMA_8B,
    WORKLOADS,
    block_json,
    eagle1_of,
    mtp_of,
)
from jspec.config.limits import Algorithm, SpeculativeConfig
from jspec.models.decoder import Decoder
from jspec.models.heads.block_config import load_block_config
from jspec.models.heads.block_head import BlockHead
from jspec.models.heads.feature_head import FeatureHead
from jspec.pallas_kernels.bundles import OPS
from jspec.speculative.drafter import Drafter
from jspec.speculative.drafters.block import BlockDrafter
from jspec.speculative.drafters.multi_layer import MultiLayerDrafter
from jspec.speculative.drafters.ngram import NgramDrafter
from jspec.speculative.drafters.ranked import EagleDrafter, StandaloneDrafter

XLA = OPS["xla"]
CHAIN = SpeculativeConfig(algorithm=Algorithm.EAGLE, num_steps=3, topk=1, num_draft_tokens=4)
ONE = Rows(batch=1, context=1168, itemsize=2)


def block_drafter() -> BlockDrafter:
    """Return the block drafter of Llama-3.1-8B, read from the config of the workload."""
    fields = block_json(LLAMA_8B, block_size=8)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(fields), encoding="utf-8")
        spec = load_block_config(Path(folder), target=LLAMA_8B)
    return BlockDrafter(BlockHead(spec, XLA), CHAIN)


def drafters() -> dict[str, Drafter]:
    eagle3 = FeatureHead(WORKLOADS["llama-3.1-8b"].draft, XLA)
    return {
        "eagle3": EagleDrafter(eagle3, CHAIN),
        "eagle1": EagleDrafter(FeatureHead(eagle1_of(LLAMA_8B), XLA), CHAIN),
        "mtp": MultiLayerDrafter(FeatureHead(mtp_of(LLAMA_8B, num_layers=3), XLA), CHAIN),
        "standalone": StandaloneDrafter(Decoder(LLAMA_1B, XLA), CHAIN),
        "ngram": NgramDrafter(CHAIN),
        "dflash8": block_drafter(),
    }


def test_a_floor_is_the_bytes_of_the_forwards_by_hand() -> None:
    """At B = 1 everything is read: lm_head 525 million numbers, a layer of 8B 218, fc or fuse 34,
    1B without its head 973 and with it 1,236."""
    layer, head, pair, row = 218.1e6, 525.3e6, 33.55e6, 1168 * 2048
    small = 3 * (973.0e6 + 262.7e6 + 16 * 1168 * 1024)
    numbers = {
        "eagle1": 3 * (pair + layer + head + row),
        "mtp": 5 * (pair + layer + row) + 3 * head,
        "standalone": small,
        "ngram": 1168 * 2,
        # Five layers, lm_head, fc of five features, K and V of what is emitted.
        "dflash8": 5 * (layer + row + 8.39e6) + head + 83.9e6,
    }
    found = {name: draft_floor(drafter, CHAIN, ONE) for name, drafter in drafters().items()}
    for name, wanted in numbers.items():
        assert found[name].ms == found[name].bytes_ms
        assert found[name].ms == pytest.approx(1e3 * 2 * wanted / 4.49e12, rel=0.002), name
    assert found["eagle3"].ms < found["eagle1"].ms
    assert target_floor(Decoder(LLAMA_8B, XLA), ONE, nodes=4).ms == pytest.approx(3.377, abs=0.005)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "mode",
    ["mtp", *(pytest.param(mode, marks=SLOW) for mode in ("standalone",))],
)
def test_a_drafters_halves_go_round_in_a_loop(mode: str, tmp_path: Path) -> None:
    """A half returns the shapes that it takes; traced only."""
    workload = WORKLOADS["tiny"]
    bench = prepare(workload, mode, 2, tmp_path, {"compilation_cache_dir": ""}, smaller=(1,))
    assert bench.limits.programs.decode_buckets == (1, 2)

    def trace_both(state: Any, params: Any) -> None:
        models = replace(bench.models, params=params)
        step = step_of(replace(bench, models=models), state, 1)
        assert step.batch == 1
        for part in (propose_part(step, state), advance_part(step, state)):
            out = on_mesh(part.body, bench.mesh)(part.carry, step.rows, step.tree, part.arrays)
            shapes = jax.tree.map(lambda x: (x.shape, x.dtype), (out, part.carry))
            assert shapes[0] == shapes[1], part.name

    jax.eval_shape(trace_both, bench.state(), bench.models.params)
    floor = floor_of(bench, 2)
    assert floor["ms"] == pytest.approx(floor["target"] + floor["draft"], abs=2e-4)


@pytest.mark.slow
def test_the_whole_command(tmp_path: Path) -> None:
    words = ["--model", "tiny", "--cells", "ngram/*", "--parts", "ngram/1"]
    words += ["--engine", 'compilation_cache_dir=""', "--output", str(tmp_path / "steps.json")]
    assert main(words) == 0
    cells = json.loads((tmp_path / "steps.json").read_text(encoding="utf-8"))["cells"]
    assert list(cells) == ["ngram/1", "ngram/2"]
    assert set(cells["ngram/1"]["parts"]) == {"draft propose", "draft extend"}
    assert cells["ngram/2"]["engine_ms"] > 0
    assert "| ngram/2 |" in table(cells)
    assert main(["--model", "tiny", "--cells", "none/1", "--output", str(tmp_path / "x")]) == 2


@pytest.mark.slow
@pytest.mark.exhaustive
def test_an_moe_has_cells_and_a_floor(tmp_path: Path) -> None:
    """It checks no times, which mean nothing on a CPU."""
    output = tmp_path / "steps.json"
    words = ["--model", "tiny-moe", "--cells", "chain/*", "--output", str(output)]
    assert main([*words, f"--engine=compilation_cache_dir={tmp_path / 'programs'}"]) == 0
    cells = json.loads(output.read_text(encoding="utf-8"))["cells"]
    assert set(cells) == {"chain/1", "chain/2"}
    for cell in cells.values():
        assert cell["device_ms"] > 0
        assert cell["engine_ms"] > 0
        assert 0 < cell["floor"]["ms"] < cell["engine_ms"]
