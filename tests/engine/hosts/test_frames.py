"""Frames between hosts carry steps and calls unchanged, and nothing else."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jspec.engine.hosts.frames import (
    MAGIC,
    PREFIX,
    Frame,
    FrameError,
    decoded,
    encoded,
    frame_of,
    message_of,
)
from jspec.engine.process.process_messages import Call, Enqueue
from jspec.engine.steps.step_def import ProgramKey
from jspec.messages.plan import StepKind
from jspec.messages.step_options import PLAIN
from jspec.messages.weight_update import AdapterUpdate, DiskUpdate

KEY = ProgramKey(StepKind.DECODE, 8, PLAIN)


def crossed(message: Enqueue | Call) -> Enqueue | Call:
    found = encoded(frame_of(message))
    magic, size, num_bytes = PREFIX.unpack(found[: PREFIX.size])
    assert magic == MAGIC
    header, arrays = found[PREFIX.size :][:size], found[PREFIX.size + size :]
    assert len(arrays) == num_bytes
    return message_of(decoded(header, arrays), {str(KEY): KEY})


def test_messages_cross_unchanged() -> None:
    packed = np.array([[2**31 - 1, -(2**31), 0]], np.int32)
    sent = Enqueue(7, "decode=8", (packed, 6, packed[:, :1]), True, is_kept=True, drops=(5, 6))
    found = crossed(sent)
    assert isinstance(found, Enqueue)
    assert found._replace(operands=()) == sent._replace(operands=())
    for one, two in zip(found.operands, sent.operands, strict=True):
        np.testing.assert_array_equal(one, two)
    for message in (
        Call("ensure", ((KEY,),)),
        Call("prepare", (DiskUpdate(target="/a", draft=None),)),
        Call("prepare", (AdapterUpdate(slot=3, path=None),)),
        Call("switch", ()),
    ):
        assert crossed(message) == message


def test_other_frames_are_refused() -> None:
    for header in (b"[]", b"{}", b"\xff", b'{"kind": "read", "shapes": [[4]]}'):
        with pytest.raises(FrameError):
            decoded(header, b"")
    for kind, fields in (
        ("call", {"name": "serve"}),
        ("call", {"name": "ensure", "programs": ["no such program"]}),
        ("enqueue", {"number": 1}),
        ("read", {}),
        ("call", {}),
    ):
        header = json.dumps({"kind": kind, "shapes": [], **fields}).encode()
        with pytest.raises(FrameError):
            message_of(decoded(header, b""), {})
    assert decoded(b'{"kind": "end", "shapes": []}', b"") == Frame("end", {})
