"""A server over four fake devices with the TPU's kernels, interpreted: a process of its own.

    python -m tests.server.tpu_bundle_server DIR

DIR has a tiny pair. One request over HTTP for each draft shape; prints one JSON object.

Interpreted kernels are callbacks. Each holds a thread of XLA's CPU client, on all devices at once,
while jax copies its arguments on another thread of the same pool, which has one for each core or
device, whichever are more. Four devices on fewer than eight cores would wait for ever. NPROC, which
XLA reads instead of counting cores, makes the pool larger.
"""

from __future__ import annotations

import os

os.environ |= {
    "NPROC": "16",
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0",
}

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from jax.sharding import Mesh

from jspec.config.engine_args import EngineArgs
from jspec.config.limits import ServeLimits, SpeculativeConfig
from jspec.engine import building
from jspec.engine.programs.program_keys import program_keys
from jspec.engine.steps.step_def import ProgramKey
from jspec.engine.weights.loading import LoadedModels, ModelPaths, load_models
from jspec.messages.plan import StepKind
from jspec.messages.step_options import PLAIN
from jspec.pallas_kernels.bundles import OPS, choose_ops
from jspec.scheduler.shapes.shape_choice import FixedShape, ShapeChooser
from jspec.server.app import create_app
from jspec.server.server_args import ServerArgs
from jspec.serving.engine import Engine

SAMPLING = {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True}
PROMPT = list(range(5, 25))  # two chunks
CALLBACK = "xla_ffi_python_cpu_callback"  # how an interpreted kernel reads and writes memory
KERNELS = "tpu_interpret"


class ShapeOfRequest(FixedShape):
    """The shape of the next request, which the caller sets."""

    def choose_next(self, shape: SpeculativeConfig) -> None:
        self._shape = shape


def load(args: EngineArgs, paths: ModelPaths, *, mesh: Mesh) -> LoadedModels:
    """Load for the TPU's bundle, with a chain and plain steps beside the tree."""
    models = load_models(args, paths, mesh=mesh)
    tree = models.config.speculative
    chain = replace(tree, topk=1, num_draft_tokens=tree.num_steps + 1)
    config = replace(
        models.config, kernels=KERNELS, other_shapes=(SpeculativeConfig.plain(), chain)
    )
    target = replace(models.target, ops=OPS[KERNELS])
    drafter = models.source.make(target.ops, target.shard)
    return replace(models, config=config, target=target, drafter=drafter)


def used_programs(limits: ServeLimits, when: str) -> list[ProgramKey]:
    """Return the programs of greedy requests alone: each one takes seconds to interpret."""
    del when
    return [
        key
        for key in program_keys(limits)
        if key.kind is StepKind.PREFILL or (key.kind is StepKind.DECODE and key.options == PLAIN)
    ]


def no_programs(limits: ServeLimits, ready: Any) -> list[ProgramKey]:
    del limits, ready
    return []


class TpuEngine(Engine):
    def _build_runner(self, progress: Any) -> Any:
        building.programs_at_start = used_programs
        building.later_programs = no_programs
        return building.build_runner(self.args, progress=progress, load=load)

    def _shapes(self, runner: Any) -> ShapeChooser:
        self.shapes = ShapeOfRequest(runner.limits.draft_shape)
        return self.shapes

    @property
    def executables(self) -> dict[str, Any]:
        return {str(key): each for key, each in self._runner.executables.items()}


@contextmanager
def address_of(engine: Engine) -> Iterator[str]:
    app = create_app(engine, ServerArgs(log_interval=0))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, loop="asyncio"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(timeout=60)


def main(directory: Path) -> None:
    engine = TpuEngine(
        str(directory / "target"),
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=str(directory / "draft"),
        speculative_num_steps=1,
        speculative_eagle_topk=2,
        speculative_num_draft_tokens=3,
        tp_size=4,
        page_size=16,
        max_running_requests=1,
        chunked_prefill_size=16,
        context_length=64,
        disable_logprobs=True,
        disable_radix_cache=True,
        compile_at_start="first",
        compilation_cache_dir="",
        dtype="float32",
    )
    ops = engine._served.models.target.ops
    bundle = replace(choose_ops("tpu"), interpret=True)
    found: dict[str, Any] = {"is_tpu_bundle": ops == bundle, "texts": {}}
    limits = engine._runner.limits
    with engine, address_of(engine) as url:
        for shape in limits.shapes:
            engine.shapes.choose_next(shape)
            body = {"input_ids": PROMPT, "sampling_params": SAMPLING}
            answer = httpx.post(f"{url}/generate", json=body, timeout=300).json()
            found["texts"][str(shape)] = answer["output_ids"]
        found["with_kernels"] = {
            key: CALLBACK in each.as_text() for key, each in engine.executables.items()
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
