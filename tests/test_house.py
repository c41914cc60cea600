"""Laws of the source itself: layers of imports, the host half, sizes, docstrings, words."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "jspec"

# The folders, top to bottom. Imports go down only (docs/design.md describes each folder).
ROOMS = (
    "cli",
    "distributed",
    "server",
    "serving",
    "training",
    "engine",
    "scheduler",
    "speculative",
    "sampling",
    "models",
    "layers",
    "pallas_kernels",
    "text",
    "device",
    "messages",
    "config",
    "spec",
    "files",
    "errors",
)
HOST_ROOMS = {
    "scheduler",
    "text",
    "messages",
    "config",
    "spec",
    "files",
    "errors",
}  # no jax
MAX_FILES = 16  # of a folder, without its __init__

MAX_LINES, MAX_FUNCTION_LINES = 600, 60  # a longer file needs a review

# Synonyms of the glossary's words; identifiers only, not the strings of an API.
SYNONYMS = {
    "block_table": "page_table",
    "page_indices": "page_table",
    "slot_mapping": "page_slots",
    "accept_index": "node_path",
    "accept_lens": "num_emitted",
    "accept_length": "num_emitted or acceptance_length",
    "num_correct_drafts": "num_accepted",
    "verified_id": "root_ids",
    "bonus_id": "bonus token",
    "retrieve_index": "node_path",
    "retrieve_next_token": "parents",
    "draft_token_num": "num_draft_tokens",
    "spec_steps": "num_steps",
    "kv_committed_len": "committed",
    "generation_counter": "epoch",
}


@cache
def modules() -> tuple[Path, ...]:
    return tuple(sorted(PACKAGE.rglob("*.py")))


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def names_of_modules() -> frozenset[str]:
    return frozenset(dotted(module) for module in modules())


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a module, which most tests look through."""
    return tuple(ast.walk(parsed(path)))


def imported(path: Path) -> Iterator[str]:
    """Yield the dotted names of the jspec modules that `path` imports, anywhere in the file.

    Imports under `if TYPE_CHECKING:` count too; only jspec/__init__ may name the top.
    """
    known = names_of_modules()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("jspec."))
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} line {node.lineno}: relative import"
            base = node.module or ""
            if base.split(".")[0] != "jspec":
                continue
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield full if full in known else base


def in_every_module(check: Callable[[Path], None]) -> Callable[[], None]:
    """Return one test of all modules that names all failures: one per module would be 1,600
    tests."""

    def test() -> None:
        faults = []
        for path in modules():
            try:
                check(path)
            except AssertionError as fault:
                faults.append(f"{dotted(path)}: {fault}")
        assert not faults, "\n".join(faults)

    test.__name__, test.__doc__ = check.__name__, check.__doc__
    return test


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


@in_every_module
def test_imports_go_down(path: Path) -> None:
    room = room_of(dotted(path))
    if room in {"", "__main__"}:
        return
    assert room in ROOMS, f"{dotted(path)} is in no room"
    for target in imported(path):
        below = room_of(target)
        if below in {"", room}:  # jspec itself (__version__) and the own room
            continue
        assert below in ROOMS, f"{dotted(path)} imports {target}, which is in no room"
        assert ROOMS.index(below) > ROOMS.index(room), f"imports {target}: not downward"


def test_no_files_import_each_other_in_a_circle() -> None:
    waiting = {dotted(p): {*imported(p)} - {"jspec", dotted(p)} for p in modules()}
    while free := {
        name
        for name, needs in waiting.items()
        if not needs & waiting.keys() or not any(name in others for others in waiting.values())
    }:
        for name in free:  # it imports nothing of what is left, or is imported by nothing of it
            del waiting[name]
    assert not waiting, f"these import each other: {sorted(waiting)}"


def test_a_folder_can_be_kept_in_mind() -> None:
    folders: dict[Path, int] = {}
    for path in modules():
        if path.stem != "__init__":
            folders[path.parent] = folders.get(path.parent, 0) + 1
    assert max(folders.values()) <= MAX_FILES, folders


