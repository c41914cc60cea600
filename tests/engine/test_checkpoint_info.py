"""`jspec info`: its report on tiny checkpoints, and on directories that are not checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jspec.cli.info import size_of
from jspec.cli.main import main
from jspec.engine.weights.checkpoint_info import describe
from jspec.engine.weights.loading import BUNDLED
from jspec.errors import ConfigError
from jspec.models.files.convert import Format, convert
from jspec.models.heads.eagle1 import save_eagle1
from jspec.models.heads.head_params import head_params
from jspec.models.heads.mtp import save_mtp, written_config
from jspec.models.placement import init_params
from jspec.spec.head_spec import eagle1_spec
from tests.speculative.mtp_checkpoints import CONFIGS, write_checkpoint
from tests.support.tiny_models import TinyPair, write_tiny_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return write_tiny_pair(tmp_path_factory.mktemp("pair"))


def copy_of(source: Path, to: Path) -> Path:
    to.mkdir()
    for each in source.iterdir():
        (to / each.name).write_bytes(each.read_bytes())
    return to


def test_a_target_is_told_by_its_headers(
    pair: TinyPair, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["info", str(pair.target_path), "--dtype", "float32", "--memory", "1MB", "--json"]
    assert main(words) == 0
    said = json.loads(capsys.readouterr().out)
    spec = pair.target_config
    assert (said["kind"], said["architecture"]) == ("target", "LlamaForCausalLM")
    assert said["shapes"]["num_layers"] == spec.num_layers
    # K and V of 2 heads of 8 numbers in each layer, 4 bytes each.
    assert said["cache_bytes_per_token"] == 2 * 2 * 8 * pair.target_config.num_layers * 4
    assert said["stored_bytes"] == {"F32": said["weight_bytes"]}
    assert said["parameters"] * 4 == said["weight_bytes"]
    left = 900_000 - said["weight_bytes"]
    assert said["memory"]["tokens"] == left // said["cache_bytes_per_token"]
    assert said["memory"]["fits"]
    assert said["problems"] == []
    assert said["serve"] == f"jspec serve --model-path {pair.target_path}"
    assert main([*words[:2], "--memory", "0.05MB"]) == 0
    assert "does not fit" in capsys.readouterr().out


def test_a_tied_head_is_counted_once_and_held_twice(
    pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tied = copy_of(pair.target_path, tmp_path / "tied")
    tensors = load_file(tied / "model.safetensors")
    of_head = tensors.pop("lm_head.weight").size
    save_file(tensors, tied / "model.safetensors")
    config = json.loads((tied / "config.json").read_text())
    (tied / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    info, own = describe(tied), describe(pair.target_path)
    assert info.problems == ()
    assert info.parameters == own.parameters - of_head == sum(x.size for x in tensors.values())
    assert info.weight_bytes == own.weight_bytes
    assert main(["info", str(tied)]) == 0
    assert "MiB, including a copy of the tied table for lm_head" in capsys.readouterr().out


def test_a_draft_is_read_beside_its_target(pair: TinyPair) -> None:
    alone = describe(pair.draft_path)
    assert (alone.kind, alone.algorithm, alone.problems) == ("draft", "EAGLE3", ())
    info = describe(pair.draft_path, target=pair.target_path)
    assert info.shapes["aux_layer_ids"] == list(pair.draft_config.aux_layer_ids)
    assert info.problems == ()
    assert info.cache_bytes_per_token == 2 * 2 * 8 * 2
    assert "--speculative-algorithm EAGLE3" in info.serve


def test_a_device_holds_a_draft_and_its_target(pair: TinyPair) -> None:
    alone = describe(pair.target_path, memory=10**6)
    both = describe(pair.draft_path, target=pair.target_path, memory=10**6)
    draft = describe(pair.draft_path, target=pair.target_path)
    assert alone.memory is not None
    assert both.memory is not None
    assert both.memory.weight_bytes == alone.weight_bytes + draft.weight_bytes
    of_token = alone.cache_bytes_per_token + draft.cache_bytes_per_token
    assert both.memory.tokens == (900_000 - both.memory.weight_bytes) // of_token
    with pytest.raises(ConfigError, match="a draft, which is served with its target; expected --t"):
        describe(pair.draft_path, memory=10**6)


def test_a_model_of_70b_fits_one_h200_in_fp8(tmp_path: Path) -> None:
    """By its config.json alone."""
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 128256, **sizes, **heads}
    (tmp_path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    memory = 141 * 10**9
    served = [
        describe(tmp_path, memory=memory),
        describe(tmp_path, memory=memory, quantization="fp8"),
        describe(tmp_path, memory=memory, quantization="fp8", kv_cache_dtype="fp8_e4m3"),
    ]
    assert [each.memory is not None and each.memory.fits for each in served] == [False, True, True]
    _, weights, both = (each.memory for each in served)
    assert weights is not None
    assert both is not None
    assert 0.51 < served[1].weight_bytes / served[0].weight_bytes < 0.53
    assert weights.tokens > 160_000
    assert both.tokens // 2 == weights.tokens


def test_a_recurrent_target_has_a_state_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One delta net: four states of 8 x 6 in float32, three inputs of 56 channels in bfloat16."""
    write_checkpoint(tmp_path, CONFIGS["qwen3_5"])
    info = describe(tmp_path, memory=10**6)
    assert info.problems == ()
    assert info.state_bytes_per_row == 4 * 8 * 6 * 4 + 3 * 56 * 2
    assert info.cache_bytes_per_token == 2 * 2 * 8 * 2
    assert info.serve.endswith(" --speculative-algorithm NEXTN")
    assert info.memory is not None
    assert info.memory.cache_bytes == 900_000 - info.weight_bytes - info.state_bytes_per_row
    assert main(["info", str(tmp_path)]) == 0
    assert "recurrent states: 1,104 bytes a row" in capsys.readouterr().out


