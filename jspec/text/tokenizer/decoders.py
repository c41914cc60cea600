"""Properties of a tokenizer's decoder that streaming and grammars need."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from jspec.errors import CheckpointError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Decoders whose text for a token depends only on that token and its neighbors, anywhere in a
# sequence, and those for which this still holds after Fuse has joined everything into one piece.
_LOCAL_DECODERS = frozenset(
    {"BPEDecoder", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"}
)
_LOCAL_AFTER_FUSE = frozenset({"Fuse", "Strip"})


class DecoderKind(enum.Enum):
    """The way in which ids become text.

    BYTE_LEVEL: a token is a byte string; the text is the UTF-8 of their concatenation
    BYTE_FALLBACK: text pieces, and bytes such as `<0xE4>`; an invalid run is replaced as a whole
    PIECES: text pieces only
    """

    BYTE_LEVEL = "byte_level"
    BYTE_FALLBACK = "byte_fallback"
    PIECES = "pieces"


def decoder_kind(backend: tokenizers.Tokenizer, path: Path) -> DecoderKind:
    """Return the kind. Raises CheckpointError for a decoder that cannot be streamed."""
    parts = _parts(backend)
    kinds = [str(part["type"]) for part in parts]
    if kinds[:1] == ["ByteLevel"] and set(kinds[1:]) <= {"Fuse"}:
        return DecoderKind.BYTE_LEVEL
    fused = False
    for part, kind in zip(parts, kinds, strict=True):
        if not (_local_after_fuse(part) if fused else kind in _LOCAL_DECODERS):
            raise CheckpointError(
                f"decoder in {path} is {kinds} and cannot be streamed because of {kind}; expected "
                f"ByteLevel alone, or {sorted(_LOCAL_DECODERS)} with at most Strip and the "
                "replacement of single characters after Fuse"
            )
        fused = fused or kind == "Fuse"
    return DecoderKind.BYTE_FALLBACK if "ByteFallback" in kinds else DecoderKind.PIECES


def cuts_the_end(backend: tokenizers.Tokenizer) -> str:
    """Return the part of the decoder that changes a text's last token, or ""."""
    for part in _parts(backend):
        if part["type"] == "BPEDecoder" or (part["type"] == "Strip" and part["stop"]):
            return str(part["type"])
    return ""


def byte_of(token: str) -> int | None:
    found = _BYTE_TOKEN.fullmatch(token)
    return None if found is None else int(found[1], 16)


def _parts(backend: tokenizers.Tokenizer) -> list[Mapping[str, Any]]:
    return [] if backend.decoder is None else _flat(json.loads(backend.decoder.__getstate__()))


def _flat(part: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if part["type"] != "Sequence":
        return [part]
    return [leaf for child in part["decoders"] for leaf in _flat(child)]


def _local_after_fuse(part: Mapping[str, Any]) -> bool:
    if part["type"] == "Replace":
        return len(part["pattern"].get("String", "")) == 1
    return part["type"] in _LOCAL_AFTER_FUSE
