"""Additions of the site to docs/: an index of decisions, and links out of docs/ as their text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

DOCS = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the generated pages."""
    titles = "".join(
        f"- [{_title(path)}]({path.name})\n" for path in sorted((DOCS / "decisions").glob("0*.md"))
    )
    decisions = f"# Decisions\n\nWhat was chosen, why, and what was measured.\n\n{titles}"
    files.append(File.generated(config, "decisions/index.md", content=decisions))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with links out of docs/ as text. Raises PluginError for one that leads nowhere."""
    folder = (DOCS / page.file.src_uri).parent

    def plain(link: re.Match[str]) -> str:
        text, target = link[1], link[2]
        if "://" in target:
            return link[0]
        path = (folder / target).resolve()
        if path == DOCS / "decisions":
            return f"[{text}]({'../' * page.file.src_uri.count('/')}decisions/index.md)"
        if path.is_relative_to(DOCS):
            return link[0]  # mkdocs looks at those itself
        if not path.exists():
            raise PluginError(f"{page.file.src_uri} links to {target}, which is not there")
        return text

    return _LINK.sub(plain, markdown)


def _title(path: Path) -> str:
    return path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
