"""`jspec doctor --device`: jax's devices, and a first measurement of them."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jspec.device.parallel import Parallel
from jspec.engine.memory.device_memory import gib, least_memory
from jspec.engine.resolving import DeviceFacts
from jspec.errors import ConfigError
from jspec.pallas_kernels.attention.api import AttentionCall, AttentionMetadata
from jspec.pallas_kernels.bundles import choose_ops
from jspec.pallas_kernels.ops import Ops
from jspec.spec.accelerators import Accelerator, accelerator_of
from jspec.spec.axes import TENSOR

PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin")
VARIABLES = (
    *("JAX_PLATFORMS", "XLA_FLAGS", "LIBTPU_INIT_ARGS", "XLA_CLIENT_MEM_FRACTION"),
    *("CUDA_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS", "TPU_CHIPS_PER_PROCESS_BOUNDS"),
    "TPU_PROCESS_BOUNDS",
)
GOOGLE = "0x1ae0"  # PCI vendor
HUGEPAGES = "sys/kernel/mm/transparent_hugepage/enabled"
LOCK = "tmp/libtpu_lockfile"
# A shard of Llama-3.1-8B over four devices, as in docs/guides/tpu_vm.md.
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 128
ROWS, CONTEXTS, CALLS = 64, (1000, 1024, 8000), 50
SUM_BYTES = (2**19, 2**21)
READ_BYTES = 2**29


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    what: str
    microseconds: float
    floor: float | None = None  # microseconds by the vendor's rate; None: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    facts: Mapping[str, str]
    problems: tuple[str, ...]  # why jax does not use the host's devices
    notes: tuple[str, ...]  # what costs time
    measured: tuple[Measurement, ...]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def lines(self) -> Iterator[str]:
        yield from (f"{name}: {value}" for name, value in self.facts.items())
        for each in self.measured:
            of_floor = ""
            if each.floor is not None:
                share = each.floor / each.microseconds
                of_floor = f", {share:.0%} of its floor {each.floor:,.1f} us"
            yield f"  {each.what}: {each.microseconds:,.1f} us{of_floor}"
        yield from (f"note: {note}" for note in self.notes)
        yield from (f"PROBLEM: {problem}" for problem in self.problems)


def examine_device(
    *,
    environ: Mapping[str, str] = os.environ,
    root: Path = Path("/"),  # of the host's files
    find: Callable[[], Sequence[jax.Device]] = jax.devices,
    say: Callable[[str], None],
) -> DeviceReport:
    """Report and measure jax's devices. Raises ConfigError if no backend starts."""
    try:
        devices = find()
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"jax starts no device: {reason}; expected a free device (another process may have it) "
            "or JAX_PLATFORMS=cpu"
        ) from error
    versions = _versions()
    say("compiling and measuring a few small programs")
    return DeviceReport(
        facts=_facts(devices, versions, environ),
        problems=tuple(problems_of(devices[0].platform, versions, environ, root)),
        notes=tuple(_notes(devices[0].platform, versions, root)),
        measured=tuple(measure(jax.local_devices())),
    )


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _facts(
    devices: Sequence[jax.Device], versions: Mapping[str, str], environ: Mapping[str, str]
) -> dict[str, str]:
    local, first = jax.local_devices(), devices[0]
    found = {
        "devices": f"{len(devices)} x {first.device_kind} ({first.platform})",
        "mesh": f"--tp-size up to {len(local)}; of this process: "
        f"{', '.join(_place_of(device) for device in local)}",
        "processes": str(jax.process_count()),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items())
        + f", Python {platform.python_version()}",
        "kernels": _ops_of(devices).name,
    }
    memory = least_memory(local)
    if memory is not None:
        found["memory"] = f"{gib(memory.limit)} for jax on each, {gib(memory.in_use)} in use"
    of_user = [f"{name}={environ[name]}" for name in VARIABLES if environ.get(name)]
    return found | ({"environment": " ".join(of_user)} if of_user else {})


def _place_of(device: jax.Device) -> str:
    coords = getattr(device, "coords", None)
    if coords is None:
        return str(device.id)
    return f"{device.id} at {'.'.join(map(str, coords))}"


def problems_of(
    of_jax: str, versions: Mapping[str, str], environ: Mapping[str, str], root: Path
) -> Iterator[str]:
    """Yield the reasons why jax runs on the CPUs of a host that has other devices."""
    if of_jax != "cpu" or "cpu" in environ.get("JAX_PLATFORMS", "").split(","):
        return
    vendors = root.glob("sys/bus/pci/devices/*/vendor")
    if any(root.glob("dev/accel*")) or any(v.read_text().strip() == GOOGLE for v in vendors):
        yield (
            "this host has a TPU, but jax runs on its CPU: libtpu is not installed; expected "
            "pip install '.[tpu]'"
            if "libtpu" not in versions
            else "this host has a TPU, but jax runs on its CPU: another process has the chips, or "
            "one has left /tmp/libtpu_lockfile; end it (sudo lsof -w /dev/accel* /dev/vfio/*) or "
            "remove the file"
        )
    if any(root.glob("dev/nvidia[0-9]*")):
        yield (
            "this host has an NVIDIA GPU, but jax runs on its CPU: "
            + ("jax's CUDA plugin is installed, so look at nvidia-smi and the driver's version")
            if any("cuda" in name for name in versions)
            else "this host has an NVIDIA GPU, but jax runs on its CPU: jax's CUDA plugin is not "
            "installed; expected pip install '.[cuda]'"
        )


