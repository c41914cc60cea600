"""`jspec bench` against a live server, and its offline half on the engine of this folder."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from jspec.cli.main import main
from jspec.cli.measurement.offline import EngineTarget
from jspec.cli.measurement.session import Plan, measure, result_of
from jspec.cli.measurement.settings import BenchSettings
from jspec.serving.engine import Engine

SMALL = ["--num-prompts", "4", "--repeats", "2", "--input-len", "12", "--output-len", "8"]
QUIET = ["--temperature", "1"]


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["--backend", "sglang", "--vocab-size", "60", "--dataset-name", "random"],
        ["--backend", "vllm", "--request-rate", "50", "--max-concurrency", "2", "--flush-cache"],
        ["--backend", "openai-chat", "--request-rate", "inf"],
    ],
    ids=["native", "ids", "completions", "chat"],
)
def test_a_server_under_load(
    live_url: str, more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, trace = tmp_path / "out.json", tmp_path / "trace.json"
    words = ["bench", "--base-url", live_url, *SMALL, *QUIET, *more]
    words += ["--output-file", str(out), "--trace", str(trace), "--api-key", "secret"]
    assert main(words) == 0
    assert "tokens/s" in capsys.readouterr().out
    result = json.loads(out.read_text())
    mode = result["modes"]["server"]
    assert (mode["num_finished"], mode["num_errors"], mode["output_tokens"]) == (4, 0, 32)
    assert mode["acceptance"]["num_verifications"] > 0
    assert len(mode["acceptance"]["by_depth"]) == 3
    assert len(mode["runs"]) == 2
    assert mode["ttft_ms"][0] <= mode["e2e_ms"][0]
    assert "secret" not in out.read_text()
    assert result["servers"]["server"]["speculative_algorithm"] == "EAGLE3"
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(event["name"] == "decode" for event in events) == 8


def test_two_servers_take_turns(live_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "--base-url", f"{live_url}/v1", "--baseline-url", live_url]
    assert main([*words, *SMALL]) == 0
    said = capsys.readouterr()
    assert "server over baseline: " in said.out
    turns = [line.split(":")[0] for line in said.err.splitlines()]
    assert turns == ["1/2 baseline", "1/2 server", "2/2 server", "2/2 baseline"]


def test_refusals_are_counted_and_said(live_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "--base-url", live_url, *SMALL, "--backend", "openai", "--model", "other"]
    assert main(words) == 1
    said = capsys.readouterr()
    assert "model is 'other'" in said.out
    assert "warm-up" in said.err


def test_a_url_without_a_model_server_is_said(
    live_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--base-url", f"{live_url}/nothing", *SMALL]) == 1
    assert "expected an inference server" in capsys.readouterr().err


def test_an_engine_writes_the_same_tokens_twice(engine: Engine) -> None:
    settings = BenchSettings(
        num_prompts=3, repeats=2, input_len=12, output_len=8, temperature=1.0, concurrency=2
    )
    jobs = settings.jobs(engine.tokenizer, repeat=0, to_body=None, vocab_size=None)
    plan = Plan(point=settings.point, warm_up=settings.warm_up(jobs, None), jobs=[jobs] * 2, seed=0)
    targets = [EngineTarget(name, engine) for name in ("plain", "speculative")]
    measured = asyncio.run(measure(targets, plan, say=lambda _: None))
    result = result_of(measured, ("plain", "speculative"))
    assert result["same_tokens"] == {"same": 6, "of": 6}
    mode: dict[str, Any] = result["modes"]["speculative"]
    assert (mode["num_errors"], mode["prompt_tokens"]) == (0, 36)
    assert mode["acceptance"]["num_verifications"] > 0


@pytest.mark.slow
def test_the_whole_command_on_a_tiny_pair(
    engine_arguments: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("model_path", "speculative_algorithm", "speculative_draft_model_path", "dtype")
    flags = [w for n in names for w in (f"--{n.replace('_', '-')}", str(engine_arguments[n]))]
    out, trace = tmp_path / "out.json", tmp_path / "trace.json"
    more = ["--context-length", "512", "--output-file", str(out), "--trace", str(trace)]
    assert main(["bench", *flags, *SMALL, *more]) == 0
    result = json.loads(out.read_text())
    assert result["same_tokens"] == {"same": 8, "of": 8}
    assert "the same tokens: 8 of 8 answers" in capsys.readouterr().out
    kinds = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"dispatch", "collect", "decode", "to the first token"} <= kinds
