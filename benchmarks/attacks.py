"""Hostile requests against a server of the bundled pair, each with what must hold.

    python -m benchmarks.attacks --output attacks.json
    python -m benchmarks.attacks "regular expressions" "unfinished bodies"

During each attack another client generates a few tokens and reads /health, again and again. An
attack fails (status 1) if an answer is not as expected, if the other client waits for more than
--most-wait seconds or gets another text, or if the attack leaves files or threads behind.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.environment import write_result
from benchmarks.soak import held, resident_mib

MiB = 2**20
BODY_SECONDS = 5  # --request-timeout of the server
LOG_LINES_A_SECOND = 45  # two limited loggers, and the decode log
LOCAL = "127.0.0.1"


@dataclass(slots=True)
class Attacked:
    """A server under attack. log: a file with its log."""

    port: int
    pid: int
    log: Path
    faults: list[str] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)

    def expect(self, condition: object, fault: str) -> None:
        if not condition:
            self.faults.append(fault)

    @asynccontextmanager
    async def connection(
        self,
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection(LOCAL, self.port, limit=4 * MiB)
        try:
            yield reader, writer
        finally:
            writer.close()

    async def raw(self, data: bytes, *, seconds: float = 60.0) -> bytes:
        """Send bytes and return all that comes until the server closes or time is over."""
        answer = b""
        async with self.connection() as (reader, writer):
            with contextlib.suppress(OSError, TimeoutError):
                writer.write(data)
                async with asyncio.timeout(seconds):
                    while part := await reader.read(65536):
                        answer += part
        return answer

    async def ask(
        self, method: str, path: str, body: Any = b"", headers: Sequence[str] = ()
    ) -> tuple[int, bytes]:
        """Return the status and body of one request; status 0 if the connection was closed."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [f"{method} {path} HTTP/1.1", "Connection: close", f"Content-Length: {len(data)}"]
        if not any(line.lower().startswith("host:") for line in headers):
            lines.append(f"Host: {LOCAL}")
        head = "\r\n".join([*lines, *headers, "", ""]).encode("latin-1")
        answer = await self.raw(head + data, seconds=300)
        first, _, rest = answer.partition(b"\r\n\r\n")
        return int(first.split()[1]) if first else 0, rest

    async def refuses(self, name: str, path: str, body: Any, *, most: float = 30.0) -> None:
        """Expect a 400, within `most` seconds."""
        started = time.monotonic()
        status, answer = await self.ask("POST", path, body)
        seconds = time.monotonic() - started
        self.expect(status in (400, 413), f"{name}: status {status} {answer[:200]!r}")
        self.expect(seconds < most, f"{name}: {seconds:.1f} s")

    async def bears(self, name: str, path: str, body: Any, *, most: float = 60.0) -> bytes:
        """Expect any answer but a failure of the server, within `most` seconds."""
        started = time.monotonic()
        status, answer = await self.ask("POST", path, body)
        seconds = time.monotonic() - started
        self.expect(200 <= status < 500, f"{name}: status {status} {answer[:200]!r}")
        self.expect(seconds < most, f"{name}: {seconds:.1f} s")
        return answer


Attack = Callable[[Attacked], Awaitable[None]]
ATTACKS: dict[str, Attack] = {}


def attack(name: str) -> Callable[[Attack], Attack]:
    def add(function: Attack) -> Attack:
        ATTACKS[name] = function
        return function

    return add


def generate(**params: Any) -> dict[str, Any]:
    return {"text": "x = ", "sampling_params": {"max_new_tokens": 4, **params}}


