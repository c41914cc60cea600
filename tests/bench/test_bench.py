"""`jspec bench`: arguments, load and report, without an engine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from jspec.cli.main import main
from jspec.cli.measurement.backends import BACKENDS, CHAT, COMPLETIONS, NATIVE, OpenAIReader
from jspec.cli.measurement.connections import Connections
from jspec.cli.measurement.environment import commit, describe
from jspec.cli.measurement.figures import Seen, Span, Stopwatch, acceptance, medians, summary
from jspec.cli.measurement.load import Job, Point
from jspec.cli.measurement.offline import engine_arguments, modes_of, plain_arguments
from jspec.cli.measurement.prompts import read_prompts
from jspec.cli.measurement.report import chrome_trace, plot, table
from jspec.cli.measurement.session import Measured, result_of
from jspec.cli.measurement.settings import BenchSettings
from jspec.config.engine_args import EngineArgs
from jspec.errors import ConfigError
from jspec.serving.trace import TraceEvent, TraceKind


class Letters:
    """A tokenizer with one token per character."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        del add_special_tokens
        return list(map(ord, text))

    def decode(self, ids: Any, *, skip_special_tokens: bool = True) -> str:
        del skip_special_tokens
        return "".join(map(chr, ids))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-prompts", "0"], "num_prompts is 0; expected at least 1"),
        (["--repeats", "0"], "repeats is 0; expected at least 1"),
        (["--concurrency", "0"], "concurrency is 0; expected at least 1"),
        (["--output-len", "1"], "output_len is 1; expected at least 2"),
        (["--request-rate", "-1"], "request_rate is -1.0; expected requests a second"),
        (["--request-rate", "nan"], "request_rate is nan; expected requests a second"),
        (["--random-range-ratio", "2"], "random_range_ratio is 2.0; expected 0 to 1"),
        (["--temperature", "-1"], "temperature is -1.0; expected 0 or more"),
        (["--dataset-name", "mmlu"], "dataset_name is 'mmlu'; expected one of text, random"),
        (["--dataset-name", "jsonl"], "expected a path with jsonl and sharegpt"),
        (["--dataset-path", "nowhere.jsonl"], "'nowhere.jsonl': No such file"),
        (["--output-file", "no/such/folder/x.json"], "'no/such/folder' cannot be written to"),
        (["--trace", "."], "trace is '.', but is a directory"),
        (["--backend", "tgi"], "backend is 'tgi'; expected one of jspec, sglang"),
        (["--backend", "vllm-chat", "--vocab-size", "9"], "a chat cannot contain"),
        (["--baseline-url", "http://127.0.0.1:1"], "expected --base-url too"),
        (["--base-url", "ftp://x"], "url is 'ftp://x'; expected http://HOST:PORT"),
        (["--base-url", "http://127.0.0.1:1", "--tp-size", "1"], "tp_size is for an engine"),
        (["--mode", "fast"], "invalid choice: 'fast'"),
        (["--num-prompt", "3"], "did you mean '--num-prompts'?"),
        (["--port", "1"], "unknown flag '--port'"),
        (["--model-path", "/nowhere", "--mode", "speculative"], "expected --speculative-algorithm"),
    ],
)
def test_what_was_asked_wrongly_is_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["--base-url", "http://127.0.0.1:1"], 1, "no answer from http://127.0.0.1:1: "),
        (["--model-path", "/nowhere"], 2, "model_path is '/nowhere'; expected a directory"),
    ],
)
def test_what_is_not_there_is_said(
    words: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == status
    assert message in capsys.readouterr().err


def test_points() -> None:
    assert BenchSettings(num_prompts=4, concurrency=9).point.clients == 4
    assert BenchSettings().point == Point(name="c1", num_requests=8, clients=1)
    at_once = BenchSettings(request_rate=float("inf")).point
    assert (at_once.rate, at_once.clients) == (None, 8)
    bounded = BenchSettings(request_rate=2.0, concurrency=3).point
    assert (bounded.rate, bounded.clients) == (2.0, 3)


def test_the_same_seed_is_the_same_load_and_repeats_differ() -> None:
    settings = BenchSettings(num_prompts=3, dataset_name="random", input_len=20, range_ratio=0.5)
    first, again, other = (
        settings.jobs(Letters(), repeat=repeat, to_body=None, vocab_size=50) for repeat in (0, 0, 1)
    )
    assert first == again
    assert first != other
    assert all(10 <= job.prompt_len == len(job.prompt) <= 20 for job in first)
    assert all(isinstance(i, int) and i < 50 for job in first for i in job.prompt)
    (words, *_) = settings.jobs(Letters(), repeat=0, to_body=None, vocab_size=None)
    assert isinstance(words.prompt, str)
    assert len(words.prompt.split()) == words.prompt_len


def test_random_prompts_may_begin_alike() -> None:
    settings = BenchSettings(num_prompts=3, dataset_name="random", input_len=9, prefix_len=5)
    jobs = settings.jobs(Letters(), repeat=0, to_body=None, vocab_size=50)
    assert {job.prompt_len for job in jobs} == {14}
    assert len({job.prompt[:5] for job in jobs}) == 1
    assert len({job.prompt[5:] for job in jobs}) == 3
    (other, *_) = settings.jobs(Letters(), repeat=1, to_body=None, vocab_size=50)
    assert other.prompt[:5] != jobs[0].prompt[:5]
    with pytest.raises(ConfigError, match="random_prefix_len is 5 with dataset_name 'text'"):
        BenchSettings(prefix_len=5)


def test_text_is_of_modules_that_nobody_trained_on() -> None:
    settings = BenchSettings(num_prompts=4, input_len=30)
    jobs = settings.jobs(
        Letters(), repeat=0, to_body=lambda job: {"p": job.prompt}, vocab_size=None
    )
    assert all(isinstance(job.prompt, str) and len(job.prompt) == 30 for job in jobs)
    assert json.loads(jobs[0].body) == {"p": jobs[0].prompt}
    warm = settings.warm_up(jobs, lambda job: {"n": job.new_tokens})
    assert [(job.new_tokens, job.body) for job in warm] == [(16, b'{"n": 16}')]


def test_a_file_of_prompts(tmp_path: Path) -> None:
    lines = [
        "plain text",
        {"prompt": "b", "max_new_tokens": 7},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "c"}]},
        {"conversations": [{"from": "human", "value": "d"}, {"from": "gpt", "value": "e"}]},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    found = read_prompts(path, count=6, seed=0, fallback_length=9)
    assert [prompt.content for prompt in found] == ["plain text", "b", "c", "d", "plain text", "b"]
    assert [prompt.new_tokens for prompt in found[:2]] == [None, 7]
    path.write_text(json.dumps(lines))
    assert len(read_prompts(path, count=2, seed=0, fallback_length=9)) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "which is empty"),
        ("{nope", "line 1 is no JSON"),
        ('"a"\n{"answer": 1}', "line 2 is {'answer': 1}; expected text"),
        ('{"prompt": "a", "max_tokens": 0}', "wants 0 tokens"),
        ("[1", "no JSON"),
    ],
)
def test_what_is_no_file_of_prompts_is_said(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_prompts(path, count=3, seed=0, fallback_length=1)


def test_bodies_are_what_each_server_takes() -> None:
    sampling = {"temperature": 0.0, "max_new_tokens": 5, "ignore_eos": True}
    job = Job(prompt="a", sampling=sampling, prompt_len=1, new_tokens=5)
    assert NATIVE.to_body(job, "m") == {"text": "a", "sampling_params": sampling, "stream": True}
    of_completion, of_chat = COMPLETIONS.to_body(job, "m"), CHAT.to_body(job, None)
    assert (of_completion["model"], of_completion["max_tokens"]) == ("m", 5)
    assert "model" not in of_chat
    assert of_chat["messages"] == [{"role": "user", "content": "a"}]
    assert of_completion["stream_options"]["include_usage"] is of_chat["ignore_eos"] is True
    assert BACKENDS["vllm"] is COMPLETIONS
    assert BACKENDS["sglang"] is NATIVE


def test_openai_events_count_by_usage_or_one_by_one() -> None:
    reader = OpenAIReader()
    event = {"choices": [{"text": "a"}], "usage": None}
    counts = []
    for _ in range(2):
        reader.add(event)
        counts.append(reader.num_tokens)
    reader.add({"choices": [{"delta": {"content": None}}]})
    reader.add({"choices": [], "usage": {"completion_tokens": 9, "prompt_tokens": 4}})
    assert counts == [1, 2]
    assert (reader.num_tokens, reader.prompt_tokens) == (9, 4)
    with pytest.raises(RuntimeError, match="boom"):
        reader.add({"error": "boom"})


def test_acceptance_by_depth() -> None:
    found = acceptance([2, 1, 1])
    assert found is not None
    assert found["tokens_per_verification"] == 1.75
    assert [level["share"] for level in found["by_depth"]] == [0.5, 0.25]
    assert [level["given_parent"] for level in found["by_depth"]] == [0.5, 0.5]
    assert acceptance([]) is acceptance([4]) is acceptance([0, 0]) is None


def seen_of(*, tokens: tuple[int, ...], seconds: float) -> Seen:
    seen = Seen()
    watch = Stopwatch(1.0)
    watch.tokens(1, 1.5)
    watch.tokens(len(tokens), 1.0 + seconds)
    watch.finish(seen, new_tokens=len(tokens), is_exact=True, prompt_tokens=4, index=0)
    seen.output_ids[0] = tokens
    return seen


def test_two_targets_are_compared() -> None:
    measured = Measured()
    for name, seconds, ids in (("plain", 4.5, (1, 2, 3)), ("speculative", 2.5, (1, 2, 3))):
        runs = [seen_of(tokens=ids, seconds=seconds + extra) for extra in (0.0, 9.0, 0.0)]
        runs[0].add_histogram([1, 0, 3])
        measured.seen[name] = runs
        measured.runs[name] = [summary(run, run.e2e[0]) for run in runs]
    measured.seen["speculative"][2].output_ids[0] = (1, 2, 4)
    result = result_of(measured, ("plain", "speculative"))
    assert result["same_tokens"] == {"same": 2, "of": 3}
    assert result["modes"]["plain"]["e2e_ms"] == [4500.0, 4500.0]
    assert result["ratio"]["tpot_ms"] == 2.0
    assert result["ratio"]["output_tokens_per_second"] == pytest.approx(1.2 / 0.7, abs=1e-3)
    text = table(result)
    assert "speculative over plain: 1.71 times" in text
    assert "the same tokens: 2 of 3 answers" in text
    assert "depth 2 accepted" in text


def test_errors_are_added_up() -> None:
    runs = [{"num_errors": 1, "errors": ["a"], "e2e_ms": [None, None]}] * 2
    assert medians(runs) == {"num_errors": 2, "errors": ["a"], "e2e_ms": [None, None]}
    watch, seen = Stopwatch(0.0), Seen()
    watch.tokens(3, 1.0)
    assert watch.finish(seen, new_tokens=4, is_exact=True, prompt_tokens=1, index=0) is None
    assert seen.errors == ["3 tokens came; expected 4"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "too long", "code": 400}}', "too long"),
        (b'{"object": "error", "message": "too long"}', "too long"),
        (b"<html>", "<html>"),
        (b"[1]", "[1]"),
    ],
)
def test_a_refusal_is_told_in_its_own_words(body: bytes, message: str) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 400 Bad\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        writer.close()

    async def ask() -> str:
        async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(RuntimeError) as caught:
                await Connections(f"http://127.0.0.1:{port}").get("/x")
            return str(caught.value)

    assert asyncio.run(ask()) == f"status 400: {message}"


