"""The table of flags, its argparse parser, TOML files, and the docs."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from jspec.cli.flag_table import FLAGS, Flag, FlagClass, FlagKind
from jspec.cli.flags import FlagParser, Settings, add_flags, markdown_table, parse_flags
from jspec.config.engine_args import EngineArgs
from jspec.config.peer_flags import OF_VLLM, REMOVED
from jspec.errors import ConfigError
from jspec.server.server_args import ServerArgs

DOCS = Path(__file__).resolve().parents[2] / "docs" / "flags.md"
SAMPLES = {FlagKind.INT: "1", FlagKind.FLOAT: "0.5", FlagKind.TEXT: "x", FlagKind.MANY: "x"}


NGRAM = ("--speculative-algorithm", "NGRAM")


def parse(*argv: str) -> Settings:
    parser = FlagParser(prog="test", allow_abbrev=False)
    add_flags(parser)
    return parse_flags(parser, argv)[1]


def words(flag: Flag) -> list[str]:
    return [flag.name] if flag.kind is FlagKind.SWITCH else [flag.name, SAMPLES[flag.kind]]


def test_no_name_appears_twice() -> None:
    names = [name for flag in FLAGS for name in flag.names]
    assert len(names) == len(set(names))
    assert all(name.startswith("--") and name == name.lower() for name in names)


def test_every_argument_has_exactly_one_primary_row() -> None:
    rows = sorted(flag.argument for flag in FLAGS if flag.argument and flag.is_primary)
    assert rows == sorted((*EngineArgs.names(), *ServerArgs.names()))


def test_engine_and_server_arguments_do_not_overlap() -> None:
    assert not set(EngineArgs.names()) & set(ServerArgs.names())


def test_rows_of_the_three_classes() -> None:
    for flag in FLAGS:
        assert bool(flag.argument) == (flag.flag_class is FlagClass.IMPLEMENTED), flag.name
        assert not flag.neutral or flag.flag_class is FlagClass.REFUSED, flag.name
        assert flag.text, flag.name


@pytest.mark.parametrize(
    "flag", [f for f in FLAGS if f.flag_class is FlagClass.ACCEPTED], ids=lambda f: f.name
)
def test_an_accepted_flag_warns_once_and_sets_nothing(flag: Flag) -> None:
    settings = parse(*words(flag))
    assert settings.warnings == (f"{flag.name} has no effect: {flag.text}",)
    assert settings.engine == {}
    assert settings.server == ServerArgs()


@pytest.mark.parametrize(
    "flag", [f for f in FLAGS if f.flag_class is FlagClass.REFUSED], ids=lambda f: f.name
)
def test_a_refused_flag_says_why_and_its_neutral_values_pass(flag: Flag) -> None:
    value = [] if flag.kind is FlagKind.SWITCH else ["7"]
    with pytest.raises(ConfigError) as caught:
        parse(flag.name, *value)
    assert flag.name in str(caught.value)
    assert flag.text in str(caught.value)
    for neutral in flag.neutral:
        assert parse(flag.name, neutral).warnings == ()


def test_accept_thresholds_must_be_one() -> None:
    assert parse("--speculative-accept-threshold-single", "1.0").engine == {}
    with pytest.raises(ConfigError, match="equals the target's own token"):
        parse("--speculative-accept-threshold-single", "0.95")
    with pytest.raises(ConfigError, match="p/q rule with shared noise would bias"):
        parse("--speculative-use-rejection-sampling")


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (("--model", "m"), "model_path", "m"),
        (("--tp", "2"), "tp_size", 2),
        (("--tensor-parallel-size", "2"), "tp_size", 2),
        (("--disable-overlap-schedule",), "overlap_depth", 0),
        (("--overlap-depth", "2"), "overlap_depth", 2),
        (("--compile-at-start", "all"), "compile_at_start", "all"),
        (("--disable-radix-cache",), "disable_radix_cache", True),
        (("--disable-cascade-attn",), "disable_cascade_attn", True),
        (("--dtype", "half"), "dtype", "float16"),
        (("--mem-fraction-static", "0.5"), "mem_fraction_static", 0.5),
        (("--disable-speculative-draft-noise",), "speculative_draft_noise", False),
        (("--speculative-num-steps=5",), "speculative_num_steps", 5),
        (
            ("--speculative-ngram-max-match-window-size", "7"),
            "speculative_ngram_max_match_window_size",
            7,
        ),
    ],
)
def test_engine_flags(argv: tuple[str, ...], name: str, value: object) -> None:
    assert getattr(parse(*argv).engine_args, name) == value


@pytest.mark.parametrize(
    ("argv", "shape"),
    [
        ((), (3, 1, 4)),
        (("--speculative-num-draft-tokens", "8"), (7, 1, 8)),
        (("--speculative-num-steps", "5"), (5, 1, 6)),
        (("--speculative-eagle-topk", "2"), (3, 2, 7)),
        (("--speculative-num-steps", "4", "--speculative-eagle-topk", "4"), (4, 4, 16)),
    ],
)
def test_lookup_needs_no_draft_and_fills_in_the_shape(
    argv: tuple[str, ...], shape: tuple[int, int, int]
) -> None:
    args = parse("--model", "m", "--speculative-algorithm", "NGRAM", *argv).engine_args
    spec = args.speculative
    assert (spec.num_steps, spec.topk, spec.num_draft_tokens) == shape


def test_server_flags() -> None:
    server = parse(
        "--host", "::1", "--port", "0", "--api-key", "k", "--stream-interval", "4"
    ).server
    assert (server.host, server.port, server.api_key, server.stream_interval) == ("::1", 0, "k", 4)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--spec-num-steps", "3"), "did you mean '--speculative-num-steps'"),
        (("--hostt=x",), "did you mean '--host'"),
        (("--model-pat", "x"), "did you mean '--model-path'"),
        (("--max-queued", "8"), "did you mean '--max-queued-requests'"),
        (("word",), "unexpected argument 'word'"),
        (("--max-num-seqs", "4"), "unknown flag '--max-num-seqs': write --max-running-requests"),
        (("--gpu-memory-utilization=0.9",), "write --mem-fraction-static"),
        (("--num-speculative-tokens", "3"), "write --speculative-num-steps"),
        (("--speculative-config", "{}"), "write --speculative-algorithm and its flags"),
        (("--max-model-len", "4096"), "write --context-length"),
        (("--enforce-eager",), "leave it out: every step is a compiled program"),
        (
            ("--speculative-total-nodes-per-row", "8"),
            "unknown flag '--speculative-total-nodes-per-row': removed: it brought about 1% more",
        ),
        (("--stop", "x"), "unknown flag '--stop': stop is set by each request; test --help"),
        (("--port", "high"), "--port is 'high'; expected an integer"),
        (("--tp", "two"), "--tp-size is 'two'; expected an integer"),
        (("--port",), "--port has no value; expected one after it"),
        (("--port", "70000"), "port is 70000; expected an integer from 0 to 65535"),
        (("--host", ""), "host is empty"),
        (("--log-level", "loud"), "log_level is 'loud'; expected one of debug"),
        (("--log-interval", "nan"), "log_interval is nan"),
        (("--stream-interval", "0"), "stream_interval is 0"),
        (("--dtype", "int4"), "dtype is 'int4'; expected one of auto"),
        (("--speculative-algorithm", "MEDUSA"), "speculative_algorithm is 'MEDUSA'"),
        (("--speculative-algorithm", "NONE", "--speculative-num-steps", "3"), "expected it unset"),
        (("--model", "m", "--speculative-algorithm", "EAGLE3"), "speculative_draft_model_path"),
        (
            (*NGRAM, "--model", "m", "--speculative-draft-model-path", "d"),
            "speculative_draft_model_path is 'd', but speculative_algorithm is NGRAM",
        ),
        (
            (*NGRAM, "--speculative-ngram-min-match-window-size", "13"),
            "speculative_ngram_min_match_window_size is 13; expected an integer from 1 to 12",
        ),
        (
            (*NGRAM, "--speculative-ngram-max-match-window-size", "65"),
            "speculative_ngram_max_match_window_size is 65; expected an integer from 1 to 64",
        ),
        (
            (*NGRAM, "--speculative-ngram-external-corpus-max-tokens", "1"),
            "speculative_ngram_external_corpus_max_tokens is 1; expected an integer from 2",
        ),
        (
            ("--speculative-ngram-external-corpus-path", "c"),
            "speculative_ngram_external_corpus_path is 'c', but speculative_algorithm is EAGLE3",
        ),
        (
            (*NGRAM, "--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "8"),
            "3/2/8: the tree has S*K = 6 candidates, so speculative_num_draft_tokens must be from",
        ),
        (("--page-size", "0"), "page_size is 0"),
        (("--verify-fraction", "0.01"), "--verify-fraction '0.01' is refused: a server does not"),
        (("--config", "missing.toml"), "config file 'missing.toml': No such file"),
    ],
)
def test_what_cannot_be_served_is_an_error(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(*argv)
    assert message in str(caught.value)


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("port = 1234\npage_size = 64\nmem_fraction_static = 1\n", encoding="utf-8")
    settings = parse("--config", str(path), "--port", "99")
    assert settings.server.port == 99
    assert settings.engine == {"page_size": 64, "mem_fraction_static": 1.0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pagesize = 1", "unknown key 'pagesize'; did you mean 'page_size'?"),
        ("verify_fraction = 0.1", "unknown key 'verify_fraction'; leave it out: a server does not"),
        ('device = "gpu"', "leave it out: JAX chooses"),
        ("[server]\nport = 1", "unknown key 'server'"),
        ("speculative_total_nodes_per_row = 8", ": removed: it brought about 1% more"),
        ("port = ", "is not TOML"),
        ('port = "80"', "port is '80'; expected an integer"),
        ("port = true", "port is True; expected an integer"),
        ("model_path = 3", "model_path is 3; expected text"),
        ('mem_fraction_static = "all"', "mem_fraction_static is 'all'; expected a number"),
        ("speculative_draft_noise = 1", "speculative_draft_noise is 1; expected true or false"),
        ("max_running_requests = -1", "max_running_requests is -1"),
    ],
)
def test_a_bad_file_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        parse("--config", str(path))
    assert message in str(caught.value)


def test_a_file_that_is_not_text_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"a.toml' is not UTF-8: byte 0xff at offset 0"):
        parse("--config", str(path))


def test_the_help_shows_implemented_flags_only(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for flag in FLAGS:
        is_shown = f"{flag.name} " in text or f"{flag.name}\n" in text or f"{flag.name}," in text
        assert is_shown == (flag.flag_class is FlagClass.IMPLEMENTED), flag.name


def test_defaults_in_the_docs_are_the_defaults() -> None:
    texts = {flag.argument: flag.text for flag in FLAGS if flag.argument and flag.is_primary}
    for field in (*fields(EngineArgs), *fields(ServerArgs)):
        if isinstance(field.default, int | float) and not isinstance(field.default, bool):
            if field.name == "tp_size":
                continue  # one device needs no words
            assert f"({field.default:g})" in texts[field.name] or (
                f"({field.default})" in texts[field.name]
            ), field.name


def test_rounds_a_step_are_an_engine_argument() -> None:
    assert parse("--num-continuous-decode-steps", "4").engine == {"num_continuous_decode_steps": 4}
    with pytest.raises(ConfigError, match="num_continuous_decode_steps is 0; expected an integer"):
        parse("--num-continuous-decode-steps", "0")
    for value in (None, True, 1.5, "2", -1):
        with pytest.raises(ConfigError, match=r"num_continuous_decode_steps is .* from 1 to 16"):
            EngineArgs.from_mapping({"num_continuous_decode_steps": value})


def test_the_docs_hold_the_table() -> None:
    message = "docs/flags.md is out of date: replace its tables by the output of `jspec flags`"
    assert markdown_table().strip() in DOCS.read_text(encoding="utf-8"), message


def test_what_is_said_instead_of_another_servers_or_a_removed_flag_is_there() -> None:
    known = {
        name for flag in FLAGS if flag.flag_class is FlagClass.IMPLEMENTED for name in flag.names
    }
    for theirs, ours in {**OF_VLLM, **REMOVED}.items():
        assert theirs not in {name for flag in FLAGS for name in flag.names}
        for word in re.findall(r"--[a-z-]+", ours):
            assert word in known | {"--help"}, f"{theirs}: {word}"


def test_names_of_peers_that_are_jspec_s_own_are_taken() -> None:
    settings = parse("--tensor-parallel-size", "2", "--served-model-name", "x", "--model", "m")
    assert (settings.engine["tp_size"], settings.server.served_model_name) == (2, "x")


@pytest.mark.parametrize(
    ("flag", "value", "used"),
    [
        ("--grammar-backend", "xgrammar", "llguidance"),
        ("--grammar-backend", "outlines", "llguidance"),
        ("--attention-backend", "flashinfer", "auto"),
    ],
)
def test_another_servers_value_is_replaced_with_a_warning(
    tmp_path: Path, flag: str, value: str, used: str
) -> None:
    argument = flag.removeprefix("--").replace("-", "_")
    file = tmp_path / "jspec.toml"
    file.write_text(f'{argument} = "{value}"\n')
    for settings in (parse(flag, value), parse("--config", str(file))):
        assert settings.engine[argument] == used
        assert settings.warnings == (f"{flag} {value} is another server's: {used} is used",)
    assert parse(flag, used).warnings == ()