def _notes(of_jax: str, versions: Mapping[str, str], root: Path) -> Iterator[str]:
    setting = root / HUGEPAGES
    if of_jax == "tpu" and setting.is_file() and "[always]" not in setting.read_text():
        yield (
            "transparent hugepages are off, which slows copies to the chips: "
            f"echo always | sudo tee /{HUGEPAGES}"
        )
    if of_jax == "cpu" and "libtpu" in versions and (root / LOCK).exists():
        yield f"/{LOCK} is there: a process has a TPU, or ended without removing it"


def _ops_of(devices: Sequence[jax.Device]) -> Ops:
    facts, problem = DeviceFacts.of(devices), None
    if facts.platform == "gpu":
        from jspec.pallas_kernels.ops_gpu import gpu_problem

        problem = gpu_problem(
            compute_capability=facts.compute_capability,
            dtype=jnp.bfloat16,
            page_size=None,
            head_dims=(HEAD_DIM,),
        )
    return choose_ops(facts.platform, gpu_problem=problem)


def measure(devices: list[jax.Device]) -> Iterator[Measurement]:
    """Measure a dispatch, a read, attention on the first device, and sums over all of them."""
    is_cpu, ops = devices[0].platform == "cpu", _ops_of(devices)
    own = accelerator_of(devices[0].device_kind)
    with jax.default_device(devices[0]):
        x = jnp.zeros(())
        add = jax.jit(lambda x: x + 1)
        yield Measurement(what="dispatch of an empty program", microseconds=_seconds(add, x) * 1e6)
        size = READ_BYTES // 64 if is_cpu else READ_BYTES
        values = jnp.ones(size // 2, jnp.bfloat16)
        reads = jax.jit(lambda x: jnp.max(x))
        yield Measurement(
            what=f"read of {size >> 20} MiB",
            microseconds=_seconds(reads, values) * 1e6,
            floor=None if own is None else 1e6 * size / own.read_bytes,
        )
        for context in (128,) if is_cpu else CONTEXTS:
            yield _attention(ops, own, rows=4 if is_cpu else ROWS, context=context)
    if len(devices) > 1:
        mesh = Parallel(tensor=len(devices)).mesh(devices)
        yield from (_sum(mesh, own, size, calls=2 if is_cpu else CALLS) for size in SUM_BYTES)


def _attention(ops: Ops, own: Accelerator | None, *, rows: int, context: int) -> Measurement:
    """Measure one decode step's attention of a layer; each call writes its row's last token."""
    page, calls = ops.page_size_on(jax.devices()[0].device_kind), CALLS if rows == ROWS else 2
    pages = -(-context // page)
    table = 1 + jnp.arange(rows * pages, dtype=jnp.int32).reshape(rows, pages)
    metadata = AttentionMetadata(
        page_table=table,
        prefix_lens=jnp.full(rows, context - 1, jnp.int32),
        cu_q_lens=jnp.arange(rows + 1, dtype=jnp.int32),
        q_positions=jnp.full(rows, context - 1, jnp.int32),
    )
    call = AttentionCall(queries_per_row=1, scale=HEAD_DIM**-0.5)
    pool = jnp.ones((rows * pages + 1, page, 2 * KV_HEADS, HEAD_DIM), jnp.bfloat16)
    new = jnp.ones((rows, KV_HEADS, HEAD_DIM), jnp.bfloat16)
    q = jnp.ones((rows, HEADS, HEAD_DIM), jnp.bfloat16)

    def attend(_: jax.Array, carried: Any) -> Any:
        q, pool = carried
        out, pool = ops.attend(q, new, new, pool, metadata, call)
        return out.astype(q.dtype), pool

    # Donated, as in a step: a copy of the pool would take longer than some calls.
    run = jax.jit(
        lambda q, pool: jax.lax.fori_loop(0, calls, attend, (q, pool)), donate_argnums=(1,)
    )
    carried = [(q, pool)]

    def once() -> Any:
        carried[0] = run(*carried[0])
        return carried[0][0]

    num_bytes = rows * context * 2 * KV_HEADS * HEAD_DIM * 2
    return Measurement(
        what=f"attention of {rows} rows of {context:,} tokens, {HEADS} heads, {KV_HEADS} kv heads",
        microseconds=_seconds(once) / calls * 1e6,
        floor=None if own is None else 1e6 * num_bytes / own.read_bytes,
    )


def _sum(mesh: Mesh, own: Accelerator | None, num_bytes: int, *, calls: int) -> Measurement:
    count = mesh.size

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    def sums(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, calls, lambda _, x: jax.lax.psum(x, TENSOR) / count, x)

    x = jnp.ones((num_bytes // 2,), jnp.bfloat16)
    return Measurement(
        what=f"all-reduce of {num_bytes / 2**20:g} MiB over {count} devices",
        microseconds=_seconds(jax.jit(sums), x) / calls * 1e6,
        floor=None if own is None else 1e6 * 2 * (count - 1) / count * num_bytes / own.link_bytes,
    )


def _seconds(run: Callable[..., Any], *arguments: Any) -> float:
    """Return the median time of a run, among three that are enqueued at once."""
    jax.block_until_ready(run(*arguments))
    found = []
    for _ in range(5):
        started = time.perf_counter()
        jax.block_until_ready([run(*arguments) for _ in range(3)])
        found.append((time.perf_counter() - started) / 3)
    return statistics.median(found)
