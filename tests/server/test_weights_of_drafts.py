"""Weights that change while an engine drafts in other ways than EAGLE-3: three layers that the
target's checkpoint brings (NEXTN), a small model (STANDALONE), an EAGLE-1 head.

The text is the target's whatever was drafted, so a draft shows in the drafts that are accepted: at
a high temperature, where the noise that target and draft share makes them agree now and then.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jspec.errors import CheckpointError
from jspec.models.files.checkpoint import save_target
from jspec.models.placement import init_params
from jspec.models.registry import table_of
from jspec.serving.engine import Engine
from jspec.spec.model_spec import ModelSpec
from tests.engine.test_served_weights import write_eagle1
from tests.speculative.mtp_checkpoints import CONFIGS, write_checkpoint
from tests.speculative.test_standalone import SMALL
from tests.support.tiny_models import TinyPair, tiny_target_config, tiny_tokenizer

pytestmark = pytest.mark.slow
PROMPT = list(range(40, 80))
GREEDY = {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}
HOT = {"max_new_tokens": 64, "temperature": 2.0, "sampling_seed": 7, "ignore_eos": True}
LAYERS = "model.mtp.layers."
COUNTS = ("spec_verify_ct", "spec_correct_drafts_histogram")
Tensors = dict[str, np.ndarray]


@dataclass(frozen=True)
class Way:
    """A way of drafting. checkpoints: by the letters of target and draft, what an engine is given.

    missing, misshapen: tensors of the draft that a bad update lacks and spoils, of its last layer.
    """

    algorithm: str
    checkpoints: dict[str, dict[str, str]]
    missing: str
    misshapen: str

    @property
    def is_in_target(self) -> bool:
        return self.algorithm == "NEXTN"

    def draft(self, letters: str) -> Path:
        paths = self.checkpoints[letters]
        return Path(paths["model_path" if self.is_in_target else "speculative_draft_model_path"])


def nextn(path: Path, pair: TinyPair) -> Way:
    """MiMo-V2-Flash's layout: target and layers in one file. The others are the same, turned."""
    del pair
    first_alone = {"num_hidden_layers": 1, "hybrid_layer_pattern": [0], "moe_layer_freq": [0]}
    write_checkpoint(path / "AA", CONFIGS["mimo_v2"] | first_alone)
    ours = load_file(path / "AA" / "model.safetensors")
    for letters, turned in (
        ("AB", lambda name: name.startswith(LAYERS)),
        ("A1", lambda name: name.startswith(f"{LAYERS}1.")),
        ("BB", lambda _: True),
    ):
        shutil.copytree(path / "AA", path / letters)
        theirs = {
            name: np.ascontiguousarray(np.flip(value)) if turned(name) else value
            for name, value in ours.items()
        }
        save_file(theirs, path / letters / "model.safetensors")
    return Way(
        algorithm="NEXTN",
        checkpoints={name: {"model_path": str(path / name)} for name in ("AA", "AB", "A1", "BB")},
        missing=f"{LAYERS}2.eh_proj.weight",
        misshapen=f"{LAYERS}2.self_attn.v_proj.weight",
    )


def beside(path: Path, write: Callable[[Path, int], None], **how: str) -> Way:
    """Two targets of one layer, and two drafts, each in a directory of its own."""
    for seed, letter in enumerate("AB"):
        write_model(path / f"target {letter}", tiny_target_config(num_layers=1), seed=seed)
        write(path / f"draft {letter}", 10 + seed)
    return Way(
        checkpoints={
            f"{target}{draft}": {
                "model_path": str(path / f"target {target}"),
                "speculative_draft_model_path": str(path / f"draft {draft}"),
            }
            for target, draft in ("AA", "AB", "BB")
        },
        **how,
    )


def write_model(path: Path, spec: ModelSpec, *, seed: int) -> None:
    save_target(path, spec, init_params(table_of(spec), seed=seed), dtype=np.float32)
    tiny_tokenizer().save(str(path / "tokenizer.json"))


def standalone(path: Path, pair: TinyPair) -> Way:
    del pair
    return beside(
        path,
        lambda directory, seed: write_model(directory, SMALL, seed=seed),
        algorithm="STANDALONE",
        missing="model.layers.0.mlp.up_proj.weight",
        misshapen="model.layers.0.self_attn.k_proj.weight",
    )


def eagle1(path: Path, pair: TinyPair) -> Way:
    return beside(
        path,
        lambda directory, seed: write_eagle1(directory, pair, seed=seed),
        algorithm="EAGLE",
        missing="fc.weight",
        misshapen="layers.0.self_attn.k_proj.weight",
    )


@pytest.fixture(scope="module", params=[nextn, standalone, eagle1], ids=lambda way: way.__name__)
def way(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    tiny_pair: TinyPair,
) -> Way:
    made: Way = request.param(tmp_path_factory.mktemp("draft"), tiny_pair)
    return made


