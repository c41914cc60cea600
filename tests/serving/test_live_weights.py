"""Work between two steps, and its effect on requests and streams."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from jspec.config.limits import WindowSpace
from jspec.errors import CheckpointError, ConfigError, EngineClosedError, RequestError
from jspec.messages.weight_update import ArrayUpdate, DiskUpdate, Model, WeightUpdate
from jspec.serving.live_weights import LiveWeights
from jspec.serving.loop import EngineLoop
from jspec.serving.loop_thread import LoopThread
from jspec.serving.trace import TraceEvent
from jspec.serving.weight_update_gate import OnEngineThread as OnThread
from tests.support.fake_runner import FakeRunner, small_limits

from .test_loop import LONG, check_output, make_loop, make_request, read, run, until_idle


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("windows", [(), (WindowSpace(window=8, num_pages=64),)], ids=len)
def test_rows_are_filled_anew_and_write_the_same_text(
    depth: int, windows: tuple[WindowSpace, ...]
) -> None:
    """The fake text depends on no weights, so lost or repeated tokens show."""
    trace: list[TraceEvent] = []

    async def main() -> None:
        limits = small_limits(overlap_depth=depth, windows=windows, prefix_cache=True)
        loop = make_loop(limits, trace=trace)
        requests = [make_request(f"r{i}", max_new_tokens=40, prompt_len=9) for i in range(6)]
        streams = loop.submit(requests)
        firsts = [await anext(stream) for stream in streams[:3]]
        seen: list[tuple[int, int, int]] = []

        async def update(on_engine_thread: OnThread) -> None:
            before = len(trace)
            await on_engine_thread(lambda: None)
            await asyncio.sleep(0.01)
            stats = loop.stats
            seen.append((stats.num_steps_in_flight, len(trace) - before, stats.num_running))
            loop.set_weight_version("2")
            seen.append((loop.stats.num_steps_in_flight, 0, loop.stats.num_running))

        await loop.between_steps(update)
        assert [each[:2] for each in seen] == [(0, 0), (0, 0)]
        assert seen[0][2] > seen[1][2] == 0
        rest = await asyncio.gather(*(read(stream) for stream in streams))
        for i, request in enumerate(requests):
            chunks = [*firsts[i : i + 1], *rest[i]]
            check_output(request, chunks)
            assert chunks[-1].weight_version == "2"
        assert firsts[0].weight_version == "default"
        assert rest[0][-1].num_retractions == 1
        assert loop.stats.num_leaked_pages == 0
        await until_idle(loop)
        await loop.close()

    run(main())


def test_an_error_of_a_visit_is_its_callers_and_the_loop_goes_on() -> None:
    async def main() -> None:
        loop = make_loop(small_limits())

        def fail() -> None:
            int("x")

        async def update(on_engine_thread: OnThread) -> None:
            await on_engine_thread(fail)

        with pytest.raises(ValueError, match="invalid literal"):
            await loop.between_steps(update)
        request = make_request("a")
        check_output(request, await read(loop.submit([request])[0]))
        await loop.close()
        with pytest.raises(EngineClosedError, match="nothing runs between its steps"):
            await loop.between_steps(update)

    run(main())


def test_a_visit_that_leaves_nothing_to_run_with_ends_the_loop() -> None:
    async def main() -> None:
        loop = make_loop(small_limits())
        stream = loop.submit([make_request("a", max_new_tokens=LONG)])[0]
        await anext(stream)

        async def update(_: OnThread) -> None:
            raise EngineClosedError("the weights are gone")

        with pytest.raises(EngineClosedError, match="the weights are gone"):
            await loop.between_steps(update)
        with pytest.raises(EngineClosedError, match=r"because of .*the weights are gone"):
            await read(stream)
        assert loop.is_closed

    run(main())


def test_a_visit_whose_caller_went_away_before_it_began_never_runs() -> None:
    async def main() -> None:
        loop, seen = make_loop(small_limits()), []
        entered, leave = asyncio.Event(), asyncio.Event()

        async def long_visit(_: OnThread) -> None:
            entered.set()
            await leave.wait()
            seen.append("long")

        async def short_visit(_: OnThread) -> None:
            seen.append("short")

        first = asyncio.ensure_future(loop.between_steps(long_visit))
        await entered.wait()
        second = asyncio.ensure_future(loop.between_steps(short_visit))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.wait({second})
        leave.set()
        await first
        request = make_request("a")
        check_output(request, await read(loop.submit([request])[0]))
        assert seen == ["long"]
        await loop.close()

    run(main())


@pytest.mark.parametrize("fails", [False, True])
def test_a_visit_that_has_begun_is_waited_for_by_a_caller_that_was_cancelled(fails: bool) -> None:
    async def main() -> None:
        loop = make_loop(small_limits())
        entered, leave = asyncio.Event(), asyncio.Event()

        async def update(_: OnThread) -> None:
            entered.set()
            await leave.wait()
            if fails:
                raise ValueError("nobody hears this")

        caller = asyncio.ensure_future(loop.between_steps(update))
        await entered.wait()
        caller.cancel()
        await asyncio.sleep(0.01)
        assert not caller.done()
        leave.set()
        await asyncio.wait({caller})
        assert caller.cancelled()
        await loop.close()

    run(main())


def test_an_update_that_was_cancelled_changes_nothing() -> None:
    """A client gives up while steps are in flight: no switch follows, and the next update may
    come."""

    async def main() -> None:
        runner = FakeRunner(small_limits(), step_seconds=0.05)
        loop, weights = make_loop(small_limits(), runner), FakeWeights()
        holder = Holder(loop, weights)

        async def ask() -> None:
            stream = loop.submit([make_request("a", max_new_tokens=30)])[0]
            await anext(stream)
            update = asyncio.ensure_future(
                holder.async_update_weights_from_tensor({"A": 1}, weight_version="A")
            )
            while not loop._update_gate:
                await asyncio.sleep(0.001)
            update.cancel()
            await asyncio.wait({update})
            chunks = await read(stream)
            assert chunks[-1].num_retractions == 0
            assert (weights.switched, loop.weight_version) == ([], "default")
            await holder.async_update_weights_from_tensor({"B": 1}, weight_version="B")
            assert [each.arrays for each in weights.switched] == [{"B": 1}]

        await holder.on_the_loop(ask)
        await holder.close()

    run(main())


def test_a_loop_that_closes_tells_who_waits_for_a_visit() -> None:
    async def main() -> None:
        loop = make_loop(small_limits())
        entered, leave = asyncio.Event(), asyncio.Event()

        async def update(_: OnThread) -> None:
            entered.set()
            await leave.wait()

        first = asyncio.ensure_future(loop.between_steps(update))
        await entered.wait()
        second = asyncio.ensure_future(loop.between_steps(update))
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(loop.close())
        await asyncio.sleep(0)
        leave.set()
        await first
        with pytest.raises(EngineClosedError, match="it was closed"):
            await second
        await closing

    run(main())


@dataclass
class FakeWeights:
    """Weights that record their calls. wrong: the error of `prepare`."""

    wrong: str = ""
    has_draft: bool = True
    draft_is_in_target: bool = False
    switched: list[WeightUpdate] = field(default_factory=list)

    def prepare(self, update: WeightUpdate) -> Any:
        if self.wrong:
            raise CheckpointError(self.wrong)
        return update

    def switch(self, prepared: Any) -> None:
        self.switched.append(prepared)

    def tensor(self, name: str, model: Model | None) -> Any:
        raise NotImplementedError(f"{name} of {model}")


class Holder(LiveWeights):
    """Weights with their own thread."""

    def __init__(self, loop: EngineLoop, weights: FakeWeights) -> None:
        super().__init__(LoopThread(), loop, weights)

    async def close(self) -> None:
        await self._loop_thread.call(self._loop.close())
        await asyncio.to_thread(self._loop_thread.stop)

    async def on_the_loop(self, work: Callable[[], Awaitable[Any]]) -> Any:
        async def task() -> Any:
            return await work()

        return await self._loop_thread.call(task())


def test_waiting_holds_new_requests_back_and_refuses_what_would_never_end() -> None:
    async def main() -> None:
        weights = FakeWeights()
        loop = make_loop(small_limits())
        holder = Holder(loop, weights)

        async def wait_for_one() -> None:
            request = make_request("a", max_new_tokens=60)
            stream = loop.submit([request])[0]
            first = await anext(stream)
            updating = asyncio.ensure_future(
                holder.async_update_weights_from_tensor({"x": 1}, wait_for_requests=True)
            )
            while holder.may_submit.is_set():
                await asyncio.sleep(0.001)
            assert not weights.switched
            check_output(request, [first, *await read(stream)])
            assert (await updating)["num_paused_requests"] == 0
            assert weights.switched == [ArrayUpdate(arrays={"x": 1})]
            assert holder.may_submit.is_set()

        await holder.on_the_loop(wait_for_one)

        async def never() -> None:
            stream = loop.submit([make_request("b", max_new_tokens=60)])[0]
            loop.pause()
            with pytest.raises(RequestError, match="paused and 1 request is there, which would"):
                await holder.async_update_weights_from_tensor({"x": 1}, wait_for_requests=True)
            assert holder.may_submit.is_set()
            loop.resume()
            await read(stream)

        await holder.on_the_loop(never)
        await holder.close()

    run(main())


def test_which_models_a_directory_updates() -> None:
    async def main() -> None:
        weights = FakeWeights()
        holder = Holder(make_loop(small_limits()), weights)
        update = holder.async_update_weights_from_disk
        await update("t")
        await update("t", selector="all", speculative_draft_model_path="d")
        await update("d", selector="draft")
        weights.draft_is_in_target = True
        await update("t")
        await update("t", selector="target")
        assert weights.switched == [
            DiskUpdate(target="t"),
            DiskUpdate(target="t", draft="d"),
            DiskUpdate(draft="d"),
            DiskUpdate(target="t", draft="t"),
            DiskUpdate(target="t"),
        ]
        assert holder.updated_model_path == "t"
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"selector": "both"}, "selector is 'both'; expected target, draft or all"),
            ({"selector": "all"}, "selector is all, and the draft has a directory of its own"),
            ({"load_format": "dummy"}, "load_format is 'dummy'"),
            ({"selector": "draft", "speculative_draft_model_path": "e"}, "is not model_path 'm'"),
            ({"weight_version": "v" * 300}, "expected a name of 1 to 256"),
        ]
        weights.draft_is_in_target = False
        for options, message in wrong:
            with pytest.raises((RequestError, ConfigError), match=message):
                await update("m", **options)
        weights.wrong = "all that is wrong"
        with pytest.raises(CheckpointError, match="all that is wrong"):
            await update("t", weight_version="3")
        assert holder.weight_version == "default"
        assert len(weights.switched) == 5
        await holder.close()

    run(main())


class SlowWeights(FakeWeights):
    """Weights that take a moment to read, and record when."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self.reading = threading.Event()

    def prepare(self, update: WeightUpdate) -> Any:
        assert isinstance(update, ArrayUpdate)
        (name,) = update.arrays
        self.events.append(f"begin {name}")
        self.reading.set()
        time.sleep(0.1)
        self.events.append(f"end {name}")
        return update


