"""Block drafters from their files: what is served, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jspec import Engine
from jspec.config.engine_args import EngineArgs
from jspec.engine.weights.checkpoint_info import describe
from jspec.engine.weights.loading import LoadedModels, load_models, resolve_paths
from jspec.errors import JspecError
from jspec.models.files.checkpoint import save_target
from jspec.models.heads.block_config import load_block_config
from tests.speculative import own_blocks
from tests.speculative.engines import TARGET, make_request, mesh_of, plain_ids, tiny_params
from tests.support.tiny_models import tiny_tokenizer


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and block drafters for it."""
    path = tmp_path_factory.mktemp("blocks")
    save_target(path / "target", TARGET, tiny_params()[0], dtype=np.float32)
    tiny_tokenizer().save(str(path / "target" / "tokenizer.json"))
    for name in own_blocks.SPECS:
        own_blocks.write(path / name, name)
    return path


@pytest.fixture(scope="module")
def hot_ids(pair: Path) -> Path:
    """A token map: every second id."""
    np.save(pair / "map.npy", np.arange(0, TARGET.vocab_size, 2))
    return pair / "map.npy"


def load(pair: Path, draft: Path, **arguments: Any) -> LoadedModels:
    args = EngineArgs(
        model_path=str(pair / "target"),
        speculative_draft_model_path=str(draft),
        **{"dtype": "float32", "speculative_algorithm": "DFLASH", "speculative_num_steps": 5}
        | arguments,
    )
    return load_models(args, resolve_paths(args), mesh=mesh_of(1))


@pytest.mark.parametrize("name", own_blocks.SPECS)
def test_a_checkpoint_is_read_as_it_was_written(name: str, pair: Path) -> None:
    models = load(pair, pair / name)
    spec = own_blocks.SPECS[name]
    assert models.drafter.model.spec == spec
    assert models.target.aux_layer_ids == spec.aux_layer_ids
    own = {**own_blocks.params_of(name), "draft_ids": np.arange(TARGET.vocab_size)}
    jax.tree.map(np.testing.assert_array_equal, models.params["draft"], own)
    for each in ("embed", "lm_head"):
        assert models.params["draft"][each] is models.params["target"][each]
    info = describe(pair / name, target=pair / "target")
    assert (info.algorithm, info.problems) == ("DFLASH", ())
    assert info.serve.endswith(f"--speculative-num-steps {spec.most_steps}")


def test_dummy_weights_have_the_shapes_of_a_checkpoint_s(pair: Path, tmp_path: Path) -> None:
    """A draft vocabulary needs an lm_head of its own."""
    shapes = [
        jax.tree.map(np.shape, load(pair, pair / "dspark", **how).params)
        for how in ({}, {"load_format": "dummy"})
    ]
    assert shapes[0] == shapes[1]
    config = json.loads((pair / "dspark" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"draft_vocab_size": 160}))
    models = load(pair, tmp_path, load_format="dummy")
    assert models.params["draft"]["lm_head"]["kernel"].shape == (TARGET.hidden_size, 160)
    assert models.params["draft"]["markov"]["after"].shape == (12, 160)


@pytest.mark.parametrize("name", own_blocks.SPECS)
def test_a_map_of_frequent_ids_takes_columns(name: str, pair: Path, hot_ids: Path) -> None:
    """Columns of the target's head and of the Markov head's logits; codebooks stay whole."""
    ids, whole = np.load(hot_ids), load(pair, pair / name).params
    models = load(pair, pair / name, speculative_token_map=str(hot_ids))
    assert models.drafter.model.spec.draft_vocab_size == len(ids)
    expected = {**whole["draft"], "draft_ids": ids}
    expected["lm_head"] = {"kernel": whole["target"]["lm_head"]["kernel"][:, ids]}
    if "markov" in expected:
        after = expected["markov"]["after"][:, ids]
        expected["markov"] = {**expected["markov"], "after": after}
    jax.tree.map(np.testing.assert_array_equal, models.params["draft"], expected)
    how = {"speculative_token_map": str(hot_ids), "load_format": "dummy"}
    dummy = load(pair, pair / name, **how).params
    assert jax.tree.map(np.shape, dummy) == jax.tree.map(np.shape, models.params)


def test_a_parallel_head_is_told_by_its_config() -> None:
    info = describe(Path(__file__).parents[1] / "golden" / "blocks" / "peagle")
    assert (info.kind, info.algorithm, info.problems) == ("draft", "EAGLE3", ())


