"""Settings of the whole suite, made before jax is imported for the first time.

There are four fake CPU devices for the sharded tests. CPU code is optimised as little as XLA
allows, because the suite compiles far more than it computes: that saves a third of its time. Passes
before code generation (fusion, donation, copies) run as for users. XLA_FLAGS that are already set
win, and child processes inherit the same environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import os
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

# A flag that jaxlib does not know ends the process, and later versions do not know the last one.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    " --xla_llvm_disable_expensive_passes=true --xla_cpu_parallel_codegen_split_count=1"
    + (
        " --xla_cpu_use_fusion_emitters=false"
        if metadata.version("jaxlib").startswith("0.10.")
        else ""
    ),
)

# Of every operation that is lowered, jax would write down the whole stack that led to it: a tenth
# of the suite's time, and no test reads it.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
os.environ.setdefault("JAX_INCLUDE_FULL_TRACEBACKS_IN_LOCATIONS", "false")

import jax
import pytest
from hypothesis import settings
from jax.experimental.compilation_cache import compilation_cache

# Products in full float32 everywhere, so that identity holds on a GPU as well.
jax.config.update("jax_default_matmul_precision", "highest")

# The Hopper kernels' interpreter, which later versions have, computes in callbacks. XLA lets 32
# programs be dispatched to a CPU at once: if as many wait for the interpreter, it waits for them.
if jax.__version_info__ >= (0, 11):
    jax.config.update("jax_cpu_enable_async_dispatch", False)

# Tracing makes objects by the million, and those of what is loaded and compiled stay: Python's own
# collections would walk all of them again and again, for a twentieth of the suite's time.
gc.set_threshold(100_000, 20, 50)

# Same examples in every run; `--hypothesis-profile=explore` looks for new ones.
settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=30)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("repeatable")


KERNELS = re.compile(r"/pallas_kernels/test_\w+_(gpu|tpu)")  # interpreted

# Files that serve with the same engines: one process runs them all, and compiles those once.
TOGETHER = (
    (
        "speculative/test_engine_laws.py",
        "speculative/test_shapes.py",
        "engine/test_step_costs.py",
        "engine/test_runner.py",
        "speculative/test_grammar.py",
        "speculative/test_non_finite.py",
        "speculative/test_sampling_parameters.py",
        "speculative/test_rounds.py",
        "speculative/test_prefix_cache.py",
        "speculative/test_shared_prefixes.py",
        "speculative/test_multi_layer.py",
        "speculative/test_logprobs.py",
        "speculative/test_blocks.py",
        "speculative/test_window_drafts.py",
        "speculative/test_hidden.py",
    ),
    ("speculative/test_mixer_identity.py", "speculative/test_state_snapshots.py"),
)
FIRST_OF = {name: group[0] for group in TOGETHER for name in group}
# The files that take longest, from `--durations`. They start first, so that no process is left
# alone with one of them at the end.
LONG = (
    "server/test_generate_endpoint.py",
    "speculative/test_mtp_families.py",
    "scheduler/test_adaptive_shapes.py",
    "models/test_families.py",
    "engine/test_program_growth.py",
    "engine/test_program_store.py",
    "layers/test_mixers.py",
    "speculative/test_mixer_engine.py",
    "test_house.py",
    "server/test_grammar.py",
    "speculative/test_drafter_laws.py",
    "engine/test_fp8_weights.py",
    "test_cli.py",
    "sampling/test_accept.py",
    "server/test_hostile.py",
    "speculative/test_simulated_acceptance.py",
    "pallas_kernels/test_attention.py",
    "test_ops_benchmark.py",
    "layers/test_moe.py",
    "models/test_hf_eagle3_forward.py",
    "test_cli_processes.py",
    "server/test_draft_trees.py",
    "scheduler/test_interleavings.py",
)


def has_case(item: pytest.Item, marker: str) -> bool:
    """Return True if a mark names the case of a test by the start of its id."""
    starts = [start for mark in item.iter_markers(marker) for start in mark.args]
    return bool(starts) and item.name.partition("[")[2].startswith(tuple(starts))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--first-cases",
        action="store_true",
        help="run a case of two tests of each file and of each law, and all Hopper kernels' tests",
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)  # pytest deselects slow tests within
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    """Mark expensive cases as slow, run the longest files first, and do what --first-cases says.

    The interpreters of the kernels (pallas_kernels/test_*_gpu*.py and test_*_tpu*.py) are marked
    `kernel` and slow: who changes a kernel runs `pytest -m kernel`.
    `@pytest.mark.slow_cases("2]", "tree")` moves the cases of one test whose ids begin so to the
    slow suite ("]" ends an id); a sibling of the same law stays in the fast one. In the same way
    `exhaustive_cases` leaves them to who runs everything.
    """
    here = Path(__file__).parent
    for item in items:
        if has_case(item, "exhaustive_cases"):
            item.add_marker(pytest.mark.exhaustive)
            item.add_marker(pytest.mark.slow)
        elif has_case(item, "slow_cases"):
            item.add_marker(pytest.mark.slow)
        if KERNELS.search(item.path.as_posix()) and not item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.kernel)
            item.add_marker(pytest.mark.slow)
    rank = {here / name: i for i, name in enumerate((*FIRST_OF, *LONG))}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))
    yield
    if config.getoption("first_cases"):
        keep_first_cases(config, items)


FIRST_TESTS = 2  # of a file


def keep_first_cases(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the first case of the first two tests of each file and of each test that is marked
    `law` (with "every case", all of its cases), and every case that needs the Hopper kernels.

    Another Python or jax fails in what a file calls, hardly in the numbers that it calls it with.
    """
    seen: dict[Path, set[str]] = {}
    kept, left = [], []
    for item in items:
        test, tests = item.nodeid.partition("[")[0], seen.setdefault(item.path, set())
        law = item.get_closest_marker("law")
        is_first = test not in tests and (len(tests) < FIRST_TESTS or law is not None)
        is_every = law is not None and "every case" in law.args
        is_kept = is_first or is_every or item.get_closest_marker("mosaic_gpu") is not None
        (kept if is_kept else left).append(item)
        if is_first:
            tests.add(test)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return `--dist loadfile` that sends each group of TOGETHER to one process."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Together(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return FIRST_OF.get(file.removeprefix("tests/"), file)

    return Together(config, log)


