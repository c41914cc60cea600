"""Bad configurations: an immediate error with file and value."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from jspec.errors import CheckpointError
from jspec.files.json_files import MAX_CONFIG_BYTES, check_regular, read_object, read_text
from jspec.models.files.checkpoint import load_model_spec

FAMILIES = Path(__file__).parents[1] / "golden" / "families"
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@pytest.mark.timeout(60)  # a pipe that is opened waits for ever
@pytest.mark.parametrize("kind", ["pipe", "directory", "socket", "link to a pipe"])
def test_only_a_regular_file_is_opened(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    if kind == "directory":
        path.mkdir()
    elif kind == "socket":
        here = os.open(".", os.O_RDONLY)
        os.chdir(tmp_path)  # the name of a socket must be short
        try:
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(path.name)
        finally:
            os.fchdir(here)
            os.close(here)
    else:
        os.mkfifo(tmp_path / "pipe" if kind.startswith("link") else path)
        if kind.startswith("link"):
            path.symlink_to("pipe")
    with pytest.raises(CheckpointError, match=r"json: cannot be read: it is not a regular file"):
        load_model_spec(tmp_path)


def test_a_link_to_a_file_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "blob").write_text(json.dumps(LLAMA))
    (tmp_path / "config.json").symlink_to("blob")
    assert load_model_spec(tmp_path).hidden_size == 16


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 200_000, "cannot be read as JSON: it is nested too deeply"),
        ('{"a":' * 200_000, "cannot be read as JSON: it is nested too deeply"),
        (
            '{"vocab_size": ' + "9" * 5000 + "}",
            "cannot be read as JSON: it has an integer of 5000 digits; expected at most 4300",
        ),
        ('{"a": 1}' + " " * MAX_CONFIG_BYTES, f"is larger than {MAX_CONFIG_BYTES} bytes"),
        ("", "is not JSON: Expecting value"),
        ("3", "holds a int; expected a JSON object"),
    ],
    ids=["brackets", "objects", "digits", "huge", "empty", "number"],
)
def test_text_that_is_no_configuration(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=rf"config\.json: {message}"):
        read_object(path)


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b'{"a": "\xff"}')
    for read in (read_object, read_text):  # the second also reads chat templates
        with pytest.raises(
            CheckpointError, match=r"config\.json: is not UTF-8: byte 0xff at .* 7$"
        ):
            read(path)
    with pytest.raises(CheckpointError, match=r"cannot be read: .*null"):
        check_regular(Path("a\0b"))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("num_hidden_layers", [0, -1, 10**9, 1025, 1.0, "2", True, [1], 10**400]),
        ("hidden_size", [0, -16, 2**21, "16"]),
        ("num_attention_heads", [0, -2, "2", 10**9]),
        ("num_key_value_heads", [0, -1, 1.5, 10**9]),
        ("head_dim", [0, -8, 10**9]),
        ("vocab_size", [0, 2**25]),
        ("intermediate_size", [0, 10**12]),
        ("max_position_embeddings", [0, 2**31]),
        ("rms_norm_eps", ["NaN", "Infinity", "-Infinity", -1e-5, 0.0, True, "1e-5", 1e-300]),
        ("rope_theta", ["NaN", "Infinity", -1.0, 0, False, "1e4", 1e300, 10**400]),
        ("bos_token_id", ["<s>", 1.5, True, ["<s>"], 10**12]),
        ("eos_token_id", [[[2]], {"id": 2}, 10**400]),
        ("layer_types", [3, "full_attention", [["full_attention"]], [1, "a"], {"a": 1}]),
        ("tie_word_embeddings", [1, "true", "NaN"]),
        ("attention_bias", [0, "x"]),
    ],
)
def test_a_field_that_cannot_be_is_named_with_its_value(
    name: str, values: list[Any], tmp_path: Path
) -> None:
    for value in values:
        text = json.dumps(LLAMA | {name: value})
        for constant in ("NaN", "-Infinity", "Infinity"):
            text = text.replace(f'"{constant}"', constant)
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError) as caught:
            load_model_spec(tmp_path)
        assert f"config.json: {name} is " in str(caught.value), value
        assert len(str(caught.value)) < 600


COUNTS = [
    ("qwen3_moe", "num_experts", 4097),
    ("qwen3_moe", "num_experts_per_tok", 4097),
    ("qwen3_moe_fused", "num_experts", 10**9),
    ("gpt_oss", "num_local_experts", 10**9),
    ("mimo_v2", "n_routed_experts", 10**9),
    ("mimo_v2", "moe_intermediate_size", 10**9),
    ("mimo_v2", "swa_num_key_value_heads", 10**9),
    ("mimo_v2", "v_head_dim", 10**9),
    ("glm4_moe", "n_routed_experts", 10**9),
    ("glm4_moe", "n_shared_experts", 10**9),
    ("step3p5", "moe_num_experts", 10**9),
    ("step3p5", "moe_top_k", 10**9),
    ("step3p5", "num_attention_groups", 10**9),
    ("step3p5", "share_expert_dim", 10**9),
]


@pytest.mark.parametrize(("family", "name", "value"), COUNTS)
def test_a_count_that_would_take_for_ever_is_refused(
    family: str, name: str, value: int, tmp_path: Path
) -> None:
    config = json.loads((FAMILIES / family / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {name: value}))
    with pytest.raises(CheckpointError, match=rf"json: {name} is {value}; expected an integer of "):
        load_model_spec(tmp_path)


def test_so_are_more_experts_in_all_layers_than_any_model_has(tmp_path: Path) -> None:
    """Each bound alone allows them, but naming them all would take minutes."""
    config = json.loads((FAMILIES / "mimo_v2" / "config.json").read_text())
    config |= {"num_hidden_layers": 100, "n_routed_experts": 4096}
    config |= dict.fromkeys(("hybrid_layer_pattern", "moe_layer_freq", "layer_types"))
    config |= {"mlp_layer_types": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"num_hidden_layers is 100 .* 405504 experts; expec"):
        load_model_spec(tmp_path)
