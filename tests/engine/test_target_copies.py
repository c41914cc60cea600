"""Heads with an embedding or an lm_head of another target: the log names those alone."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jspec.cli.diagnosis.readings import target_readings
from jspec.config.engine_args import EngineArgs
from jspec.device.parallel import Parallel
from jspec.engine.weights.loading import LoadedModels, load_models, resolve_paths
from jspec.engine.weights.target_copies import warn_of_other_targets
from jspec.messages.weight_update import DiskUpdate
from jspec.models.heads.eagle3 import save_eagle3
from jspec.models.heads.head_params import head_params
from jspec.models.heads.mtp import copies_of_target
from jspec.models.placement import init_params
from jspec.spec.model_spec import uniform_decoder
from jspec.speculative.drafters.source import DraftSource
from jspec.training.heads.head_eagle3 import TrainedEagle3
from tests.models.test_hf_mtp import FIRST, LAYOUTS, WIDTH
from tests.models.test_hf_mtp import read as read_mtp
from tests.models.test_hf_mtp import written as written_mtp
from tests.support.tiny_models import TinyPair, write_tiny_pair

from .test_served_weights import serving, write_eagle1

V, E = 320, 32


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return write_tiny_pair(tmp_path_factory.mktemp("pair"))


def with_tensors(path: Path, **changed: np.ndarray | None) -> None:
    file = path / "model.safetensors"
    tensors: dict[str, Any] = load_file(file) | changed
    save_file({name: x for name, x in tensors.items() if x is not None}, file)


def table_of(pair: TinyPair) -> np.ndarray:
    return np.array(load_file(pair.target_path / "model.safetensors")["model.embed_tokens.weight"])


def head_of(pair: TinyPair) -> np.ndarray:
    return np.array(load_file(pair.target_path / "model.safetensors")["lm_head.weight"])


def foreign(like: np.ndarray) -> np.ndarray:
    """Permute the entries: the array is as large, and each entry is another token's."""
    return np.ascontiguousarray(np.roll(like, 7, axis=0))


def load(target: Path, draft: Path, *, algorithm: str = "EAGLE3", shards: int = 1) -> LoadedModels:
    args = EngineArgs(
        model_path=str(target),
        speculative_algorithm=algorithm,
        speculative_draft_model_path=str(draft),
        dtype="float32",
        tp_size=shards,
    )
    mesh = Parallel(tensor=shards).mesh(jax.devices("cpu")[:shards])
    return load_models(args, resolve_paths(args), mesh=mesh)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("algorithm", ["EAGLE3", "EAGLE"])
def test_another_target_s_embedding_is_a_warning(
    pair: TinyPair,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    algorithm: str,
    shards: int,
) -> None:
    draft = tmp_path / "draft"
    if algorithm == "EAGLE":
        write_eagle1(draft, pair, seed=1)
    else:
        shutil.copytree(pair.draft_path, draft)
    own = table_of(pair)
    # None of its own, the target's, the same in eight and in sixteen bits, one fitted further.
    for table in (
        None,
        own,
        own.astype(ml_dtypes.bfloat16).astype(np.float32),
        own.astype(ml_dtypes.float8_e4m3fn).astype(np.float32),
        own + 0.05 * own.std() * foreign(own) / own.std(),
    ):
        with_tensors(draft, **{"embed_tokens.weight": table})
        load(pair.target_path, draft, algorithm=algorithm, shards=shards)
    assert not caplog.messages
    with_tensors(draft, **{"embed_tokens.weight": foreign(own)})
    load(pair.target_path, draft, algorithm=algorithm, shards=shards)
    (said,) = caplog.messages
    assert said.startswith(
        f"{draft}/model.safetensors: embed_tokens.weight differs from the target's by 1"
    )
    assert "% (root mean square over 64 tokens); the head drafts with its own." in said
    assert "Without the tensor in its file the target's is used; jspec doctor" in said


