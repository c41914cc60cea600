"""The load client against a known server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from benchmarks import serve_drafts, serve_load
from benchmarks.serve_load import PARTS, summarise
from jspec.cli.measurement.client import run_point
from jspec.cli.measurement.figures import Seen, summary
from jspec.cli.measurement.load import Pattern, Point
from jspec.serving.request_trace import Border

GAP_SECONDS = 0.02


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("c64", Point(name="c64", num_requests=256, clients=64)),
        ("c1", Point(name="c1", num_requests=8, clients=1)),
        ("r12", Point(name="r12", num_requests=256, rate=12.0)),
        ("r0.5:9", Point(name="r0.5", num_requests=9, rate=0.5)),
    ],
)
def test_points(text: str, expected: Point) -> None:
    assert Point.parse(text) == expected


@pytest.mark.parametrize("text", ["", "64", "c0", "c1.5", "x3", "r-1", "c4:0", "c4:x"])
def test_what_is_no_point_is_said(text: str) -> None:
    with pytest.raises(ValueError, match="expected cCLIENTS or rRATE"):
        Point.parse(text)


def test_prompts_may_begin_alike() -> None:
    pattern = Pattern(prompt_len=20, new_tokens=9, vocab_size=300, prefix_len=6, seed=7)
    warm, measured = pattern.jobs(Point.parse("c2:3"))
    ids = [json.loads(job.body)["input_ids"] for job in (*warm, *measured)]
    assert len({tuple(each[:6]) for each in ids}) == 1
    assert len({tuple(each[6:12]) for each in ids}) == 5
    assert [job.prompt_len for job in measured] == [len(each) for each in ids[2:]]


class KnownServer:
    """Send 1, 3 and the remaining tokens; refuse a prompt whose first id is a multiple of 13."""

    def __init__(self) -> None:
        self._clients: set[asyncio.Task[None]] = set()

    async def ended(self) -> None:
        """After the last client has gone. A loop that ends before would cancel who still reads."""
        await asyncio.gather(*self._clients)

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = asyncio.current_task()
        assert client is not None
        self._clients.add(client)
        try:
            while True:
                await self._answer(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):  # the client closed it
            pass
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        size = int(head.lower().split("content-length:")[1].split()[0])
        body = json.loads(await reader.readexactly(size))
        if body["input_ids"][0] % 13 == 0:
            writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 2\r\n\r\nno")
            return
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for count in (1, 4, body["sampling_params"]["max_new_tokens"]):
            meta = {"completion_tokens": count, "prompt_tokens": len(body["input_ids"])}
            event = b"data: " + json.dumps({"text": "", "meta_info": meta}).encode() + b"\n\n"
            half = len(event) // 2
            for part in (event[:half], event[half:]):  # chunks are not events
                writer.write(b"%x\r\n%b\r\n" % (len(part), part))
            await asyncio.sleep(GAP_SECONDS)
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.parametrize("text", ["c3:12", "r200:12"])
def test_a_load_against_a_server_that_is_known(text: str) -> None:
    async def main() -> tuple[Seen, float]:
        known = KnownServer()
        async with await asyncio.start_server(known.connect, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            pattern = Pattern(prompt_len=8, new_tokens=20, vocab_size=500, trace=True)
            found = await run_point(f"http://127.0.0.1:{port}", Point.parse(text), pattern)
            await known.ended()
            return found

    seen, seconds = asyncio.run(main())
    figures = summary(seen, seconds)
    assert figures["num_finished"] + figures["num_errors"] == 12
    assert all("status 400: no" in error for error in seen.errors)
    assert len(seen.ttft) == len(seen.sent) == figures["num_finished"] > 0
    assert len(seen.gaps) == 2 * len(seen.ttft)
    assert len(seen.itl) == seen.num_tokens - len(seen.ttft)
    assert all(gap > GAP_SECONDS / 2 for gap in seen.gaps)
    assert all(ttft < e2e for ttft, e2e in zip(seen.ttft, seen.e2e, strict=True))


def test_parts_of_a_first_token_add_up(tmp_path: Path) -> None:
    seen = Seen(sent={"a": 1.0, "late": 5.0}, first={"a": 1.0 + 0.001 * len(PARTS)})
    marks = {border.value: 1.001 + 0.001 * i for i, border in enumerate(Border)}
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps({"request_id": n, **marks}) + "\n" for n in ("a", "other")))
    found = summarise(path, seen)
    assert found.pop("num_requests") == 1
    assert found.pop("whole") == [12.0, 12.0]
    assert found == {part: [1.0, 1.0] for part in PARTS}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_whole_run_on_a_tiny_pair(tmp_path: Path) -> None:
    output, trace = tmp_path / "load.json", tmp_path / "trace.jsonl"
    words = [
        "--model",
        "tiny",
        "--points",
        "c2:4",
        "r20:4",
        "--output",
        str(output),
        "--text",
        "--prompt-len",
        "16",
    ]
    assert serve_load.main([*words, "--trace", str(trace)]) == 0
    result = json.loads(output.read_text())
    assert result["num_leaked_pages"] == 0
    assert result["environment"]["command"].startswith("python -m benchmarks.serve_load")
    for name in ("c2", "r20"):
        point = result["points"][name]
        assert (point["num_finished"], point["num_errors"]) == (4, 0)
        assert point["first_token_ms"]["num_requests"] == 4


def test_acceptance_lengths_of_a_published_table() -> None:
    """Chains of 7 are simulated as published; a shorter one accepts what the same chance gives."""
    found = {mode: serve_drafts.acceptance_of(mode, "mt-bench") for mode in serve_drafts.RUN}
    assert (found["plain"], found["dflash8"], found["dspark7"]) == (1.0, 3.11, 3.72)
    chance = serve_drafts.chance_of(2.66, 7)
    assert sum(chance**i for i in range(8)) == pytest.approx(2.66)
    assert found["chain"] == round(1 + chance + chance**2 + chance**3, 2) < 2.66
    assert found["dflash8"] < found["dflash16"] < found["dflash8-tree16"]
    assert found["dflash8-tree16"] == round(3.11 * serve_drafts.TREE_GAIN[16], 2)
    with pytest.raises(ValueError, match="no acceptance length is published for 'eagle1'"):
        serve_drafts.acceptance_of("eagle1", "mt-bench")
