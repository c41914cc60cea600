"""Twenty-one faults, each planted in a copy of the package: the fast suite notices every one.

    pytest -n 0 -m exhaustive tests/test_planted_faults.py

The faults are those that the field's servers had: an index, a position, a bound or a condition that
is off by a little. A row names the tests that must fail, so that a run takes a minute, not an hour.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]


class Fault(NamedTuple):
    file: str  # below jspec/
    right: str  # occurs once in the file
    wrong: str
    tests: str  # below tests/, separated by blanks


FAULTS = {
    "noise of the parent's position": Fault(
        "speculative/verify.py",
        "positions = indexing.chosen_position(rows.seq_lens[:, None], tree.depths)",
        "positions = indexing.target_position(rows.seq_lens[:, None], tree.depths)",
        "engine/test_runner.py",
    ),
    "tree left where it was written": Fault(
        "speculative/verify.py",
        "is_chain=draft_shape.is_chain\n",
        "is_chain=True\n",
        "speculative/test_engine_laws.py",
    ),
    "draft accepted under another parent": Fault(
        "sampling/accept.py",
        "(tree.parents == current[:, None]) & (tree.tokens == wanted)",
        "tree.tokens == wanted",
        "sampling/test_accept.py",
    ),
    "row without speculation that accepts": Fault(
        "sampling/accept.py",
        "alive = alive & jnp.any(matches, axis=1)",
        "alive = jnp.any(matches, axis=1)",
        "speculative/test_simulated_acceptance.py speculative/test_shapes.py",
    ),
    "drafter given the root in every chunk": Fault(
        "speculative/step.py",
        "next_ids=jnp.where(is_final, roots, batch.next_ids),",
        "next_ids=roots,",
        "speculative/test_prefix_cache.py speculative/test_drafter_laws.py",
    ),
    "bonus of the last draft's parent": Fault(
        "pallas_kernels/bonus_token/reference.py",
        "last = num_accepted[:, None]",
        "last = jnp.maximum(num_accepted[:, None] - 1, 0)",
        "pallas_kernels/test_bonus_token.py speculative/test_worked_example.py",
    ),
    "top-p switched off by an open top-k": Fault(
        "sampling/filters.py",
        "shard.size) & (rows.top_p >= 1)",
        "shard.size) | (rows.top_p >= 1)",
        "sampling",
    ),
    "window page released a key early": Fault(
        "scheduler/pages/page_space.py",
        "end = max(length - (self.keep - 1), 0)",
        "end = max(length - (self.keep - 2), 0)",
        "scheduler",
    ),
    "prefix found without the lookahead": Fault(
        "scheduler/pages/prefix_cache.py",
        "start + self._page_size + self._lookahead]",
        "start + self._page_size]",
        "scheduler speculative/test_prefix_cache.py",
    ),
    "budget a token short": Fault(
        "scheduler/pages/budget.py",
        "return max(prompt_len + max_new_tokens - 2, prompt_len)",
        "return max(prompt_len + max_new_tokens - 3, prompt_len)",
        "scheduler",
    ),
    "pages for the first round only": Fault(
        "scheduler/pages/budget.py",
        "start = max(first, min(final, last))",
        "start = first",
        "scheduler",
    ),
    "start after a window with a hole": Fault(
        "scheduler/pages/page_space.py",
        "while i > max(depth - self.tail, 0):",
        "while i > max(depth - self.tail + 1, 0):",
        "scheduler",
    ),
    "MXFP4 nibbles swapped": Fault(
        "models/files/mxfp4.py",
        "values[byte & 15], values[byte >> 4]",
        "values[byte >> 4], values[byte & 15]",
        "models/test_gpt_oss.py device",
    ),
    "FP8 scale of the next block": Fault(
        "models/files/w8a8.py",
        "rows // length * per_matrix + rows % length // self.block[0]",
        "rows // length * per_matrix + (rows + 1) % length // self.block[0]",
        "models/test_fp8.py",
    ),
    "selection among nodes of other branches": Fault(
        "pallas_kernels/latent_attention/xla.py",
        "tail_mask=None if block.tail_mask is None else block.tail_mask[:, None],",
        "tail_mask=None,",
        "pallas_kernels/test_sparse_latents.py",
    ),
    "RoPE bounds exchanged": Fault(
        "spec/rope_io.py",
        "low_freq_factor=low,\n        high_freq_factor=high,",
        "low_freq_factor=high,\n        high_freq_factor=low,",
        "models layers spec",
    ),
    "tied weight not turned": Fault(
        "models/files/stored/tensors.py",
        "turned = columns if part.form is Form.AS_IS else np.swapaxes(columns, -1, -2)",
        "turned = columns",
        "models/test_stored.py",
    ),
    "prompt counted for every choice": Fault(
        "server/openai/answers.py",
        "sum(c.prompt_tokens for c in first.values()),",
        "sum(c.prompt_tokens for c in completions),",
        "server/test_chat.py server/test_openai_schemas.py server/test_engine_lists.py "
        "server/test_conformance.py server/test_generate_endpoint.py",
    ),
    "body one byte too long": Fault(
        "server/http/exchange.py",
        "if len(body) > max_bytes:",
        "if len(body) > max_bytes + 1:",
        "server/test_request_bodies.py server/test_hostile.py server/test_other_endpoints.py",
    ),
    "any key opens the door": Fault(
        "server/http/exchange.py",
        "return any(hmac.compare_digest(key, self._key) for key in keys)",
        "return any(keys)",
        "server/test_other_endpoints.py server/test_control.py",
    ),
    "last event kept back": Fault(
        "server/http/streaming.py",
        "or completion.finish is not None:",
        "or False:",
        "server/test_streaming.py server/test_generate_endpoint.py",
    ),
}


def test_every_fault_can_be_planted() -> None:
    assert len(FAULTS) == 21
    for name, fault in FAULTS.items():
        text = (ROOT / "jspec" / fault.file).read_text("utf-8")
        assert text.count(fault.right) == 1, name
        for test in fault.tests.split():
            assert (ROOT / "tests" / test).exists(), f"{name}: {test}"


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_noticed(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    for folder in ("jspec", "tests", "benchmarks", "recipes", "configs", "docs", "examples"):
        ignored = shutil.ignore_patterns("__pycache__", "bundled")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    for file in ("pyproject.toml", "run_server.py"):
        shutil.copy(ROOT / file, tmp_path / file)
    (tmp_path / "jspec" / "bundled").symlink_to(ROOT / "jspec" / "bundled")
    broken = tmp_path / "jspec" / fault.file
    text = broken.read_text("utf-8")
    broken.write_text(text.replace(fault.right, fault.wrong), "utf-8")
    tests = [f"tests/{test}" for test in fault.tests.split()]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    environment.pop("PYTEST_XDIST_WORKER", None)
    ended = subprocess.run(
        [*command, *tests],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ended.returncode == 1, ended.stdout[-3000:]  # 1: a test failed; all else is no proof
    assert " failed" in ended.stdout
