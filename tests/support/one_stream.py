"""A small pair on disk, and the flags that serve one stream of it."""

from __future__ import annotations

from pathlib import Path

from tests.support.tiny_models import write_tiny_pair

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}\n{% endfor %}a: "


def flags_of_one_stream(folder: Path) -> list[str]:
    """Return `jspec generate`'s defaults as flags of `serve`; `folder` keeps compiled programs."""
    pair = write_tiny_pair(folder, max_position=16384)
    (pair.target_path / "chat_template.jinja").write_text(TEMPLATE)
    return [
        *("--model-path", str(pair.target_path), "--speculative-algorithm", "EAGLE3"),
        *("--speculative-draft-model-path", str(pair.draft_path)),
        *("--max-running-requests", "1", "--chunked-prefill-size", "32"),
        *("--context-length", "16384", "--max-total-tokens", "20000"),
        *("--compilation-cache-dir", str(folder / "programs")),
    ]