def test_an_update_that_was_cancelled_while_it_reads_holds_the_next_one_back() -> None:
    """Its thread cannot be stopped, and would put its weights where the next one's are."""

    async def main() -> None:
        weights = SlowWeights()
        holder = Holder(make_loop(small_limits()), weights)
        first = asyncio.ensure_future(holder.async_update_weights_from_tensor({"A": 1}))
        await asyncio.to_thread(weights.reading.wait)
        first.cancel()
        await asyncio.wait({first})
        await holder.async_update_weights_from_tensor({"B": 1})
        assert weights.events == ["begin A", "end A", "begin B", "end B"]
        assert [each.arrays for each in weights.switched] == [{"B": 1}]
        await holder.close()

    run(main())


class SlowToSwitch(FakeWeights):
    """Weights that switch once an event is set."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.may_end = threading.Event(), threading.Event()

    def switch(self, prepared: Any) -> None:
        self.begun.set()
        assert self.may_end.wait(timeout=60)
        super().switch(prepared)


def test_what_is_known_of_the_weights_changes_with_them_though_nobody_waits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "jspec.scheduler")

    async def main() -> None:
        weights = SlowToSwitch()
        holder = Holder(make_loop(small_limits()), weights)
        update = asyncio.ensure_future(holder.async_update_weights_from_disk("m"))
        await asyncio.to_thread(weights.begun.wait)
        assert holder.updated_model_path is None
        update.cancel()
        weights.may_end.set()
        await asyncio.wait({update})
        while holder.updated_model_path != "m":
            await asyncio.sleep(0.001)
        while not caplog.messages:
            await asyncio.sleep(0.001)
        await holder.close()

    run(main())
    assert caplog.messages == [
        "other weights are in force: version 'default', from m; requests that go on: 0"
    ]