def test_a_trace_has_a_lane_for_each_open_request_and_the_engines_calls() -> None:
    run = Seen(
        spans=[Span(0, 1.0, 1.2, 2.0, 9), Span(1, 1.1, 1.3, 3.0, 9), Span(2, 2.5, 2.6, 4, 9)]
    )
    step = TraceEvent(kind=TraceKind.COLLECT, step=7, started=1.5, ended=1.6)
    events = chrome_trace({"plain": [run]}, {"plain": [step]})["traceEvents"]
    lanes = {e["args"]["request"]: e["tid"] for e in events if e["name"] == "decode"}
    assert lanes == {0: 0, 1: 1, 2: 0}
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    (call,) = [e for e in events if e["name"] == "collect" and e["ph"] == "X"]
    assert names[call["tid"]] == "engine collect"
    assert call["ts"] == pytest.approx(0.5e6)
    assert call["dur"] == pytest.approx(0.1e6)
    assert all({"ph", "pid", "tid", "name"} <= set(event) for event in events)


def test_a_plot_is_a_picture_or_a_clear_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = {"output_tokens_per_second": 5.0}
    modes: dict[str, Any] = {"plain": {**run, "runs": [run], "acceptance": None}}
    modes["speculative"] = {**run, "runs": [run], "acceptance": acceptance([2, 1, 1])}
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        assert main(["bench", "--plot", str(tmp_path / "x.png")]) == 2
        assert "pip install '.[plot]'" in capsys.readouterr().err
        return
    plot(tmp_path / "x.png", {"modes": modes})
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"plot is .*x\.nope"):
        plot(tmp_path / "x.nope", {"modes": modes})


def test_engines_are_as_small_as_the_load_and_the_plain_one_has_no_draft() -> None:
    settings = BenchSettings(num_prompts=8, concurrency=2)
    given = {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 2, "page_size": 16}
    found = engine_arguments(given, settings, longest=100)
    assert (found["max_running_requests"], found["max_total_tokens"]) == (2, 456)
    assert "max_total_tokens" not in engine_arguments(
        {"mem_fraction_static": 0.5}, settings, longest=100
    )
    plain = plain_arguments(found)
    assert EngineArgs(**plain).speculative.num_steps == 0
    assert plain["page_size"] == 16
    assert modes_of(EngineArgs(), "both") == ("plain", "speculative")
    assert modes_of(EngineArgs(**plain), "both") == ("plain",)


def test_a_result_says_where_it_came_from() -> None:
    about = describe("jspec bench", chip="some chip")
    assert about["chip"] == "some chip"
    assert about["commit"] == commit() != ""
    assert {"jax", "jaxlib", "jspec", "python", "num_cores"} <= set(about)