def test_another_target_s_lm_head_is_a_warning_where_the_target_s_is_used(
    pair: TinyPair, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    draft, own = tmp_path / "draft", head_of(pair)
    write_eagle1(draft, pair, seed=1)
    for lm_head in (
        own,
        np.zeros((V, E), np.int16),
    ):  # the second has a type that cannot be compared
        with_tensors(draft, **{"lm_head.weight": lm_head})
        load(pair.target_path, draft, algorithm="EAGLE")
    assert not caplog.messages
    with_tensors(draft, **{"lm_head.weight": foreign(own)})
    load(pair.target_path, draft, algorithm="EAGLE")
    (said,) = caplog.messages
    assert "lm_head.weight differs from the target's by 1" in said
    assert (
        "the target's is used instead, but the head seems to be trained for another target" in said
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_for_multi_token_prediction_of_another_target_are_a_warning(
    layout: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rng = np.random.default_rng(1)
    target = {
        "embed": {"table": rng.standard_normal((V, WIDTH)).astype(np.float32)},
        "lm_head": {"kernel": rng.standard_normal((WIDTH, V)).astype(np.float32)},
    }
    path = written_mtp(tmp_path / "draft", layout)
    config, names = read_mtp(path, layout)
    source = DraftSource(make=None, copies=copies_of_target(config, names))  # type: ignore[arg-type]
    table, head = target["embed"]["table"], target["lm_head"]["kernel"].T
    copies = {
        f"{FIRST[layout]}embed_tokens.weight": table,
        "model.embed_tokens.weight": table,
        "lm_head.weight": np.ascontiguousarray(head),
    }
    if layout != "step3p5":  # whose layers have heads of their own
        copies[f"{FIRST[layout]}shared_head.head.weight"] = np.ascontiguousarray(head)
    with_tensors(path, **copies)
    warn_of_other_targets(path, source, target)
    assert not caplog.messages
    for name, value in copies.items():
        with_tensors(path, **copies | {name: foreign(value)})
        warn_of_other_targets(path, source, target)
        (said,) = caplog.messages
        assert f"{name} differs from the target's by 1" in said
        caplog.clear()


def test_a_head_of_its_own_width_is_read_with_its_embedding_and_without_a_word(
    pair: TinyPair, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """EAGLE-3 heads of 70B targets are narrower than the target, whose features fc projects."""
    layer = uniform_decoder(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=48,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position=256,
    )
    config = replace(pair.draft_config, layer=layer)
    assert config.target_hidden_size == E
    params = init_params(head_params(config), seed=3)
    drafts = load(pair.target_path, pair.draft_path).params["draft"]
    params["draft_ids"] = np.asarray(drafts["draft_ids"])
    caplog.clear()
    save_eagle3(tmp_path / "draft", config, params, dtype=np.float32, include_embed=True)
    models = load(pair.target_path, tmp_path / "draft")
    assert models.draft_layer is not None
    assert models.draft_layer.hidden_size == 16
    draft, target = models.params["draft"], models.params["target"]
    np.testing.assert_array_equal(draft["embed"]["table"], params["embed"]["table"])
    assert draft["embed"]["table"].shape == (V, 16)
    assert not caplog.messages
    assert not list(target_readings(TrainedEagle3(config), (), draft, target))


def test_an_update_of_the_draft_is_held_against_the_target_that_it_comes_with(
    pair: TinyPair, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = write_tiny_pair(tmp_path / "other", seed=4)
    drafts = [tmp_path / "ours", tmp_path / "theirs"]
    for draft, each in zip(drafts, (pair, other), strict=True):
        shutil.copytree(each.draft_path, draft)
        with_tensors(draft, **{"embed_tokens.weight": table_of(each)})
    weights, _ = serving(load(pair.target_path, drafts[0]))
    weights.prepare(DiskUpdate(target=str(other.target_path), draft=str(drafts[1])))
    weights.prepare(DiskUpdate(draft=str(drafts[0])))
    assert not caplog.messages
    weights.prepare(DiskUpdate(draft=str(drafts[1])))
    (said,) = caplog.messages
    assert f"{drafts[1]}/model.safetensors: embed_tokens.weight differs" in said


def test_the_doctor_tries_the_target_s_own(pair: TinyPair, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(pair.draft_path, draft)
    with_tensors(draft, **{"embed_tokens.weight": foreign(table_of(pair))})
    params = load(pair.target_path, draft).params
    head = TrainedEagle3(pair.draft_config)
    # Its lm_head scores half of the vocabulary: the target's cannot stand in for it.
    (reading,) = target_readings(head, (0, 1, 2), params["draft"], params["target"])
    assert reading.kind == "embedding"
    assert "leave embed_tokens.weight out of the head's file" in reading.repair
    assert reading.layer_ids == (0, 1, 2)
    changed = reading.params(params["draft"])
    assert changed["embed"] is params["target"]["embed"]
    assert changed["layers"] is params["draft"]["layers"]
    with_tensors(draft, **{"embed_tokens.weight": None})
    models = load(pair.target_path, draft)
    assert models.source.shares == ("embed",)
    own = {name: models.params["draft"][name] for name in ("fc", "lm_head")}
    assert not list(target_readings(head, (), own, models.params["target"]))
