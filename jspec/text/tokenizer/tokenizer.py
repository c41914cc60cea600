"""A checkpoint's tokenizer in the Hugging Face format (`tokenizer.json` and small JSON files)."""

from __future__ import annotations

import enum
import filecmp
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from jspec.errors import CheckpointError, ContextLengthError, RequestError
from jspec.files.json_files import MIB, exists, read_object, read_text
from jspec.text.free_memory import give_back_freed_memory
from jspec.text.stop.stop_watch import StopTables
from jspec.text.tokenizer.decoders import DecoderKind, decoder_kind
from jspec.text.tokenizer.token_bytes import TokenAlphabet, TokenBytes

LARGE_CHARS = 2**20  # return memory after longer texts
MAX_TOKENIZER_BYTES = 256 * MIB  # Gemma 3's, with 262,144 tokens, has 32 MiB


class BosRule(enum.Enum):
    """The correction of the tokenizer's own template that `add_bos_token` requires."""

    AS_TEMPLATE = "as_template"
    ADD = "add"
    REMOVE = "remove"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokenizer:
    """An immutable, thread-safe tokenizer."""

    backend: tokenizers.Tokenizer
    decoder_kind: DecoderKind
    # One more than the highest id with a token. A model's embedding may be padded beyond it; those
    # ids decode to nothing.
    vocab_size: int
    special_ids: frozenset[int]
    eos_token_ids: tuple[int, ...]  # all ends in the files, generation_config.json's first
    bos_token_id: int | None
    bos_rule: BosRule
    max_chars_per_token: int | None  # None: the tokenizer may drop characters
    alphabet: TokenAlphabet = field(init=False, repr=False)
    all_bytes: TokenBytes = field(init=False, repr=False)  # includes special tokens
    _stop_tables: dict[frozenset[int], StopTables] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        alphabet = TokenAlphabet(self.backend, self.decoder_kind)
        tokens = TokenBytes(alphabet.inside)
        object.__setattr__(self, "alphabet", alphabet)
        object.__setattr__(self, "all_bytes", tokens)
        object.__setattr__(self, "_stop_tables", {frozenset(): StopTables(tokens)})

    def hidden_ids(
        self, *, skip_special_tokens: bool, shown_ids: frozenset[int] = frozenset()
    ) -> frozenset[int]:
        return self.special_ids - shown_ids if skip_special_tokens else frozenset()

    def bytes_without(self, hidden: frozenset[int]) -> TokenBytes:
        return self._tables(hidden).token_bytes

    def stop_tables(self, hidden: frozenset[int]) -> StopTables | None:
        """Return tables that find stop strings by ids; None if tokens are not bytes."""
        return self._tables(hidden) if self.decoder_kind is DecoderKind.BYTE_LEVEL else None

    def _tables(self, hidden: frozenset[int]) -> StopTables:
        found = self._stop_tables.get(hidden)
        if found is None:  # a second thread uses the first one's
            made = StopTables(TokenBytes(self.alphabet.inside, hidden=hidden))
            found = self._stop_tables.setdefault(hidden, made)
        return found

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Load tokenizer.json, and bos and eos from the other files. Raises CheckpointError."""
        directory = Path(path)
        tokenizer_path = directory / "tokenizer.json"
        backend = _load_backend(tokenizer_path)
        # Stored truncation or padding is for training; it would silently cut prompts.
        backend.no_truncation()
        backend.no_padding()
        config = _read_object(directory / "tokenizer_config.json")
        model_configs = [
            (name, _read_object(directory / name))
            for name in ("generation_config.json", "config.json")
        ]
        bos_token_id = _bos_token_id(backend, directory, config, model_configs)
        return cls(
            backend=backend,
            decoder_kind=decoder_kind(backend, tokenizer_path),
            vocab_size=1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1),
            special_ids=frozenset(
                i for i, token in backend.get_added_tokens_decoder().items() if token.special
            ),
            eos_token_ids=_eos_token_ids(backend, directory, config, model_configs),
            bos_token_id=bos_token_id,
            bos_rule=_bos_rule(backend, directory, config, bos_token_id),
            max_chars_per_token=max_chars_per_token(backend),
        )

    def encode(
        self, text: str, *, add_special_tokens: bool = True, fewer_than: int | None = None
    ) -> tuple[int, ...]:
        """Return the ids of a text; special tokens written in it become their ids. Other threads
        run meanwhile. Raises RequestError for lone surrogates, and for `fewer_than` or more ids."""
        check_unicode(text)
        try:
            return self._encode(text, add_special_tokens, fewer_than)
        finally:
            if len(text) > LARGE_CHARS:
                give_back_freed_memory()

    def _encode(
        self, text: str, add_special_tokens: bool, fewer_than: int | None
    ) -> tuple[int, ...]:
        # A batch call, because `encode` keeps the GIL: 5 MB would stop all threads for 6 s.
        (encoded,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        rule = self.bos_rule if add_special_tokens else BosRule.AS_TEMPLATE
        num_ids = len(encoded) + {BosRule.ADD: 1, BosRule.REMOVE: -1}.get(rule, 0)
        if fewer_than is not None and num_ids >= fewer_than:  # before they become Python objects
            raise ContextLengthError(
                f"the prompt has {num_ids} tokens; expected fewer than {fewer_than}"
            )
        ids = tuple(encoded.ids)
        if rule is BosRule.AS_TEMPLATE:
            return ids
        if rule is BosRule.REMOVE:
            return ids[1:]
        assert self.bos_token_id is not None
        return (self.bos_token_id, *ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text. An id without a token yields nothing, invalid UTF-8 U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def decode_all(
        self, rows: Sequence[Sequence[int]], *, skip_special_tokens: bool = True
    ) -> list[str]:
        return self.backend.decode_batch(
            [list(ids) for ids in rows], skip_special_tokens=skip_special_tokens
        )

    def is_special(self, token_id: int) -> bool:
        return token_id in self.special_ids

    def id_to_token(self, token_id: int) -> str | None:
        if token_id < 0:
            raise ValueError(f"token_id is {token_id}; expected an id of at least 0")
        return self.backend.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        return self.backend.token_to_id(token)


def max_chars_per_token(backend: tokenizers.Tokenizer) -> int | None:
    """Return the longest token in characters, or None if a tokenization may drop characters."""
    # Byte-level BPE and BPE with byte fallback keep every character, unless an earlier step drops
    # characters (Split that removes, Strip, stripping added tokens) or merges them (Unicode's
    # composed forms). A byte-level token of n bytes is at most n characters of text.
    parts = json.loads(backend.to_str())
    model = parts["model"]
    before = [parts["normalizer"], parts["pre_tokenizer"]]
    keeps = all(_keeps_all(part) for part in before if part is not None)
    is_byte_level = any("ByteLevel" in _types(part) for part in before if part is not None)
    has_all_bytes = is_byte_level or bool(model.get("byte_fallback"))
    if model.get("type") != "BPE" or not keeps or not has_all_bytes:
        return None
    if any(token["lstrip"] or token["rstrip"] for token in parts["added_tokens"]):
        return None
    return max((len(token) for token in backend.get_vocab(with_added_tokens=True)), default=None)


def _types(part: Mapping[str, Any]) -> list[str]:
    inner = [*part.get("normalizers", ()), *part.get("pretokenizers", ())]
    return [part["type"], *(name for each in inner for name in _types(each))]


def _keeps_all(part: Mapping[str, Any]) -> bool:
    """Return True if a normalizer or pre-tokenizer never returns fewer characters."""
    match part["type"]:
        case "Sequence":
            inner = [*part.get("normalizers", ()), *part.get("pretokenizers", ())]
            return all(_keeps_all(each) for each in inner)
        case "Split" | "Punctuation":
            return str(part.get("behavior")) != "Removed"
        case "Replace":
            taken = part["pattern"].get("String")
            return taken is not None and len(part["content"]) >= len(taken)
        case kind:
            return kind in {"ByteLevel", "Digits", "Metaspace", "NFD", "NFKD", "Prepend"}


def _load_backend(path: Path) -> tokenizers.Tokenizer:
    if not exists(path):
        raise CheckpointError(f"{path} does not exist; expected a Hugging Face tokenizer.json")
    text = read_text(path, max_bytes=MAX_TOKENIZER_BYTES)
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing more specific
        raise CheckpointError(
            f"{path} is not a tokenizer that can be read ({error}); "
            "expected a complete Hugging Face tokenizer.json"
        ) from error


def _read_object(path: Path) -> Mapping[str, Any]:
    if not exists(path):
        return {}
    return read_object(path)


def _named_token_id(
    backend: tokenizers.Tokenizer, path: Path, config: Mapping[str, Any], name: str
) -> int | None:
    value = config.get(name)
    token = value.get("content") if isinstance(value, dict) else value
    if token is None:
        return None
    token_id = backend.token_to_id(token) if isinstance(token, str) else None
    if token_id is None:
        raise CheckpointError(f"{name} in {path} is {token!r}; expected a token of the vocabulary")
    return token_id


def _listed_ids(path: Path, config: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Return the ids of a field, maybe in `text_config`: null, one id, or a list."""
    value = config.get(name)
    if value is None and isinstance(config.get("text_config"), dict):
        value = config["text_config"].get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise CheckpointError(f"{name} in {path} is {value!r}; expected token ids or null")
    return tuple(ids)


