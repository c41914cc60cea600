"""The corpus: sound files only, and modules held out with their tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from jspec.errors import ConfigError
from jspec.training.data import corpus
from jspec.training.data.corpus import Split

KNOWN = frozenset(("json", "http", "urllib", "pickle", "decimal", "io", "token", "tokenize", "xml"))


@pytest.mark.parametrize(
    ("path", "module"),
    [
        ("json/decoder.py", "json"),
        ("test/test_json/test_decode.py", "json"),
        ("_pydecimal.py", "decimal"),
        ("test/test_decimal.py", "decimal"),
        ("_pyio.py", "io"),
        ("py_compile.py", "py_compile"),
        ("test/pickletester.py", "pickle"),
        ("test/test_urllib2.py", "urllib"),
        ("test/test_urllib_response.py", "urllib"),
        ("test/test_httplib.py", "http"),
        ("test/test_http_cookies.py", "http"),
        ("test/test_tokenize.py", "tokenize"),
        ("test/test_minidom.py", "xml"),
        ("test/test_grammar.py", "grammar"),
    ],
)
def test_a_test_belongs_to_the_module_it_tests(path: str, module: str) -> None:
    assert corpus.module_of(path, KNOWN) == module


def test_about_the_asked_share_is_held_out() -> None:
    modules = [f"module_{i}" for i in range(1000)]
    splits = [corpus.split_of(module, held_out_share=0.25) for module in modules]
    assert 0.2 < splits.count(Split.HELD_OUT) / len(splits) < 0.3


def write_library(root: Path) -> None:
    code = "def {name}(value):\n    return value + offset_of(value)\n"
    for name in ("alpha", "beta", "gamma", "delta"):
        (root / f"{name}.py").write_text(code.format(name=name))
        (root / "test").mkdir(exist_ok=True)
        (root / "test" / f"test_{name}.py").write_text(code.format(name=f"test_{name}"))
    (root / "test" / "test_copy_of_alpha.py").write_text(code.format(name="alpha"))
    (root / "broken.py").write_text("def f(:\n")
    (root / "latin.py").write_bytes("name = 'caf\xe9'\n".encode("latin-1"))
    (root / "table.py").write_text("x = [" + ", ".join(str(i) for i in range(500)) + "]\n")
    (root / "codec.py").write_text('"""Codec generated from MAPPINGS."""\nvalue = None\n')
    (root / "site-packages").mkdir()
    (root / "site-packages" / "other.py").write_text(code.format(name="other"))


def test_the_library_is_split_whole_and_only_sound_files_are_read(tmp_path: Path) -> None:
    write_library(tmp_path)
    documents = corpus.standard_library(root=tmp_path, held_out_share=0.5)
    assert {d.module for d in documents} == {"alpha", "beta", "gamma", "delta"}
    assert len(documents) == 8
    for module in ("alpha", "beta", "gamma", "delta"):
        assert len({d.split for d in documents if d.module == module}) == 1


def test_a_written_corpus_reads_back_and_names_what_it_held_out(tmp_path: Path) -> None:
    write_library(tmp_path)
    documents = corpus.standard_library(root=tmp_path, held_out_share=0.5)
    corpus.write_corpus(tmp_path / "out", documents, python_version="3.99.1")
    assert corpus.read_corpus(tmp_path / "out") == documents
    manifest = corpus.manifest(documents, python_version="3.99.1")
    held_out = {d.module for d in documents if d.split is Split.HELD_OUT}
    assert manifest["held_out_modules"] == sorted(held_out)
    assert manifest["python_version"] == "3.99.1"
    assert (tmp_path / "out" / "manifest.json").read_text().count("3.99.1") == 1


def test_an_empty_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no Python file"):
        corpus.standard_library(root=tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        corpus.read_corpus(tmp_path)
