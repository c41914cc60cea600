"""Where first tokens spend their time: a server's trace, joined with what its client saw.

Client and server run on one machine, so their clocks are one.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from jspec.cli.measurement.figures import Seen, percentile

# What lies between two borders of jspec.serving.request_trace, in order; client to client.
PARTS = (
    *("to_server", "http_parse", "tokenize", "submit", "queue", "plan", "dispatch", "device_read"),
    *("commit", "to_reader_and_text", "stream", "to_client"),
)


def summarise(trace: Path, seen: Seen) -> dict[str, Any]:
    """p50 and p99 of each part and of the whole, milliseconds, over the requests of `seen`."""
    spans: dict[str, list[float]] = {part: [] for part in (*PARTS, "whole")}
    for line in trace.read_text(encoding="utf-8").splitlines():
        marks = json.loads(line)
        name = marks.pop("request_id")
        if name not in seen.sent or name not in seen.first:
            continue
        times = [seen.sent[name], *marks.values(), seen.first[name]]
        for part, (begin, end) in zip(PARTS, pairwise(times), strict=True):
            spans[part].append(end - begin)
        spans["whole"].append(times[-1] - times[0])
    figures: dict[str, Any] = {
        part: [round(1e3 * percentile(values, percent), 3) for percent in (50, 99)]
        for part, values in spans.items()
        if values
    }
    return {"num_requests": len(spans["whole"]), **figures}
