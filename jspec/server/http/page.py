"""The page at `/`, from page_files/: one HTML document that shows drafts being accepted, live."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)


@cache
def page() -> str:
    folder = files("jspec.server.http") / "page_files"
    html, style, script = (
        (folder / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js")
    )
    return html.replace("/*STYLE*/", style).replace("/*SCRIPT*/", script)