def test_layers_that_are_fewer_than_the_default_steps_are_served(tmp_path: Path) -> None:
    """Each step runs one of them."""
    target, head = BUNDLED / "target", copy_of(BUNDLED / "draft_mtp", tmp_path / "head")
    assert "--speculative-num-steps" not in describe(head, target=target).serve
    tensors = load_file(head / "model.safetensors")
    kept = {name: x for name, x in tensors.items() if ".layers.2." not in name}
    assert len(kept) < len(tensors)
    save_file(kept, head / "model.safetensors")
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 2}))
    info = describe(head, target=target)
    assert info.problems == ()
    assert info.shapes["num_hidden_layers"] == 2
    assert info.serve.endswith(" --speculative-num-steps 2")


def test_heads_that_name_a_language_model_are_told_by_their_tensors(
    pair: TinyPair, tmp_path: Path
) -> None:
    """EAGLE's own published heads do so, and trained layers for multi-token prediction."""
    for head in (copy_of(pair.draft_path, tmp_path / "eagle3"), tmp_path / "eagle"):
        if head.name == "eagle":
            eagle1 = eagle1_spec(layer=pair.draft_config.layer, draft_vocab_size=320)
            params = init_params(head_params(eagle1), seed=0)
            save_eagle1(head, eagle1, params, dtype=np.float32)
        config = json.loads((head / "config.json").read_text())
        named = config | {"architectures": ["LlamaForCausalLM"]}
        (head / "config.json").write_text(json.dumps(named))
    for name, chained in (("mtp", False), ("chain", True)):
        layer = pair.target_config.layers[0]
        layers = written_config(pair.target_config, layer, num_layers=3, chained=chained)
        own = init_params(head_params(layers), seed=0)
        save_mtp(tmp_path / name, layers, own, target=pair.target_config, dtype=np.float32)
    kinds = {"eagle3": "EAGLE3", "eagle": "EAGLE", "mtp": "NEXTN", "chain": "NEXTN"}
    for name, algorithm in kinds.items():
        alone = describe(tmp_path / name)
        assert (alone.kind, alone.algorithm, alone.problems) == ("draft", algorithm, ()), name
        info = describe(tmp_path / name, target=pair.target_path)
        assert (info.algorithm, info.problems) == (algorithm, ()), name
        assert f"--speculative-algorithm {algorithm} --speculative-draft-model-path" in info.serve
    itself = describe(pair.target_path, target=pair.target_path)
    assert (itself.algorithm, itself.problems) == ("STANDALONE", ())


def test_what_was_converted_to_orbax_is_the_same(pair: TinyPair, tmp_path: Path) -> None:
    convert(pair.target_path, tmp_path / "orbax", Format("orbax"))
    info, other = describe(tmp_path / "orbax"), describe(pair.target_path)
    assert info.problems == ()
    assert (info.parameters, info.stored_bytes) == (other.parameters, other.stored_bytes)


def test_what_is_wrong_is_said_in_the_loaders_words(
    pair: TinyPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty, nowhere, head = tmp_path / "empty", str(tmp_path / "nowhere"), str(pair.draft_path)
    empty.mkdir()
    is_empty = f"is '{empty}', a directory without config.json; expected one with a checkpoint in"
    for words, message in (
        (
            [nowhere],
            f"DIR is '{nowhere}'; expected a directory with a checkpoint in Hugging Face's",
        ),
        ([str(empty)], f"DIR {is_empty} Hugging Face's layout (config.json,"),
        ([head, "--target", str(empty)], f"--target {is_empty}"),
    ):
        assert main(["info", *words]) == 2
        assert message in capsys.readouterr().err
    bare = copy_of(pair.target_path, tmp_path / "bare")
    (bare / "model.safetensors").unlink()
    (problem,) = describe(bare).problems
    assert "no weights; expected model.safetensors" in problem
    cut = copy_of(pair.target_path, tmp_path / "cut")
    whole = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert main(["info", str(cut)]) == 1
    said = capsys.readouterr().out
    assert f"problem: {cut / 'model.safetensors'}" in said
    assert "jspec serve" not in said
    assert describe(bare).serve == ""
    other = copy_of(pair.target_path, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    for name, value, message in (
        ("intermediate_size", 48, "has shape"),
        ("architectures", ["DeepseekV4ForCausalLM"], "known and not built"),
    ):
        (other / "config.json").write_text(json.dumps({**config, name: value}))
        info = describe(other)
        assert any(message in problem for problem in info.problems)
        assert info.serve == ""


def test_sizes_of_devices() -> None:
    assert size_of("--memory", "80GB") == 80 * 10**9
    assert size_of("--memory", "24 GiB") == 24 * 2**30
    assert size_of("--memory", "1.5k") == 1500
    for text in ("much", "0GB", "-1GB", ""):
        with pytest.raises(ConfigError, match="expected a size such as 80GB"):
            size_of("--memory", text)
