"""Mailboxes: no chunk is lost between two threads, and an event loop is woken once for all."""

from __future__ import annotations

import asyncio
import sys
import threading

import pytest

from jspec.errors import EngineClosedError
from jspec.messages.request import FinishKind, FinishReason, Request, SamplingParams, StreamChunk
from jspec.scheduler.outputs.token_history import Piece, TokenHistory
from jspec.serving.streams.mailbox import Mailbox, wake
from tests.support.fake_runner import small_limits

NUM_PIECES = 4000
SPEC = small_limits().draft_shape


def history() -> TokenHistory:
    request = Request(request_id="r", prompt_ids=(1,), sampling=SamplingParams(), seed=0)
    return TokenHistory(request, SPEC, stream=None)


def test_every_piece_is_read_however_the_threads_are_switched() -> None:
    before, source = sys.getswitchinterval(), history()
    boxes = [Mailbox() for _ in range(3)]

    def put_all() -> None:
        for index in range(NUM_PIECES):
            finish = FinishReason(kind=FinishKind.LENGTH) if index == NUM_PIECES - 1 else None
            wake([box.put(Piece(source, (index,), finish=finish)) for box in boxes])

    async def read(box: Mailbox) -> list[int]:
        found: list[int] = []
        while True:
            chunk = await box.get()
            assert isinstance(chunk, StreamChunk)
            found += chunk.new_ids
            if chunk.finish is not None:
                return found

    async def main() -> list[list[int]]:
        thread = threading.Thread(target=put_all)
        thread.start()
        found = await asyncio.wait_for(asyncio.gather(*map(read, boxes)), timeout=60)
        thread.join()
        return found

    sys.setswitchinterval(1e-6)
    try:
        assert asyncio.run(main()) == [list(range(NUM_PIECES))] * 3
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("from_own_thread", [True, False])
def test_one_call_wakes_all_readers_of_a_loop(from_own_thread: bool) -> None:
    """On the caller's own loop it costs no system call."""
    calls = 0

    class CountingLoop(asyncio.SelectorEventLoop):
        def call_soon_threadsafe(self, *args, **options):  # type: ignore[no-untyped-def, override]
            nonlocal calls
            calls += 1
            return super().call_soon_threadsafe(*args, **options)

    async def main() -> None:
        boxes = [Mailbox() for _ in range(5)]
        readers = [asyncio.create_task(box.get()) for box in boxes]
        await asyncio.sleep(0)
        source = history()
        waiting = [box.put(Piece(source, (7,))) for box in boxes]
        if from_own_thread:
            wake(waiting)
        else:
            thread = threading.Thread(target=wake, args=(waiting,))
            thread.start()
            thread.join()
        assert calls == (0 if from_own_thread else 1)
        await asyncio.gather(*readers)

    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        runner.run(main())


def test_ready_stops_before_an_error() -> None:
    box, source = Mailbox(), history()
    box.put(Piece(source, (1,)))
    box.put(Piece(source, (2, 3)))
    box.put(EngineClosedError("closed"))
    assert [chunk.new_ids for chunk in box.get_ready()] == [(1,), (2, 3)]
    assert isinstance(asyncio.run(box.get()), EngineClosedError)
