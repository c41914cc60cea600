"""Methods that are made from others: the synchronous form of one, or a part's as its owner's."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from jspec.serving.loop_thread import LoopThread

S = TypeVar("S")
R = TypeVar("R")
P = ParamSpec("P")
E = TypeVar("E", bound="OnLoopThread")


class OnLoopThread(Protocol):
    _loop_thread: LoopThread


def mirrored(
    call: Callable[Concatenate[E, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[E, P], R]:
    """Return the synchronous form of a method `async_...`; generators become iterators."""
    name = call.__name__.removeprefix("async_")

    @functools.wraps(call)
    def run(self: E, /, *args: P.args, **kwargs: P.kwargs) -> R:
        thread = self._loop_thread
        thread.start_thread()
        found: Any = thread.run(call(self, *args, **kwargs))
        if isinstance(found, AsyncGenerator):
            found = thread.iterate(found)
        return cast(R, found)

    run.__name__, run.__qualname__ = name, name
    return run


def forwarded(part: str, call: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[Any, P], R]:
    @functools.wraps(call)
    def forward(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return call(getattr(self, part), *args, **kwargs)

    return forward
