"""Training documents and their split by module. Imports no jax.

The bundled pair is trained on Python's standard library. Whole modules are held out with their
tests, by a stable hash of the name. The documents are one xz file of JSON lines; `manifest.json`
lists the held-out modules.
"""

from __future__ import annotations

import ast
import enum
import hashlib
import json
import lzma
import platform
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from jspec.errors import ConfigError

CORPUS_FILE = "corpus.jsonl.xz"
MANIFEST_FILE = "manifest.json"

_EXCLUDED_FOLDERS = frozenset(
    ("site-packages", "__pycache__", "pydoc_data", "tokenizedata", "encoded_modules")
)
_GENERATED = re.compile(r"generated (from|by|with)|auto-?(matically )?generated", re.IGNORECASE)
_ESCAPES = re.compile(r"\\x..|0x[0-9a-fA-F]+|\\u....")
_WORDS = re.compile(r"[A-Za-z_]{2,}")
_LEAST_WORD_SHARE = 0.42  # files below it are tables of numbers or character names
_MODULE_OF_TEST_STEM = {
    "minidom": "xml",
    "pulldom": "xml",
    "sax": "xml",
    "pyexpat": "xml",
    "httpservers": "http",
    "cookielib": "http",
    "urlparse": "urllib",
    "robotparser": "urllib",
}


class Split(enum.Enum):
    TRAIN = "train"
    HELD_OUT = "held_out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    path: str  # relative to its root
    module: str  # determines its split
    split: Split
    text: str


def public_name(stem: str) -> str:
    """Return an implementation's module: `_pydecimal`, `_decimal` → decimal; not `py_compile`."""
    name = re.sub(r"^_+py_?(?=[a-z]{2})", "", stem)
    return name.strip("_")


def tested_name(stem: str) -> str:
    """Return a test's module: `test_json` → json, `_test_x` → x, `pickletester` → pickle."""
    name = re.sub(r"^_?test_*(?=.)", "", stem.strip("_"))
    return re.sub(r"(_?tests?|tester)$", "", name) or name


def module_of(path: str, known: frozenset[str]) -> str:
    """Return the module whose split a file shares, itself if none in `known` matches: for a test
    the longest known one that starts its name, as urllib for test_urllib2."""
    parts = PurePosixPath(path).parts
    is_test = parts[0] == "test" and len(parts) > 1
    stem = parts[1 if is_test else 0].removesuffix(".py")
    name = tested_name(stem) if is_test else public_name(stem)
    if is_test and name in _MODULE_OF_TEST_STEM:
        return _MODULE_OF_TEST_STEM[name]
    matches = [
        module
        for module in known
        if name == module or re.fullmatch(re.escape(module) + r"(_.*|\d+.*|lib)", name)
    ]
    return max(matches, key=len, default=name)


def split_of(module: str, *, held_out_share: float) -> Split:
    """Return HELD_OUT if the module's SHA-256, as a fraction of its range, is below the share."""
    fraction = int.from_bytes(hashlib.sha256(module.encode()).digest()[:8], "big") / 2**64
    return Split.HELD_OUT if fraction < held_out_share else Split.TRAIN


def is_table(text: str) -> bool:
    if _GENERATED.search(text[:500]):
        return True
    words = sum(len(word) for word in _WORDS.findall(_ESCAPES.sub("", text)))
    return words < _LEAST_WORD_SHARE * max(len("".join(text.split())), 1)


def _parses(text: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ast.parse(text)
        except (SyntaxError, ValueError):
            return False
    return True


def _wanted_files(root: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        parts = relative.parts
        is_build = parts[0].startswith(("config-", "_sysconfigdata"))
        is_lib2to3_data = parts[0] == "lib2to3" and "data" in parts
        if is_build or is_lib2to3_data or not _EXCLUDED_FOLDERS.isdisjoint(parts):
            continue
        try:
            text = path.read_bytes().decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue  # a file in another encoding is a test of encodings
        if text.strip() and not is_table(text) and _parses(text):
            yield relative.as_posix(), text


def standard_library(*, root: Path | None = None, held_out_share: float = 0.05) -> list[Document]:
    """Return the documents of the standard library at `root`, without tables, repeated and
    unparsable files. Raises ConfigError."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    files = list(_wanted_files(root))
    stems = {PurePosixPath(path).parts[0].removesuffix(".py") for path, _ in files}
    known = frozenset(stem for stem in stems if stem != "test" and not stem.startswith("_"))
    seen: set[str] = set()
    documents = []
    for path, text in files:
        if text not in seen:
            seen.add(text)
            module = module_of(path, known)
            split = split_of(module, held_out_share=held_out_share)
            documents.append(Document(path=path, module=module, split=split, text=text))
    if not documents:
        raise ConfigError(f"{root} holds no Python file; expected a standard library")
    return documents


def of_split(documents: Iterable[Document], split: Split) -> list[Document]:
    return [document for document in documents if document.split is split]


def manifest(documents: list[Document], *, python_version: str | None = None) -> dict[str, object]:
    held_out = of_split(documents, Split.HELD_OUT)
    train = of_split(documents, Split.TRAIN)
    return {
        "python_version": python_version or platform.python_version(),
        "num_train_files": len(train),
        "num_train_characters": sum(len(document.text) for document in train),
        "num_held_out_files": len(held_out),
        "num_held_out_characters": sum(len(document.text) for document in held_out),
        "held_out_modules": sorted({document.module for document in held_out}),
        "held_out_files": [document.path for document in held_out],
    }


def write_corpus(
    folder: Path, documents: list[Document], *, python_version: str | None = None
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with lzma.open(folder / CORPUS_FILE, "wt", encoding="utf-8", preset=6) as lines:
        for document in documents:
            record = {
                "path": document.path,
                "module": document.module,
                "split": document.split.value,
                "text": document.text,
            }
            lines.write(json.dumps(record) + "\n")
    text = json.dumps(manifest(documents, python_version=python_version), indent=1)
    (folder / MANIFEST_FILE).write_text(text + "\n", "utf-8")


def read_corpus(folder: Path) -> list[Document]:
    path = folder / CORPUS_FILE
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; expected a corpus (run the stage 'corpus')")
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    return [Document(**{**record, "split": Split(record["split"])}) for record in records]
