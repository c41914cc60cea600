"""Frames between hosts: a JSON header of bounded size, and i32 arrays as they are.

    magic  sizes     header                                         arrays
    JSPH   u32, u32  {"kind": "enqueue", ..., "shapes": [[1, 38]]}  i32, little-endian

Received data is never executed or unpickled.
"""

from __future__ import annotations

import json
import math
import socket
import struct
import threading
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from jspec.engine.process.process_messages import Call, Enqueue
from jspec.engine.steps.step_def import ProgramKey
from jspec.errors import JspecError
from jspec.messages.weight_update import AdapterUpdate, DiskUpdate

MAGIC = b"JSPH"
PREFIX = struct.Struct("!4sII")
MAX_HEADER, MAX_ARRAYS = 1 << 22, 1 << 28  # bytes
INT32 = np.dtype("<i4")
SHARED_CALLS = ("ensure", "prepare", "switch", "drop")  # calls that every host runs
KEEPALIVE_SECONDS = 20  # silence after which a host is lost


class FrameError(JspecError):
    """Raised for bytes that are not a frame of jspec."""


class Frame(NamedTuple):
    kind: str
    fields: dict[str, Any]
    arrays: tuple[np.ndarray, ...] = ()


def encoded(frame: Frame) -> bytes:
    shapes = [array.shape for array in frame.arrays]
    header = json.dumps({**frame.fields, "kind": frame.kind, "shapes": shapes}).encode()
    arrays = [np.ascontiguousarray(array, INT32).tobytes() for array in frame.arrays]
    prefix = PREFIX.pack(MAGIC, len(header), sum(map(len, arrays)))
    return b"".join((prefix, header, *arrays))


def decoded(header: bytes, arrays: bytes) -> Frame:
    try:
        fields = json.loads(header)
        kind, shapes = str(fields.pop("kind")), fields.pop("shapes")
        found, at = [], 0
        for shape in shapes:
            count = math.prod(shape)
            found.append(np.frombuffer(arrays, INT32, count, at * INT32.itemsize).reshape(shape))
            at += count
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise FrameError(
            f"a frame has the header {header[:80]!r}; expected one of jspec"
        ) from error
    return Frame(kind, fields, tuple(found))


class FrameSocket:
    """A connection to another host. Sending is thread-safe; one thread receives."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._sending = threading.Lock()
        self._file = connected.makefile("rb", buffering=1 << 16)
        for option, value in (
            (socket.TCP_NODELAY, 1),
            (socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS // 2),
            (socket.TCP_KEEPINTVL, KEEPALIVE_SECONDS // 4),
            (socket.TCP_KEEPCNT, 2),
            (socket.TCP_USER_TIMEOUT, KEEPALIVE_SECONDS * 1000),
        ):
            connected.setsockopt(socket.IPPROTO_TCP, option, value)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def set_timeout(self, seconds: float | None) -> None:
        self._socket.settimeout(seconds)

    def send(self, kind: str, **fields: Any) -> None:
        self.send_bytes(encoded(Frame(kind, fields)))

    def send_bytes(self, frame: bytes) -> None:
        with self._sending:
            self._socket.sendall(frame)

    def receive(self) -> Frame:
        """Return the next frame. Raises EOFError, OSError or, for other bytes, FrameError."""
        magic, header_bytes, array_bytes = PREFIX.unpack(self._read(PREFIX.size))
        if magic != MAGIC or header_bytes > MAX_HEADER or array_bytes > MAX_ARRAYS:
            raise FrameError(f"a frame begins with {magic!r}; expected {MAGIC!r}")
        header = self._read(header_bytes)
        return decoded(header, self._read(array_bytes))

    def _read(self, num_bytes: int) -> bytes:
        found = self._file.read(num_bytes)
        if len(found) < num_bytes:
            raise EOFError
        return found

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that receives
        self._file.close()
        self._socket.close()


# Messages to a runner process as frames, and back.


def frame_of(message: Enqueue | Call, *, in_order: bool = False) -> Frame:
    if isinstance(message, Enqueue):
        arrays = tuple(x for x in message.operands if isinstance(x, np.ndarray))
        operands = [x if isinstance(x, int) else None for x in message.operands]
        fields = {**message._asdict(), "operands": operands}
        return Frame("enqueue", fields, arrays)
    (arg,) = message.args or (None,)
    fields = {"name": message.name, "in_order": in_order}
    if isinstance(arg, tuple):
        return Frame("call", {**fields, "programs": [str(key) for key in arg]})
    if isinstance(arg, DiskUpdate):
        return Frame("call", {**fields, "disk": [arg.target, arg.draft]})
    if isinstance(arg, AdapterUpdate):
        return Frame("call", {**fields, "adapter": [arg.slot, arg.path]})
    return Frame("call", fields)


def message_of(frame: Frame, programs: dict[str, ProgramKey]) -> Enqueue | Call:
    """Return a frame's message. programs: all that it may name. Raises FrameError."""
    fields = frame.fields
    try:
        if frame.kind == "enqueue":
            arrays = iter(frame.arrays)
            operands = tuple(next(arrays) if x is None else int(x) for x in fields.pop("operands"))
            drops = tuple(map(int, fields.pop("drops")))
            return Enqueue(operands=operands, drops=drops, **fields)
        if fields["name"] not in SHARED_CALLS:
            raise KeyError(fields["name"])
        args: tuple[Any, ...] = ()
        if "programs" in fields:
            args = (tuple(programs[name] for name in fields["programs"]),)
        elif "disk" in fields:
            target, draft = fields["disk"]
            args = (DiskUpdate(target=target, draft=draft),)
        elif "adapter" in fields:
            slot, path = fields["adapter"]
            args = (AdapterUpdate(slot=int(slot), path=path),)
        return Call(fields["name"], args)
    except (KeyError, TypeError, ValueError, StopIteration) as error:
        raise FrameError(f"a frame of {frame.kind!r} has {fields}; expected jspec's") from error