# The contract, its definition, XLA's way if that is another, and a file a kernel of each platform.
OP_FILES = re.compile(r"(api|reference|xla|tuning|(gpu|tpu)(_[a-z0-9_]+)?)")


@in_every_module
def test_a_file_of_an_op_says_which_part_it_is(path: Path) -> None:
    if path.parent.parent.name == "pallas_kernels" and path.stem != "__init__":
        assert OP_FILES.fullmatch(path.stem), f"{dotted(path)}; expected {OP_FILES.pattern}"


@in_every_module
def test_a_statement_of_three_quotes_is_a_docstring(path: Path) -> None:
    """The program digest leaves docstrings out (jspec/engine/programs/source_digest.py)."""
    lines = path.read_text().splitlines()
    prose = {
        node.body[0].lineno
        for node in nodes(path)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in nodes(path):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and lines[node.lineno - 1].lstrip().startswith(('"""', 'r"""'))
        ):
            assert node.lineno in prose, f"line {node.lineno}: a string, not a docstring"


def test_nothing_imports_the_top_of_the_package_but_for_its_version() -> None:
    for path in modules():
        for node in nodes(path):
            if (
                isinstance(node, ast.ImportFrom)
                and node.module == "jspec"
                and room_of(dotted(path))
            ):
                for alias in node.names:
                    is_room = (PACKAGE / alias.name).exists()
                    is_module = (PACKAGE / f"{alias.name}.py").exists()
                    assert alias.name == "__version__" or is_room or is_module


def run_python(code: str, **environment: str) -> str:
    """Output of a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_host_half_imports_no_jax() -> None:
    host = ["jspec"] + [dotted(path) for path in modules() if room_of(dotted(path)) in HOST_ROOMS]
    assert len(host) > 10
    code = (
        f"import importlib, sys\nfor name in {host!r}:\n    importlib.import_module(name)\n"
        "    found = {'jax', 'jaxlib', 'flax'} & set(sys.modules)\n"
        "    assert not found, f'{name} imports {found}'"
    )
    run_python(code)


@pytest.mark.slow
def test_importing_touches_no_device() -> None:
    """A platform that does not exist: the first array or device query at import would raise."""
    names = [dotted(path) for path in modules()]
    code = f"import importlib\nfor name in {names!r}:\n    importlib.import_module(name)"
    run_python(code, JAX_PLATFORMS="no_such_platform")


def test_the_public_facade_loads_on_demand() -> None:
    code = (
        "import sys, jspec; assert 'jspec.serving.engine' not in sys.modules; print(jspec.__all__)"
        "\ntry:\n    jspec.nothing\nexcept AttributeError as e:\n    print(e)"
    )
    said = run_python(code)
    assert "Engine" in said
    assert "module 'jspec' has no attribute 'nothing'" in said


@in_every_module
def test_a_file_is_a_noun_of_limited_size(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_LINES, f"{dotted(path)} has {lines} lines; expected at most {MAX_LINES}"
    assert path.stem not in {"utils", "util", "helpers", "common", "misc"}


@in_every_module
def test_every_module_says_what_it_is(path: Path) -> None:
    tree = parsed(path)
    assert not tree.body or ast.get_docstring(tree), f"{dotted(path)} has no docstring"


def test_functions_fit_a_screen() -> None:
    """Fewer than 2% are longer than 60 lines."""
    lengths = {
        f"{dotted(path)}.{node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for path in modules()
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    long = {name: n for name, n in lengths.items() if n > MAX_FUNCTION_LINES}
    assert len(long) < 0.02 * len(lengths), f"too many long functions: {long}"


def identifiers(path: Path) -> Iterator[tuple[str, int]]:
    for node in nodes(path):
        if isinstance(node, ast.Name):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Attribute):
            yield node.attr, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node.lineno


@in_every_module
def test_one_word_per_concept(path: Path) -> None:
    for name, line in identifiers(path):
        plain = name.lstrip("_").lower()
        assert plain not in SYNONYMS, (
            f"{dotted(path)} line {line}: {name}; the glossary says {SYNONYMS[plain]}"
        )


# A docstring is a whole sentence or a noun phrase; these openers begin a fragment.
OPENERS = re.compile(
    r'^ *r?"""((What|Whether|Of|As|See|Those|The same|To|Where|Nothing|Nobody)\b.*)', re.MULTILINE
)
# Words of a private dialect, each of which has a plain one.
DIALECT = re.compile(
    r"\b(anew|begun|[Nn]obody|so many|is none|are none|likeliest|in turns|lumps|dealt|judged)\b"
)


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """Docstrings and comments, each with its line."""
    for node in nodes(path):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


