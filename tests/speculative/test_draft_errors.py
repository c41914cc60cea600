"""A draft that does not fit is refused before its target is read: by file and by value."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from benchmarks.workloads import DRAFTER_SHAPE, TINY, WORKLOADS, eagle1_of, mtp_of
from jspec.config.engine_args import EngineArgs
from jspec.errors import CheckpointError, ConfigError, JspecError
from jspec.models.files.checkpoint import save_target
from jspec.models.files.stored.param_reads import on_host
from jspec.models.heads.eagle1 import save_eagle1
from jspec.models.heads.eagle3 import save_eagle3
from jspec.models.heads.head_params import head_params
from jspec.models.heads.mtp import save_mtp
from jspec.models.placement import init_params
from jspec.models.registry import table_of
from jspec.speculative.drafters.registry import DRAFTERS
from jspec.speculative.drafters.source import DraftRequest, DraftSource
from tests.speculative import own_blocks

SMALL = WORKLOADS["tiny"].small
FLOAT = np.float32


def write_eagle1(path: Path) -> None:
    config = eagle1_of(TINY)
    save_eagle1(path, config, init_params(head_params(config), seed=0), dtype=FLOAT)


def write_eagle3(path: Path) -> None:
    config = WORKLOADS["tiny"].draft
    save_eagle3(path, config, init_params(head_params(config), seed=0), dtype=FLOAT)


def write_mtp(path: Path) -> None:
    config = mtp_of(TINY, num_layers=DRAFTER_SHAPE[0])
    save_mtp(path, config, init_params(head_params(config), seed=0), target=TINY, dtype=FLOAT)


def write_small(path: Path) -> None:
    assert SMALL is not None
    save_target(path, SMALL, init_params(table_of(SMALL), seed=0), dtype=FLOAT)


WRITERS: dict[str, Callable[[Path], None]] = {
    "EAGLE": write_eagle1,
    "EAGLE3": write_eagle3,
    "NEXTN": write_mtp,
    "STANDALONE": write_small,
    "DFLASH": lambda path: own_blocks.write(path, "dflash"),
}


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("drafts")
    for kind, write in WRITERS.items():
        (path / kind).mkdir()
        write(path / kind)
    return path


def copied(drafts: Path, kind: str, tmp_path: Path, **changes: Any) -> Path:
    """Return a directory called `draft`, with other values in its config.json."""
    path = tmp_path / "draft"
    path.mkdir()
    for file in (drafts / kind).iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    return path


def source(kind: str, path: Path) -> DraftSource:
    """Return the draft's source, like an engine before it reads the target, which is missing
    here."""
    args = EngineArgs.from_mapping(
        {
            "model_path": "target",
            "speculative_algorithm": kind,
            "speculative_draft_model_path": str(path),
            "speculative_num_steps": 3,
        }
    )
    request = DraftRequest(
        args=args,
        path=path,
        target=TINY,
        target_path=Path("target"),
        tokenizer=path,
        shards=1,
    )
    return DRAFTERS[args.algorithm.name](request)


KINDS = pytest.mark.parametrize("kind", WRITERS)


@KINDS
def test_what_fits_is_taken(kind: str, drafts: Path) -> None:
    source(kind, drafts / kind)


@KINDS
def test_another_vocabulary(kind: str, drafts: Path, tmp_path: Path) -> None:
    path = copied(drafts, kind, tmp_path, vocab_size=321)
    with pytest.raises(JspecError, match=r"draft/config\.json: vocab_size .*321.* expected .*320"):
        source(kind, path)


@pytest.mark.parametrize("kind", [kind for kind in WRITERS if kind != "STANDALONE"])
def test_another_hidden_size(kind: str, drafts: Path, tmp_path: Path) -> None:
    """A language model that drafts may have another one."""
    changes = {"hidden_size": 64, **({"target_hidden_size": 64} if kind == "EAGLE3" else {})}
    path = copied(drafts, kind, tmp_path, **changes)
    with pytest.raises(CheckpointError, match=r"draft/config\.json: .*hidden_size.* 64.*\b32\b"):
        source(kind, path)


@KINDS
def test_weights_of_another_width_than_config_json_says(
    kind: str, drafts: Path, tmp_path: Path
) -> None:
    path = copied(drafts, kind, tmp_path, intermediate_size=96)
    with pytest.raises(CheckpointError, match=r"draft: .*(?s:.*)up_proj.*\(64, 32\); .*\(96, 32\)"):
        source(kind, path)


@KINDS
def test_the_head_of_another_target_or_of_no_such_kind(
    kind: str, drafts: Path, tmp_path: Path
) -> None:
    """A deeper target's captures; the files of the other kinds."""
    if kind == "EAGLE3":
        deeper = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}}
        path = copied(drafts, kind, tmp_path, **deeper)
        with pytest.raises(CheckpointError, match=r"draft/config\.json: .*29"):
            source(kind, path)
    for other in WRITERS.keys() - {kind}:
        with pytest.raises((CheckpointError, ConfigError), match=str(drafts / other)):
            source(kind, drafts / other)


@KINDS
@pytest.mark.parametrize("is_sharded", [False, True], ids=["one_file", "shards"])
def test_a_truncated_file(kind: str, is_sharded: bool, drafts: Path, tmp_path: Path) -> None:
    path = copied(drafts, kind, tmp_path)
    file = path / "model.safetensors"
    if is_sharded:
        tensors = load_file(file)
        file.unlink()
        last = sorted(tensors)[-1]
        parts = [{k: v for k, v in tensors.items() if k != last}, {last: tensors[last]}]
        names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
        for name, part in zip(names, parts, strict=True):
            save_file(part, path / name)
        weight_map = {k: name for name, part in zip(names, parts, strict=True) for k in part}
        index = path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
        source(kind, path)
        file = path / names[1]
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=rf"draft/{file.name}: cannot be read"):
        source(kind, path)


@pytest.mark.parametrize(("value", "said"), [(320, "from 0 to 359"), (-41, "from -1 to 159")])
def test_a_map_that_leaves_the_vocabulary(
    value: int, said: str, drafts: Path, tmp_path: Path
) -> None:
    path = copied(drafts, "EAGLE3", tmp_path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors["d2t"][:] = 0
    tensors["d2t"][40 if value < 0 else 39] = value
    save_file({name: x for name, x in tensors.items() if name != "t2d"}, file)
    found = source("EAGLE3", path)
    shared = {"embed": {"table": np.zeros((320, 32), FLOAT)}}
    with pytest.raises(CheckpointError, match=rf"draft/model\.safetensors: d2t gives .*{said}"):
        found.read(shared, FLOAT, on_host)