def pytest_collection_finish() -> None:
    """Lets no collection walk the modules and tests, which stay until the end."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def programs_of_all(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which engines of one kind share compiled programs, in any process."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "programs_of_all"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the packed Hopper kernel run in four programs: the interpreter starts every one, and most
    of a chip's have nothing to do at a test's sizes."""
    from jspec.pallas_kernels.hopper import has_mosaic_gpu
    from jspec.pallas_kernels.prefill.tuning import choose_tuning

    if has_mosaic_gpu():
        monkeypatch.setattr(
            "jspec.pallas_kernels.prefill.gpu.choose_tuning",
            lambda dtype: dataclasses.replace(choose_tuning(dtype), programs=4),
        )


# A process of the suite keeps every program that it compiled, some gigabytes of them.
# Letting them go takes a moment, and all of them are compiled again: not for less than half a GiB.
MOST_RESIDENT, LEAST_GROWTH = 5 * 2**30, 2**29  # bytes
RESIDENT_AFTER = pytest.StashKey[int]()


def resident() -> int:
    """Return the resident bytes of this process; 0 without Linux's /proc."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return 0
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Between two files, drop cached programs that are unused, and jax's folder of small
    programs."""
    if nextitem is None or nextitem.path == item.path:
        return
    if jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()
    after = item.config.stash.get(RESIDENT_AFTER, 0)
    if resident() > max(MOST_RESIDENT, after + LEAST_GROWTH):
        jax.clear_caches()
        gc.collect()
        with contextlib.suppress(AttributeError):  # of glibc
            ctypes.CDLL(None).malloc_trim(0)
        item.config.stash[RESIDENT_AFTER] = resident()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that need the Hopper kernels where this jax is too old for them."""
    from jspec.pallas_kernels.hopper import has_mosaic_gpu  # not before the shapes are checked

    if item.get_closest_marker("mosaic_gpu") and not has_mosaic_gpu():
        pytest.skip(f"Mosaic GPU kernels need jax 0.11, this is {jax.__version__}")