@pytest.fixture(scope="module")
def start(way: Way, programs_of_all: Path) -> Callable[[str], Engine]:
    """A fresh engine over the checkpoints of these letters."""
    arguments: dict[str, Any] = {
        "speculative_algorithm": way.algorithm,
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
        "max_running_requests": 1,
        "chunked_prefill_size": 32,
        "context_length": 256,
        "max_total_tokens": 1024,
        "dtype": "float32",
        "disable_logprobs": True,  # fewer programs
        "compilation_cache_dir": str(programs_of_all),
    }
    return lambda letters: Engine(**{**arguments, **way.checkpoints[letters]})


@pytest.fixture(scope="module")
def fresh(start: Callable[[str], Engine]) -> Callable[[str], list[Any]]:
    """What a fresh engine over those weights says, and accepts."""

    def answers(letters: str) -> list[Any]:
        with start(letters) as engine:
            return said_by(engine)

    return answers


@pytest.fixture(scope="module")
def engine(start: Callable[[str], Engine]) -> Iterator[Engine]:
    with start("AA") as engine:
        yield engine


@pytest.fixture
def served(engine: Engine, way: Way) -> Iterator[Engine]:
    """The shared engine, which gets its own weights again."""
    yield engine
    engine.update_weights_from_disk(**way.checkpoints["AA"], weight_version="default")


def said_by(engine: Engine) -> list[Any]:
    """Of each request, its text and what was accepted of its drafts."""
    results = [engine.generate(input_ids=PROMPT, sampling_params=p) for p in (GREEDY, HOT)]
    return [
        (result["output_ids"], [result["meta_info"][name] for name in COUNTS]) for result in results
    ]


def texts(said: list[Any]) -> list[list[int]]:
    return [ids for ids, _ in said]


def test_a_draft_and_then_both_are_a_fresh_engines(
    served: Engine, way: Way, fresh: Callable[[str], list[Any]]
) -> None:
    """The draft alone changes what is accepted and no text; both change both."""
    before = said_by(served)
    served.update_weights_from_disk(str(way.draft("AB")), selector="draft", weight_version="2")
    after = said_by(served)
    assert after == fresh("AB")
    assert texts(after) == texts(before)
    assert after[1] != before[1]
    served.update_weights_from_disk(**way.checkpoints["BB"])
    both = said_by(served)
    assert both == fresh("BB")
    assert texts(both)[0] != texts(before)[0]
    assert texts(both)[1] != texts(before)[1]
    assert served.weight_version == "2"


@pytest.mark.parametrize("way", [nextn], indirect=True, ids=["nextn"])
def test_one_layer_changes_alone(
    served: Engine, way: Way, fresh: Callable[[str], list[Any]]
) -> None:
    """By its tensors: the others stay, and what is accepted is a fresh engine's of that moe."""
    before = said_by(served)
    theirs = load_file(way.draft("A1") / "model.safetensors")
    of_layer = {name: x for name, x in theirs.items() if name.startswith(f"{LAYERS}1.")}
    served.update_weights_from_tensor(of_layer)
    for name in (f"{LAYERS}{layer}.eh_proj.weight" for layer in range(3)):
        found = np.asarray(served.get_weights_by_name(name, 10**6), np.float32)
        np.testing.assert_array_equal(found, theirs[name])
    after = said_by(served)
    assert after == fresh("A1")
    assert texts(after) == texts(before)
    assert after[1] != before[1]


def test_a_bad_draft_changes_nothing_and_is_named(served: Engine, way: Way, tmp_path: Path) -> None:
    """Both by themselves and beside a target that would do; in a file and as arrays."""
    before = said_by(served)
    stored = load_file(way.draft("BB") / "model.safetensors")
    bad = np.zeros((3, 5), np.float32)
    shutil.copytree(way.draft("BB"), tmp_path / "bad")
    spoilt = {name: x for name, x in stored.items() if name != way.missing}
    save_file(spoilt | {way.misshapen: bad}, tmp_path / "bad" / "model.safetensors")
    path = str(tmp_path / "bad")
    target = path if way.is_in_target else way.checkpoints["BB"]["model_path"]
    for given in (
        {"model_path": path, "selector": "draft"},
        {"model_path": target, "speculative_draft_model_path": path},
    ):
        with pytest.raises(CheckpointError) as caught:
            served.update_weights_from_disk(**given, weight_version="bad")
        for part in (
            f"no tensor {way.missing}; expected shape",
            f"{way.misshapen} has shape (3, 5); expected",
        ):
            assert part in str(caught.value)
    good = {way.missing: stored[way.missing], way.misshapen: bad}
    with pytest.raises(CheckpointError) as caught:
        served.update_weights_from_tensor(good, selector="draft")
    assert f"{way.misshapen} has shape (3, 5); expected" in str(caught.value)
    assert served.weight_version == "default"
    assert said_by(served) == before