def _eos_token_ids(
    backend: tokenizers.Tokenizer,
    directory: Path,
    config: Mapping[str, Any],
    model_configs: Sequence[tuple[str, Mapping[str, Any]]],
) -> tuple[int, ...]:
    """Return the union over all files, since chat models often list only some ends in each."""
    ids: list[int] = []
    for name, model_config in model_configs:
        ids.extend(_listed_ids(directory / name, model_config, "eos_token_id"))
    named = _named_token_id(backend, directory / "tokenizer_config.json", config, "eos_token")
    return tuple(dict.fromkeys(ids if named is None else [*ids, named]))


def _bos_token_id(
    backend: tokenizers.Tokenizer,
    directory: Path,
    config: Mapping[str, Any],
    model_configs: Sequence[tuple[str, Mapping[str, Any]]],
) -> int | None:
    """Return tokenizer_config.json's bos, even an explicit null, else the model's."""
    if "bos_token" in config:
        return _named_token_id(backend, directory / "tokenizer_config.json", config, "bos_token")
    for name, model_config in model_configs:
        ids = _listed_ids(directory / name, model_config, "bos_token_id")
        if ids:
            return ids[0]
    return None


def _bos_rule(
    backend: tokenizers.Tokenizer,
    directory: Path,
    config: Mapping[str, Any],
    bos_token_id: int | None,
) -> BosRule:
    wanted = config.get("add_bos_token")
    path = directory / "tokenizer_config.json"
    if wanted is not None and not isinstance(wanted, bool):
        raise CheckpointError(f"add_bos_token in {path} is {wanted!r}; expected true or false")
    if wanted and bos_token_id is None:
        raise CheckpointError(f"add_bos_token in {path} is true; expected a bos_token as well")
    template_adds = bos_token_id is not None and backend.encode("").ids[:1] == [bos_token_id]
    if wanted is None or wanted == template_adds:
        return BosRule.AS_TEMPLATE
    return BosRule.ADD if wanted else BosRule.REMOVE


def check_same_vocabulary(target: Path, draft: Path) -> None:
    """Raise CheckpointError, naming the first difference, unless both have equal ids."""
    ours, other = target / "tokenizer.json", draft / "tokenizer.json"
    if not (exists(ours) and exists(other)) or filecmp.cmp(ours, other, shallow=False):
        return
    expected, found = _tokens_by_id(ours), _tokens_by_id(other)
    differing = [i for i in expected.keys() | found.keys() if expected.get(i) != found.get(i)]
    if differing:
        i = min(differing)
        raise CheckpointError(
            f"{other}: id {i} is {found.get(i)!r}; expected {expected.get(i)!r}, as in the "
            f"target's {ours.name}: a draft must have the target's vocabulary ({len(differing)} "
            "ids differ)"
        )


def _tokens_by_id(path: Path) -> dict[int, str]:
    return {i: token for token, i in _load_backend(path).get_vocab(with_added_tokens=True).items()}


def check_unicode(text: str) -> None:
    """Raise RequestError for lone surrogates, which UTF-8 cannot encode."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"text holds {text[error.start]!r} at character {error.start}; "
            "expected valid Unicode without lone surrogates"
        ) from error
