"""Output of a measurement: a table, a plot, and a trace for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jspec.cli.measurement.figures import Seen
from jspec.errors import ConfigError
from jspec.files.output_files import whole_file, write_text
from jspec.serving.trace import TraceEvent, TraceKind

ROWS = (
    ("tokens/s", "output_tokens_per_second"),
    ("first token, ms", "ttft_ms"),
    ("a token after it, ms", "tpot_ms"),
    ("between tokens, ms", "itl_ms"),
    ("between events, ms", "gap_ms"),
    ("end to end, ms", "e2e_ms"),
    ("requests", "num_finished"),
    ("errors", "num_errors"),
)
MICRO = 1e6


def table(result: Mapping[str, Any]) -> str:
    """Return a table of medians, one column per mode; pairs are p50 / p99."""
    modes = result["modes"]
    lines = [["", *modes]]
    for title, key in ROWS:
        lines.append([title, *(_cell(mode[key]) for mode in modes.values())])
    for name, mode in modes.items():
        found = mode["acceptance"]
        if found is not None:
            at = list(modes).index(name)
            lines.append(_row("tokens a verification", found["tokens_per_verification"], at, modes))
            for level in found["by_depth"]:
                share = f"{100 * level['share']:.1f}%"
                lines.append(_row(f"  depth {level['depth']} accepted", share, at, modes))
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = [
        "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(pairs))
        for pairs in (list(zip(line, widths, strict=True)) for line in lines)
    ]
    return "\n".join(line.rstrip() for line in [*text, *_closing(result)])


def _row(title: str, value: object, at: int, modes: Mapping[str, Any]) -> list[str]:
    return [title, *(str(value) if i == at else "" for i in range(len(modes)))]


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " / ".join("-" if each is None else f"{each:g}" for each in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _closing(result: Mapping[str, Any]) -> list[str]:
    lines = []
    ratio = result.get("ratio", {}).get("output_tokens_per_second")
    if ratio is not None:
        first, second = result["modes"]
        lines.append(f"{second} over {first}: {ratio:.2f} times the tokens a second")
    same = result.get("same_tokens")
    if same is not None:
        lines.append(f"the same tokens: {same['same']} of {same['of']} answers")
    for name, mode in result["modes"].items():
        lines += [f"{name}: {text}" for text in mode["errors"]]
    return lines


def chrome_trace(
    seen: Mapping[str, Sequence[Seen]], steps: Mapping[str, Sequence[TraceEvent]]
) -> dict[str, Any]:
    """Return a trace in Chrome's format, which Perfetto opens, in microseconds."""
    spans = [span for runs in seen.values() for run in runs for span in run.spans]
    begin = min((span.sent for span in spans), default=0.0)
    events: list[dict[str, Any]] = []
    for pid, (name, runs) in enumerate(seen.items(), start=1):
        process = _Process(pid=pid, begin=begin)
        num_lanes = max(
            (process.requests(repeat, run) for repeat, run in enumerate(runs)), default=0
        )
        lanes = {f"request lane {lane}": lane for lane in range(num_lanes)}
        if name in steps:
            lanes |= process.steps(steps[name], first_lane=num_lanes)
        events.append(process.named("process_name", name, lane=0))
        events += [process.named("thread_name", title, lane=lane) for title, lane in lanes.items()]
        events += process.events
    return {"traceEvents": events, "displayTimeUnit": "ms"}


class _Process:
    def __init__(self, *, pid: int, begin: float) -> None:
        self.events: list[dict[str, Any]] = []
        self._pid, self._begin = pid, begin

    def requests(self, repeat: int, run: Seen) -> int:
        """Add two events per request, in the first free lane; return the number of lanes."""
        lanes: list[float] = []  # when each becomes free
        for span in sorted(run.spans, key=lambda span: span.sent):
            lane = next((i for i, end in enumerate(lanes) if end <= span.sent), len(lanes))
            lanes[lane : lane + 1] = [span.last]
            about = {"request": span.index, "repeat": repeat, "tokens": span.num_tokens}
            self._add("to the first token", lane, span.sent, span.first, about)
            self._add("decode", lane, span.first, span.last, about)
        return len(lanes)

    def steps(self, trace: Sequence[TraceEvent], *, first_lane: int) -> dict[str, int]:
        """Add the engine's runner calls, one lane per kind; return the lanes by title."""
        lanes = {kind: first_lane + i for i, kind in enumerate(TraceKind)}
        for call in trace:
            if call.started >= self._begin:
                about = {"step": call.step}
                self._add(call.kind.value, lanes[call.kind], call.started, call.ended, about)
        return {f"engine {kind.value}": lane for kind, lane in lanes.items()}

    def named(self, kind: str, name: str, *, lane: int) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": self._pid, "tid": lane, "args": {"name": name}}

    def _add(
        self, name: str, lane: int, started: float, ended: float, about: Mapping[str, Any]
    ) -> None:
        self.events.append(
            {
                "ph": "X",
                "pid": self._pid,
                "tid": lane,
                "name": name,
                "ts": (started - self._begin) * MICRO,
                "dur": (ended - started) * MICRO,
                "args": dict(about),
            }
        )


def check_can_plot() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed; expected pip install '.[plot]'"
        ) from None


def plot(path: Path, result: Mapping[str, Any]) -> None:
    from matplotlib.figure import Figure  # no window, no global state

    modes = result["modes"]
    accepting = {name: mode["acceptance"] for name, mode in modes.items() if mode["acceptance"]}
    figure = Figure(figsize=(5 * (1 + bool(accepting)), 4), layout="constrained")
    axes = figure.subplots(1, 1 + bool(accepting), squeeze=False)[0]
    rates = [mode["output_tokens_per_second"] for mode in modes.values()]
    axes[0].bar(list(modes), rates, color=("#8a93a6", "#2f6fde")[: len(rates)], width=0.6)
    for at, mode in enumerate(modes.values()):
        runs = [run["output_tokens_per_second"] for run in mode["runs"]]
        axes[0].plot([at] * len(runs), runs, "k.", markersize=5)
    axes[0].set_ylabel("output tokens/s (bar: median; dots: runs)")
    for name, found in accepting.items():
        depths = [level["depth"] for level in found["by_depth"]]
        shares = [level["share"] for level in found["by_depth"]]
        label = f"{name}: {found['tokens_per_verification']:g} tokens a verification"
        axes[1].plot(depths, shares, "o-", label=label)
        axes[1].set_xticks(depths)
    if accepting:
        axes[1].set(xlabel="draft depth", ylabel="share of verifications", ylim=(0, 1))
        axes[1].legend()
    figure.suptitle(result.get("environment", {}).get("chip", ""))
    try:
        with whole_file(path) as part:
            figure.savefig(part, dpi=150)
    except ValueError as error:
        raise ConfigError(f"plot is {str(path)!r}: {error}") from error


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(value, indent=1) + "\n")
