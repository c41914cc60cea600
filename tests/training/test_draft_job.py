"""A run of `jspec train-draft` without an engine."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jspec.errors import CheckpointError, ConfigError
from jspec.models.files.checkpoint import load_model_spec
from jspec.training.data.draft_data import own_samples, read_examples
from jspec.training.data.examples import RowTable
from jspec.training.data.feature_store import fingerprint
from jspec.training.draft_job import claim, contents_of, run_job
from jspec.training.draft_recipe import HeadRecipe
from jspec.training.draft_settings import DraftJob, Kind
from jspec.training.loop import LoopConfig
from tests.support.tiny_models import write_tiny_pair

LENGTH = 16
LOOP = LoopConfig(
    num_steps=4,
    peak_learning_rate=1e-2,
    warmup_steps=1,
    log_every=2,
    eval_every=3,
    checkpoint_every=2,
)
RECIPE = HeadRecipe(loop=LOOP, batch_size=4, length=LENGTH, num_depths=2, compute_dtype=jnp.float32)


@dataclass
class PlannedServing:
    """Repeats one token after every prompt."""

    def sample(self, prompts: RowTable, lens: np.ndarray, *, seed: int) -> np.ndarray:
        del seed
        places = np.arange(prompts.ids.shape[1])
        return np.where(places < lens[:, None], prompts.ids, 77).astype(np.int32)

    def acceptance(self, head: Path, prompts: RowTable) -> dict[str, float]:
        assert len(prompts.ids)
        assert sorted(file.name for file in head.iterdir()) == ["config.json", "model.safetensors"]
        return {"served_T0": 1.5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target and 30 lines of text."""
    folder = tmp_path_factory.mktemp("job")
    write_tiny_pair(folder)
    lines = [{"text": f"line {i} of {'abc' * (i % 5 + 1)}, {i * i}"} for i in range(30)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def job(folder: Path, out: Path, **changes: Any) -> DraftJob:
    plain = DraftJob(
        target=folder / "target",
        data=folder / "data.jsonl",
        out=out,
        kind=Kind.EAGLE,
        recipe=RECIPE,
        num_devices=1,
        num_held_out_rows=4,
        export_dtype=np.dtype(np.float32),
    )
    return replace(plain, **changes)


def run(folder: Path, out: Path, *, resume: bool = False, **changes: Any) -> dict[str, np.ndarray]:
    """Run the job and return the exported weights."""
    run_job(job(folder, out, **changes), resume=resume, serving=PlannedServing())
    weights: dict[str, np.ndarray] = load_file(out / "head" / "model.safetensors")
    return weights


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> dict[str, np.ndarray]:
    return run(folder, folder / "undisturbed")


@pytest.mark.slow
def test_a_chain_is_exported_with_the_target_s_embedding(folder: Path, tmp_path: Path) -> None:
    """The target leaves the device before training, since its features are stored."""
    stored: dict[str, Any] = {"features_dir": tmp_path / "features"}
    made = run(folder, tmp_path / "out", kind=Kind.NEXTN, is_chained=True, **stored)
    given = load_file(folder / "target" / "model.safetensors")["model.embed_tokens.weight"]
    np.testing.assert_array_equal(made["model.embed_tokens.weight"], given)
    assert sum(name.endswith(".eh_proj.weight") for name in made) == RECIPE.num_depths


@pytest.mark.slow
@pytest.mark.exhaustive  # a head of blocks does below
def test_two_devices_learn_what_one_does(
    folder: Path, tmp_path: Path, undisturbed: dict[str, np.ndarray]
) -> None:
    assert len(jax.devices()) >= 2
    both = run(folder, tmp_path / "out", num_devices=2)
    for name, value in undisturbed.items():
        np.testing.assert_allclose(both[name], value, rtol=1e-3, atol=1e-4)


class Interrupted(PlannedServing):
    def acceptance(self, head: Path, prompts: RowTable) -> dict[str, float]:
        del head, prompts
        raise KeyboardInterrupt


@pytest.mark.slow
def test_a_head_of_blocks_is_resumed_on_two_devices_and_learns_what_one_does(
    folder: Path, tmp_path: Path
) -> None:
    """A step's roots are drawn for all rows of its batch, whichever device has them."""
    assert len(jax.devices()) >= 2
    recipe = replace(RECIPE, num_depths=3, num_roots=4, loss_weights=Kind.DSPARK.loss_weights)
    blocks: dict[str, Any] = {
        "kind": Kind.DSPARK,
        "recipe": recipe,
        "num_layers": 1,
        "aux_layer_ids": (0, 2),
        "rank": 4,
    }
    one = run(folder, tmp_path / "one", **blocks)
    assert "confidence_head.proj.weight" in one
    curve = json.loads((tmp_path / "one" / "report.json").read_text())["held_out_by_step"]
    assert curve[-1]["loss"] < curve[0]["loss"]
    two = job(folder, tmp_path / "two", num_devices=2, **blocks)
    with pytest.raises(KeyboardInterrupt):
        run_job(two, resume=False, serving=Interrupted())
    both = run(folder, two.out, resume=True, num_devices=2, **blocks)
    for name, value in one.items():
        np.testing.assert_allclose(both[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_stored_features_teach_what_the_targets_own_forward_does(
    folder: Path, tmp_path: Path, undisturbed: dict[str, np.ndarray]
) -> None:
    stored = run(folder, tmp_path / "out", features_dir=tmp_path / "features")
    for name, value in undisturbed.items():
        np.testing.assert_allclose(stored[name], value, rtol=1e-3, atol=1e-4)
    written = tmp_path / "features" / "train"
    hidden = np.load(written / "hidden.npy")
    assert hidden.shape[1:] == (LENGTH, 32)
    assert not (written / "aux.npy").exists()  # this head reads the last hidden alone
    # stored features are read, not made again: other features give other weights
    np.save(written / "hidden.npy", hidden[::-1])
    shuffled = run(folder, tmp_path / "again", features_dir=tmp_path / "features")
    assert np.abs(shuffled["fc.weight"] - undisturbed["fc.weight"]).max() > 1e-3
    wider = replace(RECIPE, length=LENGTH + 4)
    with pytest.raises(ConfigError, match="has features whose rows is"):
        run(folder, tmp_path / "wider", features_dir=tmp_path / "features", recipe=wider)
    assert not (tmp_path / "wider").exists()


def test_a_target_that_was_trained_further_is_another(folder: Path, tmp_path: Path) -> None:
    found = []
    for name, factor in (("ours", 1.0), ("same", 1.0), ("theirs", 1.01)):
        file = shutil.copytree(folder / "target", tmp_path / name) / "model.safetensors"
        tensors = load_file(file)
        tensors |= {key: x * factor for key, x in tensors.items() if "down_proj" in key}
        save_file(tensors, file)
        found.append((file.stat().st_size, fingerprint(tmp_path / name)))
    assert found[0] == found[1]
    assert found[0][0] == found[2][0]
    assert found[0][1] != found[2][1]


def test_what_the_target_says_itself_counts_from_its_first_token() -> None:
    ids = np.arange(1, 33, dtype=np.int32).reshape(2, 16)
    table = RowTable(ids=ids, lens=np.asarray([16, 4]), weights=np.ones((2, 16), np.float32))
    found = own_samples(table, PlannedServing(), count=5, seed=1)
    assert found.ids.shape == (5, 16)
    for row, weights in zip(found.ids, found.weights, strict=True):
        said = np.flatnonzero(row == 77)
        assert 11 <= len(said) <= 15
        np.testing.assert_array_equal(np.flatnonzero(weights), said - 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"kind": Kind.EAGLE3},
            r"a target of 2 layers has no default EAGLE-3 layers .* or aux_layer_ids where one is",
        ),
        ({"kind": Kind.EAGLE3, "aux_layer_ids": (1, 2)}, r"aux_layer_ids is \(1, 2\); expected"),
        ({"kind": Kind.EAGLE3, "aux_layer_ids": (0, 3)}, r"expected ids in \[0, 2\]"),
        ({"draft_vocab_size": 9}, "draft_vocab_size is 9, but the head is EAGLE; expected it"),
        (
            {"kind": Kind.EAGLE3, "aux_layer_ids": (0, 2), "draft_vocab_size": 321},
            r"draft_vocab_size is 321; expected 1 to 320",
        ),
        ({"kind": Kind.NEXTN, "aux_layer_ids": (0, 2)}, "the head is NEXTN; expected it unset"),
        ({"kind": Kind.DFLASH}, "a target of 2 layers has no 5 default captures; expected aux_lay"),
        ({"kind": Kind.DFLASH, "rank": 8}, "rank is 8, but the head is DFLASH; expected it unset"),
        (
            {"kind": Kind.PEAGLE, "aux_layer_ids": (0, 2), "mask_token_id": 320},
            "mask_token_id is 320; expected an id below 320",
        ),
        ({"is_chained": True}, "chained is set, but the head is EAGLE; expected it unset"),
        ({"num_devices": 3}, "batch_size is 4; expected a multiple of 3"),
        ({"recipe": replace(RECIPE, length=512)}, "length is 512; expected at most 256"),
        ({"held_out": Path("absent.jsonl")}, "absent.jsonl is no file"),
        ({"features_dir": Path(__file__)}, "features_dir is .*: File exists; expected a directory"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    folder: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(folder, tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()


def test_a_target_without_a_checkpoint_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model_path.* without config\.json"):
        run(folder, tmp_path / "out", target=tmp_path)


def test_an_output_directory_is_not_taken_twice(folder: Path, tmp_path: Path) -> None:
    started = job(folder, tmp_path / "started")
    contents = contents_of(started, *read_examples(started, load_model_spec(started.target)))
    claim(started, resume=False, contents=contents)
    with pytest.raises(ConfigError, match=r"which exists; expected a new directory, or --resume"):
        run(folder, started.out)
    other = replace(RECIPE, loop=replace(LOOP, peak_learning_rate=0.5))
    with pytest.raises(ConfigError, match=r"learning_rate is 0.5; expected 0.01, with which"):
        run(folder, started.out, resume=True, recipe=other)
    with pytest.raises(ConfigError, match=r"settings.json does not exist"):
        run(folder, tmp_path, resume=True)
    with pytest.raises(ConfigError, match=r"data.jsonl/out': Not a directory; expected a new"):
        run(folder, folder / "data.jsonl" / "out")


@pytest.mark.parametrize("which", ["data", "held_out"])
def test_a_run_is_not_resumed_over_other_lines(which: str, folder: Path, tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.jsonl" for name in ("data", "held_out")}
    shutil.copy(folder / "data.jsonl", files["data"])
    files["held_out"].write_text(json.dumps({"text": "line of the evaluation"}))
    started = job(folder, tmp_path / "out", **files)
    spec = load_model_spec(started.target)
    for is_resumed in (False, True):
        contents = contents_of(started, *read_examples(started, spec))
        claim(started, resume=is_resumed, contents=contents)
    files[which].write_text(files[which].read_text().replace("line ", "lane "))
    contents = contents_of(started, *read_examples(started, spec))
    with pytest.raises(ConfigError, match=rf"{which}_sha256 is '.*'; expected '.*', with which"):
        claim(started, resume=True, contents=contents)


def test_a_tokenizer_beyond_the_targets_vocabulary_is_refused(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    for file in (folder / "target").iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"vocab_size": 200}))
    with pytest.raises(CheckpointError, match="200"):  # the weights do not fit either
        run(folder, tmp_path / "out", target=target)
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["far"] = 400
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    (target / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="has 401 ids; expected at most 320"):
        run(folder, tmp_path / "out", target=target)
