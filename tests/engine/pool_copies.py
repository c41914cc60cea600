"""Finding copies of a KV pool in compiled text."""

from __future__ import annotations


def pool_copies(text: str, shape: tuple[int, ...]) -> list[str]:
    """Lines of compiled text that copy an array of `shape`."""
    wanted = "[" + ",".join(str(n) for n in shape) + "]"
    return [
        line
        for line in text.splitlines()
        if wanted in line.split("(")[0] and (" copy(" in line or " copy-start(" in line)
    ]
