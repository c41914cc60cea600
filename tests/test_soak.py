"""The soak's own checks, and a short soak."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from benchmarks import soak
from benchmarks.soak_client import Answer, stream


def test_what_did_not_come_back_is_named() -> None:
    metrics = {"jspec:num_leaked_pages": 0.0, "sglang:max_total_num_tokens": 100.0}
    metrics["sglang:kv_available_tokens"] = 100.0
    before = {"files": 20, "threads": 10}
    assert not list(soak.leaks(metrics, before, before))
    metrics |= {"jspec:num_leaked_pages": 1.0, "sglang:kv_available_tokens": 80.0}
    found = list(soak.leaks(metrics, before, {"files": 40, "threads": 11}))
    assert [text.split()[0] for text in found] == ["1", "80", "40"]


def test_an_answer_is_read_to_its_end_or_left() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for text, finish in (("a", None), ("b", {"type": "length"})):
            event = {"text": text, "meta_info": {"finish_reason": finish}}
            writer.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        writer.write(b"data: [DONE]\n\n")
        writer.close()

    async def main() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            assert await stream(port, {}) == Answer(text="ab")
            assert await stream(port, {}, leaves_after=1) == Answer(text="a", has_left=True)
            seen, job = soak.Seen(), soak.Job(0, 0, 16, has_stop=False)
            seen.take(job, await stream(port, {}))
            assert await soak.compare(port, seen.texts) == []
            assert len(await soak.compare(port, {job: {"ab", "other"}})) == 1

    asyncio.run(main())


KILLS = ["--engine-process", "--kill-every", "8"]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("more", [[], KILLS], ids=["whole", "killed"])
def test_twelve_seconds(tmp_path: Path, more: list[str]) -> None:
    output = tmp_path / "soak.json"
    assert soak.main(["--minutes", "0.2", "--output", str(output), *more]) == 0
    result = json.loads(output.read_text())
    assert result["faults"] == []
    assert result["num_read"] > 10
    assert result["num_left"] > 0
    assert result["num_retractions"] > 0
    assert result["num_restarts"] == result["num_kills"]
