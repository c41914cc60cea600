"""Run the guides' code blocks and serve tokens with what they add."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.config.drafting import ALGORITHMS
from jspec.config.engine_args import EngineArgs
from jspec.engine.programs.compilation import compile_all
from jspec.engine.programs.program_keys import program_keys
from jspec.engine.runner import init_state
from jspec.engine.weights.loading import LoadedModels, load_models, resolve_paths
from jspec.errors import ConfigError
from jspec.messages.plan import StepKind
from jspec.messages.step_options import StepOptions
from jspec.models.files.checkpoint import load_model_spec, save_target
from jspec.models.placement import init_params
from jspec.models.registry import FAMILIES, family_named, table_of
from jspec.spec.model_spec import ModelSpec
from jspec.speculative.drafters.registry import DRAFTERS
from jspec.speculative.step import StepProgram
from tests.models.dense_forward import dense_forward
from tests.models.test_families import attend_of
from tests.speculative.engines import Compiled, limits_of, make_request, mesh_of, serve
from tests.support.tiny_models import tiny_target_config

DOCS = Path(__file__).resolve().parents[2] / "docs"
WINDOW = 8


def blocks_of(name: str) -> dict[str, Any]:
    """Run the guide's Python blocks in order; return the names they define."""
    text = (DOCS / name).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": "guide"}
    for block in blocks:
        exec(compile(block, name, "exec", dont_inherit=True), names)
    assert len(blocks) == 2, f"{name} has {len(blocks)} blocks; expected the file and its row"
    return names


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Undo the registration of a guide's family or drafter."""
    before, drafters = list(FAMILIES), dict(DRAFTERS)
    yield
    FAMILIES[:] = before
    for name in set(DRAFTERS) - set(drafters):
        del DRAFTERS[name], ALGORITHMS[name]


def write_alternating(path: Path, family: Any) -> ModelSpec:
    """Write a tiny checkpoint of the guide's family; return its spec."""
    base = tiny_target_config()
    path.mkdir()
    plain = family_named("llama").to_json(base)
    own = {"architectures": list(family.architectures), "sliding_window": WINDOW}
    config = path / "config.json"
    config.write_text(json.dumps(plain | own), encoding="utf-8")
    spec = load_model_spec(path)
    params = init_params(table_of(spec), seed=4)
    save_target(path, spec, params, dtype=np.float32)
    assert load_model_spec(path) == spec
    return spec


def compiled(models: LoadedModels, args: EngineArgs) -> Compiled:
    limits = limits_of(args.speculative, page_size=4)
    program = StepProgram(
        target=models.target, drafter=models.drafter, draft_shape=args.speculative
    )
    executables = compile_all(
        program,
        limits,
        mesh=mesh_of(1),
        params=models.params,
        state=init_state(program, limits, shards=1, kv_dtype=jnp.float32),
        keys=tuple(
            key
            for key in program_keys(limits)
            if key.kind is StepKind.PREFILL or key.options == StepOptions()
        ),
    )
    return Compiled(limits=limits, program=program, params=models.params, executables=executables)


@pytest.mark.slow
def test_a_family_and_a_drafter_of_the_guides_serve_the_model_s_own_tokens(tmp_path: Path) -> None:
    """Greedy text through the paged engine, with the toy drafter, against a dense forward."""
    of_model, of_drafter = blocks_of("add_a_model.md"), blocks_of("add_a_drafter.md")
    path = tmp_path / "model"
    spec = write_alternating(path, of_model["FAMILY"])
    assert [layer.attention.window for layer in spec.layers] == [None, WINDOW]
    args = EngineArgs(
        model_path=str(path), speculative_algorithm="REPEAT", speculative_num_draft_tokens=3
    )
    models = load_models(args, resolve_paths(args), mesh=mesh_of(1))
    assert type(models.drafter) is of_drafter["RepeatDrafter"]
    requests = [
        make_request(i, prompt_len=5 + 9 * i, seed=30 + i, temperature=0.0, max_new_tokens=40)
        for i in range(3)
    ]
    served = serve(compiled(models, args), requests, chunk_size=8)
    for request, ids in zip(requests, served.ids, strict=True):
        text = np.array(request.prompt_ids + ids)
        logits, _, _ = dense_forward(
            spec, models.params["target"], text, aux_layer_ids=(), attend_of=attend_of
        )
        chosen = np.asarray(jnp.argmax(logits, axis=-1))
        first = len(request.prompt_ids) - 1
        assert chosen[first:-1].tolist() == list(ids)
    assert served.num_leaked_pages == 0
    assert sum(served.counters.accept_histogram) > 0


def test_a_family_is_served_once_it_is_registered(tmp_path: Path) -> None:
    of_model = blocks_of("add_a_model.md")
    write_alternating(tmp_path / "model", of_model["FAMILY"])
    FAMILIES.remove(of_model["FAMILY"])
    with pytest.raises(ConfigError, match="architecture is 'AlternatingForCausalLM'; expected one"):
        load_model_spec(tmp_path / "model")


def test_a_name_is_registered_once() -> None:
    blocks_of("add_a_drafter.md")
    with pytest.raises(ConfigError, match="algorithm REPEAT is registered; expected a new name"):
        blocks_of("add_a_drafter.md")


@pytest.mark.parametrize("name", ["add_a_model.md", "add_a_drafter.md"])
def test_what_the_guides_name_is_declared_where_they_say(name: str) -> None:
    prose = re.sub(r"^```.*?^```", "", (DOCS / name).read_text("utf-8"), flags=re.M | re.S)
    named = re.findall(r"`(\w+)`\s+(?:in\s+|\()`([\w/]+\.py)`", prose)
    assert named
    for what, path in named:
        declared = rf"^(?:class |def )?{what}\b(?:\(|:| =)"
        text = (DOCS.parent / path).read_text("utf-8")
        assert re.search(declared, text, re.MULTILINE), f"{path} does not declare {what}"


def test_the_guides_are_linked() -> None:
    for place in (DOCS / "design.md", DOCS.parent / "README.md"):
        text = place.read_text(encoding="utf-8")
        assert "add_a_model.md" in text
        assert "add_a_drafter.md" in text