@attack("slow heads and bodies")
async def slowly(server: Attacked) -> None:
    """Three hundred connections whose requests do not come are answered 408 or closed."""
    half = (
        b"POST /generate HTT",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{",
    )
    answers = await asyncio.gather(*(server.raw(half[i % 2], seconds=60) for i in range(300)))
    for answer in answers:
        server.expect(answer.startswith(b"HTTP/1.1 408"), f"answered {answer[:40]!r}")


@attack("a byte at a time")
async def bytewise(server: Attacked) -> None:
    async def trickle() -> None:
        async with server.connection() as (reader, writer):
            started = time.monotonic()
            with contextlib.suppress(OSError):
                writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n\r\n")
                while time.monotonic() < started + 60 and not reader.at_eof():
                    writer.write(b" ")
                    await writer.drain()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.2):
                            if b"408" in await reader.read(64):
                                break
            took = time.monotonic() - started
            server.expect(took < BODY_SECONDS + 10, f"a trickled body lasted {took:.1f} s")

    await asyncio.gather(*(trickle() for _ in range(100)))


@attack("unfinished bodies")
async def unfinished(server: Attacked) -> None:
    """Twenty bodies of 33 MB (the maximum) that lack their last byte take 8 of them."""
    size, before = 32 * MiB, resident_mib(server.pid)
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size

    async def send() -> bytes:
        async with server.connection() as (reader, writer):
            with contextlib.suppress(OSError, TimeoutError):
                writer.write(head)
                for _ in range(32):
                    writer.write(b" " * (MiB - (_ == 31)))
                    await writer.drain()
                async with asyncio.timeout(60):
                    return await reader.read(12)
        return b""

    peak = before

    async def watch() -> None:
        nonlocal peak
        while True:
            peak = max(peak, resident_mib(server.pid))
            await asyncio.sleep(0.05)

    watching = asyncio.ensure_future(watch())
    answers = await asyncio.gather(*(send() for _ in range(20)))
    watching.cancel()
    server.notes["grew by MiB at most"] = round(peak - before)
    server.expect(peak - before < 400, f"memory grew by {peak - before:.0f} MiB")
    server.expect(not any(b"200" in each for each in answers), f"answered {answers}")


@attack("two lengths")
async def two_lengths(server: Attacked) -> None:
    smuggled = b"0\r\n\r\nGET /server_info HTTP/1.1\r\nHost: x\r\n\r\n"
    heads = [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: chunked\r\nContent-Length: 99",
        b"Content-Length: 5\r\nContent-Length: 6",
        b"Transfer-Encoding: chunked, identity",
        b"Transfer-Encoding : chunked",
        b"Content-Length: +5",
        b"Content-Length: 5, 6",
    ]
    for head in heads:
        request = b"POST /abort_request HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n\r\n" + smuggled
        answer = await server.raw(request, seconds=20)
        server.expect(answer.count(b"HTTP/1.1 ") == 1, f"{head!r}: {answer[:300]!r}")
        server.expect(answer[9:10] == b"4" or answer[9:12] == b"501", f"{head!r}: {answer[:60]!r}")


@attack("bodies over the limit")
async def too_long(server: Attacked) -> None:
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
    started = time.monotonic()
    answer = await server.raw(head + b"Content-Length: 99999999999\r\n\r\n", seconds=20)
    server.expect(answer.startswith(b"HTTP/1.1 413"), f"answered {answer[:60]!r}")
    server.expect(time.monotonic() - started < 5, "a declared length was not refused at once")
    chunk = b"100000\r\n" + b" " * MiB + b"\r\n"
    chunked = b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = await server.raw(chunked + chunk * 40 + b"0\r\n\r\n", seconds=60)
    server.expect(answer.startswith(b"HTTP/1.1 413"), f"chunks: {answer[:60]!r}")
    tiny = chunked + b"1\r\n \r\n" * 100_000
    answer = await server.raw(tiny, seconds=60)
    server.expect(answer[9:10] == b"4" or not answer, f"tiny chunks: {answer[:60]!r}")


