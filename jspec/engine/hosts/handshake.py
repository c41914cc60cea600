"""The handshake of hosts: each proves its token and that it would run the same engine.

    host 0     challenge  nonce
    follower   hello      rank, its own nonce, its identity, and a MAC of them and the challenge
    host 0     welcome    a MAC of both nonces; or `refused` and the reason
    host 0     begin      once all hosts are there

The token is never sent. Later frames are neither signed nor encrypted: the network is private.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import jax

from jspec import __version__
from jspec.config.engine_args import EngineArgs
from jspec.engine.hosts.frames import FrameError, FrameSocket
from jspec.engine.programs.program_growth import settings_of
from jspec.engine.programs.program_store import SETTINGS
from jspec.engine.weights.loading import resolve_paths
from jspec.errors import ConfigError

TOKEN_VARIABLE = "JSPEC_DIST_TOKEN"
# Arguments that may differ between hosts: their own folders, and their place.
OWN_ARGUMENTS = (
    *("model_path", "tokenizer_path", "speculative_draft_model_path", "compilation_cache_dir"),
    *("node_rank", "nnodes", "dist_init_addr", "dist_timeout", "engine_process", "random_seed"),
    *("max_total_tokens",),  # host 0 keeps its first one over restarts; compared as a limit later
)

Identity = Mapping[str, Any]


def token_in(environ: Mapping[str, str]) -> bytes:
    """Return the token that all hosts share. Raises ConfigError without one."""
    token = environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise ConfigError(
            f"{TOKEN_VARIABLE} is unset; expected the same secret in the environment of every host"
        )
    return token.encode()


def identity_of(args: EngineArgs, *, count: int) -> dict[str, Any]:
    """Return what must be equal on all hosts, by the name that errors use."""
    paths = resolve_paths(args)
    shared = (each.name for each in fields(EngineArgs) if each.name not in OWN_ARGUMENTS)
    found = {
        "jspec": __version__,
        "jax": jax.__version__,
        "nnodes": count,
        "the model's config.json": _digest(paths.target),
        "the draft's config.json": _digest(paths.draft),
        **settings_of(SETTINGS),
        **{name: getattr(args, name) for name in shared},
    }
    plain: dict[str, Any] = json.loads(json.dumps(found))  # as it arrives
    return plain


def _digest(directory: Path | None) -> str:
    file = None if directory is None else directory / "config.json"
    if file is None or not file.exists():
        return "none"
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def difference(own: Identity, other: Identity) -> str | None:
    """Return the first difference of another host: "jspec 0.1; expected 0.2"."""
    for name, expected in own.items():
        if other.get(name) != expected:
            return f"{name} {other.get(name)!r}; expected {expected!r}, as host 0 has"
    return None


def greet(channel: FrameSocket, token: bytes, rank: int, identity: Identity) -> None:
    """Send hello to host 0, and check that it has the token. Raises ConfigError if refused."""
    challenge = channel.receive()
    nonce, theirs = secrets.token_hex(16), str(challenge.fields.get("nonce"))
    said = {"rank": rank, "nonce": nonce, "identity": identity}
    channel.send("hello", **said, mac=_mac(token, "hello", theirs, said))
    answer = channel.receive()
    if answer.kind == "refused":
        raise ConfigError(str(answer.fields.get("text")))
    expected = _mac(token, "welcome", nonce, theirs)
    if not hmac.compare_digest(expected, str(answer.fields.get("mac"))):
        raise ConfigError(
            f"host 0 does not have this host's token; expected the same {TOKEN_VARIABLE} on "
            "every host"
        )


class RefusedError(Exception):
    """Raised for a jspec host that may not follow. Its start fails, and so does this one."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(rank, why)
        self.rank, self.why = rank, why


def receive_guest(channel: FrameSocket, token: bytes, identity: Identity) -> int:
    """Return the rank of the connected host after it has proved the token. Raises RefusedError for
    a jspec with another token or identity, FrameError for anything else."""
    nonce = secrets.token_hex(16)
    channel.send("challenge", nonce=nonce)
    hello = channel.receive()
    said = {name: hello.fields.get(name) for name in ("rank", "nonce", "identity")}
    rank, other = said["rank"], said["identity"]
    if hello.kind != "hello" or not isinstance(rank, int) or not isinstance(other, dict):
        raise FrameError("a host said no hello")
    mac = _mac(token, "hello", nonce, said)
    if not hmac.compare_digest(mac, str(hello.fields.get("mac"))):
        raise RefusedError(
            rank, f"has another token; expected the same {TOKEN_VARIABLE} on every host"
        )
    found = difference(identity, other)
    if found is not None:
        raise RefusedError(rank, f"has {found}")
    if not 0 < rank < identity["nnodes"]:
        raise RefusedError(rank, f"has this node_rank; expected 1 to {identity['nnodes'] - 1}")
    channel.send("welcome", mac=_mac(token, "welcome", str(said["nonce"]), nonce))
    return rank


def _mac(token: bytes, *said: Any) -> str:
    text = json.dumps(said, sort_keys=True)
    return hmac.new(token, text.encode(), hashlib.sha256).hexdigest()
