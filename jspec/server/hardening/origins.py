"""Middleware against foreign web pages, by Origin and Host.

Requests that change state, start work or reveal facts about the machine are accepted only from the
server's own pages and from allowed origins. Other clients send no Origin and are not affected.
"""

from __future__ import annotations

import ipaddress
import socket
from http import HTTPStatus
from urllib.parse import SplitResult, urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from jspec.errors import shown
from jspec.server.hardening.line_limit import REFUSED
from jspec.server.http.exchange import error_response, in_one_line
from jspec.server.server_args import ServerArgs

# Routes whose GET changes something, or reveals facts about this machine.
GUARDED_PATHS = frozenset(
    {
        *("/flush_cache", "/freeze_gc", "/start_profile", "/stop_profile"),
        *("/server_info", "/get_server_info", "/model_info", "/get_model_info"),
        "/get_weights_by_name",
        *(f"/{name}_expert_distribution_record" for name in ("start", "stop", "dump")),
    }
)
FOREIGN = {b"cross-site", b"same-site"}


class OriginGuard:
    """Middleware: 403 for a guarded request from a page of another origin.

    A page is the server's own if its origin equals Host, and Host is not a name that others may
    own, since such a name can be made to resolve to this machine (DNS rebinding). With an API key,
    which a foreign page lacks, any name is accepted.
    """

    def __init__(self, app: ASGIApp, *, args: ServerArgs) -> None:
        self._app = app
        self._origins = frozenset(args.origins)
        self._takes_any_name = args.api_key is not None
        self._hosts = {origin.partition("://")[2].lower() for origin in args.origins} - {""}
        self._names = {"localhost", args.host.lower(), socket.gethostname().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        why = self._refusal(scope) if scope["type"] == "http" and _is_guarded(scope) else ""
        if not why:
            await self._app(scope, receive, send)
            return
        REFUSED.info("403 %s %s: %s", scope["method"], in_one_line(scope["path"]), in_one_line(why))
        response = error_response(
            f"{why}; expected a page of this server, or one that --allowed-origins names",
            HTTPStatus.FORBIDDEN,
        )
        await response(scope, receive, send)

    def _refusal(self, scope: Scope) -> str:
        headers = dict(scope["headers"])
        given = headers.get(b"origin")
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if given is None:  # as in a browser's GET
            kind = headers.get(b"sec-fetch-site", b"")
            if kind in FOREIGN:
                return f"the request is {kind.decode('latin-1')}"
            # Browsers send Sec-Fetch-Site only to some URLs, never for a rebound name, and
            # Accept-Language to all. A page can change that header, but not remove it.
            is_pages = kind != b"none" if kind else b"accept-language" in headers
            return self._foreign_name(host) if is_pages and "*" not in self._origins else ""
        origin = given.decode("latin-1")
        if "*" in self._origins or origin in self._origins:
            return ""
        own = _split(origin)
        if own is None or own.netloc.lower() != host or not host:
            return f"the Origin is {shown(origin)}"
        return self._foreign_name(host)

    def _foreign_name(self, host: str) -> str:
        if self._takes_any_name or host in self._hosts or self._is_own(host):
            return ""
        return f"the Host is {shown(host)}, which others may own"

    def _is_own(self, host: str) -> bool:
        parts = _split(f"//{host}")
        name = "" if parts is None else parts.hostname or ""
        if name in self._names or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _split(url: str) -> SplitResult | None:
    try:
        return urlsplit(url)
    except ValueError:
        return None


def _is_guarded(scope: Scope) -> bool:
    return scope["method"] not in {"GET", "HEAD", "OPTIONS"} or scope["path"] in GUARDED_PATHS