@attack("deep and wide JSON")
async def json_bombs(server: Attacked) -> None:
    deep = b'{"text": ' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}"
    bodies = {
        "deep lists": deep,
        "deep objects": b'{"a":' * 200_000 + b"1" + b"}" * 200_000,
        "lists": b'{"text": [' + b"[]," * 1_000_000 + b"[]]}",
        "keys": b"{" + b",".join(b'"k%d":1' % i for i in range(1_000_000)) + b"}",
        "numbers": b'{"text": "a", "input_ids": [' + b"1," * 8_000_000 + b"1]}",
        "a number of many digits": b'{"text": "a", "priority": ' + b"9" * 1_000_000 + b"}",
        "an exponent": b'{"text": "a", "sampling_params": {"temperature": 1e999999}}',
        "not UTF-8": b'{"text": "\xff\xfe"}',
        "gzip": b"\x1f\x8b\x08\x00" + b"\x00" * 1000,
    }
    for path in ("/generate", "/v1/chat/completions", "/v1/messages", "/v1/responses"):
        for name, body in bodies.items():
            await server.refuses(f"{name} to {path}", path, body)


@attack("headers")
async def headers(server: Attacked) -> None:
    for name, head in {
        "a long one": b"X: " + b"a" * 2 * MiB,
        "many": b"\r\n".join(b"X%d: a" % i for i in range(200_000)),
        "a long path": b"",
    }.items():
        target = b"/" + b"a" * 2 * MiB if not head else b"/health"
        answer = await server.raw(b"GET " + target + b" HTTP/1.1\r\n" + head + b"\r\n\r\n")
        server.expect(answer[9:10] == b"4" or not answer, f"{name}: {answer[:60]!r}")
    for data in (b"\x16\x03\x01\x02\x00" * 100, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x00" * 999):
        answer = await server.raw(data, seconds=20)
        server.expect(answer[9:10] in (b"4", b""), f"{data[:9]!r}: {answer[:60]!r}")
    pipelined = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 2000
    answer = await server.raw(pipelined, seconds=20)
    server.notes["answers to 2,000 pipelined requests"] = answer.count(b"HTTP/1.1 200")
    for value in ("a" * 60_000, "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "\xff\xfe"):
        status, _ = await server.ask("POST", "/generate", generate(), [f"traceparent: {value}"])
        server.expect(status in (200, 400), f"traceparent {value[:9]!r}: {status}")


REGEXES = (
    *("(a|a)*b", "((a+)+)+$", "(x{1,1000}){1,1000}", "(" * 500 + "a" + ")" * 500),
    *("(a?){5000}a{5000}", "[^a]" * 20_000, ".*" * 2000, "(?=a)b", "(a)\\1", "a{0,2000000000}"),
    *(
        "|".join(str(i) * 20 for i in range(3000)),
        "\\p{L}{1,9999}",
        "(.*.*.*.*.*.*)*x",
        "[",
        "(?R)",
    ),
)


@attack("regular expressions")
async def regexes(server: Attacked) -> None:
    jobs = [("regex", r) for r in REGEXES] + [("stop_regex", r) for r in REGEXES]
    calls = (
        server.bears(f"{name} {regex[:20]!r}", "/generate", generate(**{name: regex}))
        for name, regex in jobs
    )
    await asyncio.gather(*calls)


def schemas() -> dict[str, Any]:
    nested: Any = {"type": "string"}
    for _ in range(200):
        nested = {"type": "object", "properties": {"a": nested}, "required": ["a"]}
    wide = {f"k{i}": {"type": "string"} for i in range(20_000)}
    link = {"$ref": "#/$defs/a"}
    doubled = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)}
    return {
        "itself": {"$ref": "#"},
        "each other": {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": link}, **link},
        "required itself": {
            "type": "object",
            "properties": {"a": {"$ref": "#"}},
            "required": ["a"],
        },
        "a tree": {"type": "array", "items": {"$ref": "#"}},
        "nested": nested,
        "wide": {"type": "object", "properties": wide, "required": list(wide)},
        "an enumeration": {"enum": [str(i) for i in range(100_000)]},
        "doubling": {"$defs": {**doubled, "d60": {"type": "null"}}, "$ref": "#/$defs/d0"},
        "a long list": {"type": "array", "minItems": 2_000_000_000},
        "a long text": {"type": "string", "minLength": 1_000_000, "maxLength": 2_000_000_000},
        "a pattern": {"type": "string", "pattern": "^(a|a)*b(x{1,1000}){1,1000}$"},
        "a reference to a file": {"$ref": "file:///etc/passwd"},
        "a reference to a host": {"$ref": "http://127.0.0.1:1/x"},
        "a path": {"$ref": "#/../../etc/passwd"},
        "no types": [[[[]]]],
    }


@attack("schemas")
async def schema_bombs(server: Attacked) -> None:
    found = schemas()
    calls = []
    for name, schema in found.items():
        text = json.dumps(schema)
        calls.append(server.bears(f"{name}", "/generate", generate(json_schema=text)))
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
        named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        body = {**chat, "response_format": named}
        calls.append(server.bears(f"{name}, chat", "/v1/chat/completions", body))
        if isinstance(schema, dict):
            tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
            body = {**chat, "tools": [tool], "tool_choice": "required"}
            calls.append(server.bears(f"{name}, tool", "/v1/chat/completions", body))
    grammars = ["root ::= root", "root ::= " + "(" * 5000, "root ::= a\n", 'root ::= "a"*' * 2000]
    calls += [server.bears("ebnf", "/generate", generate(ebnf=text)) for text in grammars]
    await asyncio.gather(*calls)


NAMES = (
    *("../../etc/passwd", "/etc/passwd", "/etc", "/dev/zero", "/proc/self/mem", "/proc/self/fd/0"),
    *("a\x00b", "x" * 70_000, "~root", "file:///etc/passwd", "\\\\host\\share", "", ".", "-", "*"),
    *("http://127.0.0.1:1/x", "gs://x/y", "org/name", "a\nb", "\ud800", "%2e%2e%2f", "$(id)"),
)


@attack("paths")
async def paths(server: Attacked) -> None:
    """A path that is not an adapter or a checkpoint is refused, and no content is told."""
    bodies: list[tuple[str, Any]] = []
    for name in NAMES:
        bodies += [
            ("/load_lora_adapter", {"lora_name": "new", "lora_path": name}),
            ("/load_lora_adapter", {"lora_name": name, "lora_path": "/none/there"}),
            ("/unload_lora_adapter", {"lora_name": name}),
            ("/update_weights_from_disk", {"model_path": name}),
            ("/get_weights_by_name", {"name": name}),
            ("/generate", {**generate(), "lora_path": name or "x"}),
            ("/update_weights_from_disk", {"model_path": "x", "load_format": name}),
        ]
    for path, body in bodies:
        answer = await server.bears(f"{path} {str(body)[:60]}", path, body)
        server.expect(b"root:x" not in answer, f"{path} {str(body)[:60]} told a file")
        server.expect(b'"success":true' not in answer, f"{path} {str(body)[:60]} was taken")
    for target in (
        *("/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/docs/../../../etc/passwd"),
        *("//etc/passwd", "/docs/%00", "/page_files/../page.py", "/v1/models/../../etc/passwd"),
    ):
        status, answer = await server.ask("GET", target)
        server.expect(status in (400, 404), f"GET {target}: {status}")
        server.expect(b"root:x" not in answer, f"GET {target} told a file")
    pickles = {"serialized_named_tensors": ["gASVAAAA"]}
    await server.refuses("pickles", "/update_weights_from_tensor", pickles)


@attack("foreign pages")
async def foreign(server: Attacked) -> None:
    """A page of another origin, also under a name that points here, may not ask or act."""
    page = ["Origin: http://evil.example", "Sec-Fetch-Site: cross-site", "Accept-Language: en"]
    rebound = ["Host: evil.example", "Accept-Language: en", "Sec-Fetch-Site: same-origin"]
    rebound_origin = ["Host: evil.example", "Origin: http://evil.example"]
    guarded = [("GET", path) for path in ("/server_info", "/get_server_info", "/model_info")]
    guarded += [("GET", path) for path in ("/get_model_info", "/get_weights_by_name?name=x")]
    guarded += [("GET", path) for path in ("/flush_cache", "/freeze_gc", "/start_profile")]
    guarded += [
        ("POST", path)
        for path in (
            *("/generate", "/v1/completions", "/v1/chat/completions", "/v1/messages"),
            *("/v1/responses", "/abort_request", "/update_weights_from_disk", "/tokenize"),
            *("/load_lora_adapter", "/unload_lora_adapter", "/pause_generation", "/v1/score"),
        )
    ]
    for method, path in guarded:
        for lines in (page, rebound, rebound_origin):
            body = b"{}" if method == "POST" else b""
            status, _ = await server.ask(method, path, body, lines)
            server.expect(status == 403, f"{method} {path} with {lines[0]}: {status}")


@attack("values")
async def values(server: Attacked) -> None:
    """Values out of any range, and text that could break a log's lines."""
    huge = 10**30
    many = {str(i): 1.0 for i in range(100_000)}
    params: list[dict[str, Any]] = [
        *({name: huge} for name in ("max_new_tokens", "n", "top_k", "sampling_seed")),
        *({name: -huge} for name in ("max_new_tokens", "n", "top_k", "min_new_tokens")),
        *({name: float(huge)} for name in ("temperature", "top_p", "frequency_penalty")),
        *({"stop": ["x" * 100_000]}, {"stop": [str(i) for i in range(100_000)]}),
        *({"stop_token_ids": list(range(100_000))}, {"logit_bias": many}, {"n": 100_000}),
    ]
    for each in params:
        await server.bears(str(each)[:60], "/generate", generate(**each))
    for text in ("\ud800", "\x00" * 1000, "\n[2026] fake line", "\x1b[2J\x1b]0;x\x07", "‮" * 999):
        body = {**generate(), "text": text or "a", "rid": text, "extra_key": text, "user": text}
        await server.bears(repr(text)[:20], "/generate", body)
        await server.bears(repr(text)[:20], "/v1/completions", {"prompt": text, "model": text})
    for template in ("{{ ''.__class__.__mro__ }}", "{% for i in range(10**9) %}x{% endfor %}"):
        chat = {"messages": [{"role": "user", "content": template}], "max_tokens": 2}
        await server.bears("a template in text", "/v1/chat/completions", chat)
        await server.bears(
            "a template", "/v1/chat/completions", {**chat, "chat_template": template}
        )


@attack("clients that read nothing")
async def unread(server: Attacked) -> None:
    """Six of eight slots are theirs until they leave."""
    body = json.dumps({**generate(max_new_tokens=1900, ignore_eos=True), "stream": True}).encode()
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(6):
            _, writer = await stack.enter_async_context(server.connection())
            writer.transport.pause_reading()
            writer.write(head + body)
        await asyncio.sleep(20)
    await asyncio.sleep(5)
    _, answer = await server.ask("GET", "/get_load")
    server.notes["load after they left"] = json.loads(answer)


@attack("floods of refused requests")
async def floods(server: Attacked) -> None:
    before, started = server.log.stat().st_size, time.monotonic()
    for _ in range(20):
        await asyncio.gather(*(server.ask("GET", f"/none/{i}") for i in range(50)))
        await asyncio.gather(*(server.ask("POST", "/generate", b"{") for _ in range(50)))
        await asyncio.gather(*(server.raw(b"x\r\n\r\n", seconds=9) for _ in range(50)))
    seconds = time.monotonic() - started
    with server.log.open("rb") as log:
        log.seek(before)
        lines = log.read().splitlines()
    rate = len(lines) / seconds
    server.notes |= {"requests": 3000, "log lines a second": round(rate, 1)}
    most = LOG_LINES_A_SECOND * (seconds + 1)  # the limit counts whole seconds
    server.expect(len(lines) < most, f"{len(lines)} log lines in {seconds:.1f} s")
    await asyncio.sleep(1.5)
    text = server.log.read_bytes()[before:]
    server.expect(b"more lines were not logged" in text, "the rest was not counted")


@attack("a full queue")
async def full_queue(server: Attacked) -> None:
    body = {"text": ["a"] * 60_000, "sampling_params": {"max_new_tokens": 1}}
    await server.refuses("60,000 prompts", "/generate", body)
    calls = [server.ask("POST", "/generate", generate(n=100)) for _ in range(40)]
    statuses = [status for status, _ in await asyncio.gather(*calls)]
    server.notes["statuses"] = {str(each): statuses.count(each) for each in set(statuses)}
    server.expect(set(statuses) <= {200, 503}, f"statuses {set(statuses)}")


@contextmanager
def serving(folder: Path) -> Iterator[tuple[int, int, Path]]:
    """Serve the bundled pair with adapters enabled; yield port, process id and log."""
    words = [
        "--port",
        "0",
        "--enable-lora",
        "--max-lora-rank",
        "4",
        "--request-timeout",
        str(BODY_SECONDS),
    ]
    log = folder / "log"
    with log.open("w") as output:
        command = [sys.executable, "-m", "jspec.cli.main", "serve", *words]
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        while not (ready := re.search(r"ready: http://[^:]*:(\d+)", log.read_text())):
            assert process.poll() is None, log.read_text()
            time.sleep(0.2)
        yield int(ready[1]), process.pid, log
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


async def other_client(server: Attacked, expected: str, waits: list[float]) -> None:
    """Read /health and generate, again and again."""
    while True:
        for method, path in (("GET", "/health"), ("POST", "/generate")):
            started = time.monotonic()
            body = generate(temperature=0) if method == "POST" else b""
            try:
                status, answer = await server.ask(method, path, body)
            finally:  # also of the one that the end of the attack cuts
                waits.append(time.monotonic() - started)
            is_same = path == "/health" or status == 503 or text_of(answer) == expected
            if status not in (200, 503) or not is_same:
                server.faults.append(f"another client: {status} {answer[:200]!r} of {path}")
        await asyncio.sleep(0.1)


def text_of(answer: bytes) -> str:
    return str(json.loads(answer)["text"])


async def run(name: str, server: Attacked, most_wait: float) -> dict[str, Any]:
    _, answer = await server.ask("POST", "/generate", generate(temperature=0))
    expected = text_of(answer)
    before, started, waits = held(server.pid), time.monotonic(), [0.0]
    memory, logged = resident_mib(server.pid), server.log.stat().st_size
    other = asyncio.ensure_future(other_client(server, expected, waits))
    await ATTACKS[name](server)
    seconds = time.monotonic() - started
    other.cancel()
    await asyncio.wait([other])
    server.expect(max(waits) < most_wait, f"another client waited for {max(waits):.1f} s")
    await asyncio.sleep(2)
    after = held(server.pid)
    for what in before:
        server.expect(
            after[what] <= before[what] + 8, f"{after[what]} {what}, {before[what]} before"
        )
    server.expect(b"Traceback" not in server.log.read_bytes()[logged:], "a traceback is in the log")
    return {
        "seconds": round(seconds, 1),
        "longest_wait_of_another_client": round(max(waits), 2),
        "num_requests_of_another_client": len(waits) - 1,
        "resident_mib": [round(memory), round(resident_mib(server.pid))],
        **server.notes,
        "faults": dict(Counter(server.faults)),
    }


async def run_all(names: Sequence[str], options: argparse.Namespace, at: Any) -> dict[str, Any]:
    port, pid, log = at
    found = {}
    # The first request with a grammar waits for a program.
    await Attacked(port, pid, log).ask("POST", "/generate", generate(regex="[0-9]+"))
    for name in names:
        found[name] = await run(name, Attacked(port, pid, log), options.most_wait)
        print(name, json.dumps(found[name]), flush=True)
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attacks", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(ATTACKS)}")
    parser.add_argument("--most-wait", type=float, default=5.0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    if unknown := set(options.names) - set(ATTACKS):
        parser.error(f"{sorted(unknown)}; expected some of {', '.join(ATTACKS)}")
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as at:
        found = asyncio.run(run_all(options.names or list(ATTACKS), options, at))
    if options.output is not None:
        write_result(options.output, {"attacks": found})
    return int(any(each["faults"] for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