@pytest.mark.parametrize("folder", ["jspec", "tests", "benchmarks", "recipes", "examples"])
def test_prose_is_plain(folder: str) -> None:
    faults = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        source = path.read_text("utf-8")
        faults += [f"{path}: a fragment: {match[1]!r}" for match in OPENERS.finditer(source)]
        if DIALECT.search(source):  # perhaps in code, which is slower to tell apart
            for line, text in prose_of(path):
                if found := DIALECT.search(text):
                    faults.append(f"{path} line {line}: {found[0]!r} in {text[:60]!r}")
    assert not faults, "\n".join(faults)


PAGES = sorted({*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), *PACKAGE.rglob("*.md")})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_are_plain(page: Path) -> None:
    found = [match[0] for match in DIALECT.finditer(page.read_text("utf-8"))]
    assert not found


STEP_ROOMS = {"device", "pallas_kernels", "layers", "models", "sampling", "speculative"}


def is_indexed_update(call: ast.Call) -> bool:
    """x.at[...].get(...), .set(...) and the like."""
    function = call.func
    return (
        isinstance(function, ast.Attribute)
        and function.attr in {"get", "set", "add", "max", "min", "multiply"}
        and isinstance(function.value, ast.Subscript)
        and isinstance(function.value.value, ast.Attribute)
        and function.value.value.attr == "at"
    )


def test_every_gather_and_scatter_states_its_mode() -> None:
    """The treatment of indices outside is decided where they are used, never by a default."""
    for path in modules():
        if room_of(dotted(path)) not in STEP_ROOMS:
            continue
        for node in nodes(path):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            if is_indexed_update(node) or name in {"take", "take_along_axis"}:
                modes = [keyword for keyword in node.keywords if keyword.arg == "mode"]
                assert modes, f"{dotted(path)} line {node.lineno}: {ast.unparse(node)[:80]}"


def test_device_data_is_frozen() -> None:
    """Every dataclass of the package is frozen, but for the ones that own something mutable."""
    for path in modules():
        owners = {"scheduler", "server", "serving", "cli", "engine"}
        if room_of(dotted(path)) in owners:
            continue
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                for decorator in node.decorator_list:
                    text = ast.unparse(decorator)
                    if text.startswith("dataclass"):
                        assert "frozen=True" in text, f"{dotted(path)}.{node.name} is not frozen"


# Functions that only tests call, each with the reason why the package has it.
FOR_TESTS_ALONE = {
    "__getattr__": "Python calls it, for the public names of the package",
    "causal_attention": "the dense reference that paged attention is held against",
    "is_copy_free": "a promise about a pool's shape; the tests read it off the compiled text",
    "metrics_table": "docs/metrics.md is made by it, and a test compares them",
}


def test_nothing_is_there_for_tests_alone() -> None:
    """Each function and class has a user in the package, the benchmarks or the examples."""
    users = [
        path
        for name in ("jspec", "benchmarks", "recipes", "examples")
        for path in ROOT.glob(f"{name}/**/*.py")
    ]
    used: set[str] = set()
    for path in users:
        for node in nodes(path):
            if isinstance(node, ast.Name | ast.Attribute | ast.alias):
                used.add(getattr(node, "id", "") or getattr(node, "attr", "") or node.name)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                used.add(node.value)  # a name in `__all__` or in a table
    unused = {
        f"{dotted(path)}.{node.name}"
        for path in modules()
        for node in parsed(path).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and node.name not in used | FOR_TESTS_ALONE.keys()
    }
    assert not unused
