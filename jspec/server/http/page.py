"""The page at `/`: one self-contained HTML document that shows drafts being accepted, live.

Its markup, style and script are the files in page_files/, put into one. It uses the public
/generate with `return_spec_tokens` and /server_info, and nothing from another host.
"""

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
    """The whole document."""
    folder = files("jspec.server.http") / "page_files"
    html, style, script = (
        (folder / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js")
    )
    return html.replace("/*STYLE*/", style).replace("/*SCRIPT*/", script)