# What is refused: the change of config.json, and what the error says.
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"architectures": ["DominoModel"]}, "'DominoModel'; expected one of DFlash"),
    "sinks": ({"attention_sink_bias": True}, "attention_sink_bias is True; expected no such key"),
    "values": ({"attention_value_scale": 0.7}, "attention_value_scale is 0.7; expected no such"),
    "norms": ({"use_gemma_norm": True}, "use_gemma_norm is True; expected no such key"),
    "rope": ({"rope_dim": 4}, "rope_dim is 4; expected no such key: RoPE rotates whole heads"),
    "nested": ({"dflash_config": {"fc_layernorm": True}}, "fc_layernorm is True; expected no such"),
    "twice": ({"mask_token_id": 3}, r"\['mask_token_id'\] differ in dflash_config and at the top"),
    "mask": ({"dflash_config": {"mask_token_id": 320}}, "mask_token_id is 320; expected an id"),
    "ids": ({"dflash_config": {"target_layer_ids": [3, 1]}}, r"ids are \(4, 2\).*ascending|of a"),
    "layers": ({"num_target_layers": 9}, "num_target_layers is 9; expected the target's 2"),
    "block": ({"block_size": 5}, "speculative_num_steps is 5; expected at most 4, by the draft's"),
    "causal": ({"is_causal": True}, "is_causal is True; expected false or no such key in a head"),
    "of_dspark": (
        {"markov_rank": 8},
        "markov_rank is 8; expected no such key in a checkpoint of df",
    ),
    "of_dflash2": (
        {"dflash_config": {"selector_rank": 8}},
        "selector_rank is 8; expected no such k",
    ),
    "markov": (
        {"architectures": ["Qwen3DSparkModel"], "markov_rank": 8, "markov_head_type": "gru"},
        "markov_head_type is 'gru'; expected 'vanilla' or 'gated' or 'rnn'",
    ),
    "relative": ({"dflash_config": {"projector_type": "domino"}}, "projector_type is 'domino'"),
    "convolution": (
        {
            "architectures": ["DFlash2DraftModel"],
            **{"conv_kernel_size": 2, "conv_group_size": 5, "selector_rank": 8},
            "selector_top_k": 8,
        },
        "groups of 5 and 2 taps; expected a divisor of hidden_size 32",
    ),
    "scaled": ({"output_multiplier": 0.5}, "output_multiplier is 0.5; expected no such key"),
    "windows": ({"use_sliding_window": False}, "use_sliding_window is False; expected True"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_not_computed_is_refused_by_name(fault: str, pair: Path, tmp_path: Path) -> None:
    changes, message = FAULTS[fault]
    draft = tmp_path / "draft"
    draft.mkdir()
    for file in (pair / "dflash").iterdir():
        (draft / file.name).write_bytes(file.read_bytes())
    config = json.loads((draft / "config.json").read_text())
    nested = config["dflash_config"] | changes.get("dflash_config", {})
    (draft / "config.json").write_text(json.dumps(config | changes | {"dflash_config": nested}))
    with pytest.raises(JspecError, match=message):
        load(pair, draft)


def test_a_tree_is_no_wider_than_the_selector_s_candidates(pair: Path) -> None:
    with pytest.raises(JspecError, match="topk is 17; expected at most 16, the draft's selector"):
        load(pair, pair / "dflash2", speculative_eagle_topk=17, speculative_num_draft_tokens=18)


def test_layouts_count_layers_and_windows_differently(pair: Path, tmp_path: Path) -> None:
    """Reads the same model in speculators' format, where a window counts from the root."""
    config = json.loads((pair / "dflash" / "config.json").read_text())
    plain = load_block_config(pair / "dflash", target=TARGET)
    of_head = {
        "speculators_model_type": "dflash",
        "aux_hidden_state_layer_ids": [i + 1 for i in config["dflash_config"]["target_layer_ids"]],
        "mask_token_id": config["dflash_config"].pop("mask_token_id"),
        "block_size": config.pop("block_size"),
        "transformer_layer_config": config,
    }
    del config["dflash_config"]
    (tmp_path / "config.json").write_text(json.dumps(of_head))
    found = load_block_config(tmp_path, target=TARGET)
    assert found.aux_layer_ids == plain.aux_layer_ids
    windows = [own.attention.window for own in found.layer.layers]
    assert windows == [own_blocks.WINDOW + 1, None]
    assert (found.windows_from_root, plain.windows_from_root) == (True, False)


@pytest.mark.slow
def test_it_is_served_from_its_files_and_changes_no_text(pair: Path, hot_ids: Path) -> None:
    """With a token map, which changes drafts alone."""
    requests = [
        make_request(
            i, prompt_len=9, seed=i, temperature=float(i), max_new_tokens=40, ignore_eos=True
        )
        for i in range(2)
    ]
    with Engine(
        model_path=str(pair / "target"),
        speculative_algorithm="DSPARK",
        speculative_draft_model_path=str(pair / "dspark"),
        speculative_token_map=str(hot_ids),
        speculative_num_draft_tokens=6,
        dtype="float32",
        max_running_requests=1,
        context_length=128,
        max_total_tokens=512,
        disable_logprobs=True,
    ) as engine:
        for request in requests:
            sampling = {
                "max_new_tokens": request.sampling.max_new_tokens,
                "temperature": request.sampling.temperature,
                "sampling_seed": request.seed,
                "ignore_eos": True,
            }
            out = engine.generate(input_ids=list(request.prompt_ids), sampling_params=sampling)
            assert tuple(out["output_ids"]) == plain_ids(request)
        info = engine.get_server_info()
    assert (info["speculative_algorithm"], info["speculative_num_steps"]) == ("DSPARK", 5)
