"""Measured figures of peers on one H200, for comparison.

Source: performance.md of the design notes. Measured on one NVIDIA H200 (141 GB), Llama-3.1-8B
shapes in bfloat16 with random weights, prompts of 1,024 tokens, greedy, each through its own Python
engine, by the same difference of a 288-token and a 32-token run; the speculative rows simulate an
acceptance length of exactly 3.0.
"""

from __future__ import annotations

from collections.abc import Mapping

MODEL = "llama-3.1-8b"
SOURCE = "performance.md: vLLM 0.25.0 and SGLang 0.5.15 on one NVIDIA H200"

# Tokens per second by mode, peer and batch.
TOKENS_PER_SECOND: Mapping[str, Mapping[str, Mapping[int, float]]] = {
    "plain": {
        "vLLM": {1: 202.7, 8: 1526.0, 32: 5030.0, 64: 8246.0},
        "SGLang": {1: 210.3, 8: 1549.0, 32: 5145.0, 64: 8370.0},
    },
    "chain": {
        "vLLM": {1: 469.0, 8: 3465.0, 32: 11280.0, 64: 15835.0},
        "SGLang": {1: 488.0, 8: 3592.0, 32: 11839.0, 64: 16473.0},
    },
    "tree": {"SGLang": {1: 406.0, 8: 2616.0, 32: 4907.0, 64: 5210.0}},
}
# Milliseconds of a prefill that emits one token, by prompts and tokens of each.
PREFILL_MS: Mapping[str, Mapping[str, float]] = {
    "vLLM": {"1x128": 12.2, "1x1024": 28.8, "1x8192": 213.8, "64x1024": 1522.0}
}
STARTUP_SECONDS: Mapping[str, tuple[float, float]] = {"vLLM": (74, 93), "SGLang": (47, 90)}


def better_peer(group: str, size: str) -> tuple[str, float] | None:
    """Return (name, figure) of the better peer in the cell `group`/`size`; None if not measured.

    In:  "chain", "8"           Out: ("SGLang", 3592.0)
    In:  "prefill", "1x128"     Out: ("vLLM", 12.2)
    """
    if group == "prefill":
        found = {name: figures[size] for name, figures in PREFILL_MS.items() if size in figures}
        return min(found.items(), key=lambda item: item[1], default=None)
    if group == "startup":
        fastest = {name: low for name, (low, _) in STARTUP_SECONDS.items()}
        return min(fastest.items(), key=lambda item: item[1])
    rows = TOKENS_PER_SECOND.get(group, {})
    found = {name: figures[int(size)] for name, figures in rows.items() if int(size) in figures}
    return max(found.items(), key=lambda item: item[1], default=None)


def ratio(group: str, size: str, value: float) -> float | None:
    """Return the ratio to the better peer; above 1 is better, for rates and for times alike."""
    peer = better_peer(group, size)
    if peer is None or not value:
        return None
    return value / peer[1] if group in TOKENS_PER_SECOND else peer[1] / value
