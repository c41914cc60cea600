"""jspec.Engine called directly: interrupts, and requests that are refused before they are
queued."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import closing, nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest

from jspec.errors import ConfigError, EngineClosedError, RequestError
from jspec.server.serve import bind
from jspec.server.server_args import ServerArgs
from jspec.serving.engine import Engine
from tests.support.interruption import interruption

from .helpers import ENDLESS, wait_idle, wait_running, wait_taken


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_queued", [False, True])
def test_an_interrupt_ends_its_request_alone(
    engine: Engine, *, is_queued: bool, stream: bool
) -> None:
    wait_idle(engine)
    num_others = 2 if is_queued else 0  # all slots: the interrupt then finds a wait, not a chunk
    filling = threading.Thread(target=engine.generate, args=(["x"] * 2, ENDLESS))
    if is_queued:
        filling.start()
        wait_running(engine, 2)
    num_aborted = engine.stats.num_aborted
    with interruption(partial(wait_taken, engine, num_others + 1)):
        answer = engine.generate("def fib(", ENDLESS, stream=stream)
        with closing(answer) if stream else nullcontext():  # it may be between two chunks
            for _ in answer if stream else ():
                pass
    stats = engine.stats  # at once, not when 16,000 tokens are written
    assert (stats.num_running, stats.num_queued) == (num_others, 0)
    assert stats.num_aborted == num_aborted + 1
    if is_queued:
        assert asyncio.run(engine.abort_all()) == 2
        filling.join(timeout=120)
    wait_idle(engine)


def test_a_stream_that_is_closed_or_dropped_ends_the_request(engine: Engine) -> None:
    stream = engine.generate("def fib(", ENDLESS, stream=True)
    next(stream)
    wait_running(engine, 1)
    stream.close()
    assert engine.stats.num_running == 0  # at once, not when the garbage collector finds it
    stream = engine.generate("def fib(", ENDLESS, stream=True)
    next(stream)
    del stream
    wait_idle(engine)


def test_any_number_of_event_loops_and_none_share_an_engine(
    engine_arguments: dict[str, Any],
) -> None:
    prompt, few = "def fib(", {"max_new_tokens": 4, "temperature": 0}

    async def stream_text(engine: Engine) -> str:
        results = [r async for r in await engine.async_generate(prompt, few, stream=True)]
        return str(results[-1]["text"])

    with Engine(**engine_arguments) as engine:  # whose first call is an asynchronous one
        texts = [asyncio.run(engine.async_generate(prompt, few))["text"] for _ in range(2)]
        texts.append(engine.generate(prompt, few)["text"])
        texts += [asyncio.run(stream_text(engine)) for _ in range(2)]
        assert len(set(texts)) == 1

        async def give_up() -> None:
            async with asyncio.timeout(0.3):
                await engine.async_generate(prompt, ENDLESS)

        with pytest.raises(TimeoutError):
            asyncio.run(give_up())
        assert engine.stats.num_aborted == 1
        wait_idle(engine)
        check_that_shutting_down_twice_ends_streams_once(engine)
        asyncio.run(engine.close())
        with pytest.raises(EngineClosedError):
            asyncio.run(engine.async_generate(prompt, few))


def check_that_shutting_down_twice_ends_streams_once(engine: Engine) -> None:
    read, closed = (engine.generate("x", ENDLESS, stream=True) for _ in range(2))
    next(read)  # the other one never asks for a chunk
    shutting = [threading.Thread(target=engine.shutdown) for _ in range(2)]
    for thread in shutting:
        thread.start()
    for thread in shutting:
        thread.join(timeout=120)
        assert not thread.is_alive()
    with pytest.raises(EngineClosedError):
        list(read)
    closed.close()
    for call in (engine.generate, engine.get_weights_by_name, engine.update_weights_from_disk):
        with pytest.raises(EngineClosedError, match=r"^the engine is closed$"):
            call("x")
    with pytest.raises(EngineClosedError, match=r"^the engine is closed$"):
        engine.flush_cache()


BAD_CALLS: list[tuple[dict[str, Any], str]] = [
    ({"input_ids": [[1, 2], 3]}, "input_ids holds 3; expected"),
    ({"input_ids": [[1, 2], None]}, "input_ids holds null; expected"),
    ({"input_ids": [3, [1]]}, r"input_ids holds \[1\]; expected ids from 0 to 319"),
    ({"input_ids": 5}, "input_ids is 5; expected"),
    ({"input_ids": {1: 2}}, r"input_ids is \{1: 2\}; expected"),
    ({"input_ids": np.array([5.5, 6])}, "input_ids holds 5.5; expected ids from 0 to 319"),
    ({"prompt": ["a", 5]}, "prompt is int; expected text"),
    ({"prompt": 5}, "prompt is int; expected text"),
    ({"prompt": "a", "sampling_params": 5}, "sampling_params is 5; expected"),
    ({"prompt": "a", "sampling_params": 0}, "sampling_params is 0; expected"),
    ({"prompt": "a", "sampling_params": "x"}, "sampling_params is 'x'; expected"),
    ({"prompt": ["a", "b"], "sampling_params": [{}, 7]}, "sampling_params is 7; expected"),
    ({"prompt": ["a", "b"], "sampling_params": [{}]}, "1 sampling_params for 2 prompts"),
]


@pytest.mark.parametrize(("call", "message"), BAD_CALLS, ids=[m for _, m in BAD_CALLS])
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_type_is_a_request_error(
    engine: Engine, call: dict[str, Any], message: str, *, stream: bool
) -> None:
    with pytest.raises(RequestError, match=message):
        engine.generate(**call, stream=stream)


def test_a_name_that_generate_does_not_have(engine: Engine) -> None:
    with pytest.raises(TypeError, match=r"unexpected argument 'prompts'; did you mean 'prompt'\?"):
        engine.generate(prompts=["x"])  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"unexpected argument 'image_data'$"):
        engine.generate("x", image_data="a")  # type: ignore[call-arg]


@pytest.mark.parametrize("host", ["ü..x", "a\0b", "a\ud800"])
def test_a_host_that_is_no_name_is_a_config_error(host: str) -> None:
    with pytest.raises(ConfigError, match="cannot listen on host"):
        bind(ServerArgs(host=host, port=0))


def test_a_taken_port_is_a_config_error() -> None:
    with bind(ServerArgs(port=0)) as bound:
        bound.listen()
        with pytest.raises(ConfigError, match="already in use; expected"):
            bind(ServerArgs(port=bound.getsockname()[1]))


def test_events_do_not_wait_for_acknowledgements() -> None:
    """With Nagle's algorithm an event would wait for the client's delayed ACK, 40 ms."""
    found: list[int] = []

    async def main() -> None:
        async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted = writer.get_extra_info("socket")
            found.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with bind(ServerArgs(port=0)) as bound:
            async with await asyncio.start_server(answer, sock=bound):
                reader, writer = await asyncio.open_connection(*bound.getsockname())
                await reader.read()
                writer.close()

    asyncio.run(main())
    assert found[0] != 0
