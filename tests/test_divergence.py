"""The rate of first divergence: what is counted, what is compared, and what a failure costs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.divergence import (
    Configuration,
    Measurement,
    Settings,
    configurations,
    decode_all,
    engine_arguments,
    full_products,
    main,
    only,
)
from benchmarks.divergence_counts import Row, compare, first_divergence, table
from benchmarks.divergence_pairs import (
    WIDENING,
    Pair,
    backend_problem,
    bundled_pair,
    dummy_pair,
    make_pair,
    random_pair,
    random_prompts,
    wide_config,
    wide_pair,
    wide_tensor,
    with_heads,
)
from benchmarks.workloads import WORKLOADS
from jspec import Engine
from jspec.layers.rope import angles_of
from jspec.models.files.checkpoint import load_model_spec
from jspec.models.heads.eagle3_config import load_eagle3_config
from jspec.pallas_kernels.kv_write.reference import rotate
from jspec.spec.model_spec import ModelSpec

SETTINGS = Settings(
    num_prompts=3, prompt_tokens=12, new_tokens=8, num_rows=1, num_alone=1, seconds=600
)


@pytest.mark.parametrize(
    ("ids", "reference", "expected"),
    [
        ((5, 6, 9), (5, 6, 7), 2),
        ((9, 6, 7), (5, 6, 7), 0),
        ((5, 6, 7), (5, 6, 7), None),
        ((5, 6), (5, 6, 7), 2),
        ((5, 6, 7), (5, 6), 2),
        ((), (), None),
    ],
)
def test_the_first_divergence(
    ids: tuple[int, ...], reference: tuple[int, ...], expected: int | None
) -> None:
    assert first_divergence(ids, reference) == expected


def test_a_prompt_counts_up_to_its_first_divergence() -> None:
    """4 tokens without one, and 2 up to one; the tokens after it, right or wrong, are not."""
    same = (1, 2, 3, 4)
    row = compare([same, (1, 9, 3, 9)], [same, same])
    assert (row["num_prompts"], row["num_diverged"], row["tokens_compared"]) == (2, 1, 6)
    assert row["per_1000_tokens"] == pytest.approx(1000 / 6, abs=1e-3)
    low, high = row["interval_95"]
    assert low < row["per_1000_tokens"] < high
    assert (row["first_positions"], row["median_first_position"]) == ([1], 1)


def test_none_in_n_is_not_a_rate_of_zero() -> None:
    row = compare([(1, 2, 3)] * 10, [(1, 2, 3)] * 10)
    assert (row["num_diverged"], row["tokens_compared"], row["per_1000_tokens"]) == (0, 30, 0)
    assert row["interval_95"] == [0, 100]
    assert row["median_first_position"] is None


def test_as_many_texts_as_references() -> None:
    with pytest.raises(ValueError, match="longer"):
        compare([(1,)], [(1,), (2,)])


def test_plain_comes_first_in_every_group() -> None:
    labels = [c.label for c in configurations([("bfloat16", "xla"), ("float32", "xla")])]
    assert labels == [
        f"{dtype}/xla/{mode}"
        for dtype in ("bfloat16", "float32")
        for mode in ("plain", "chain", "tree")
    ]


def test_only_some_engines(capsys: pytest.CaptureFixture[str]) -> None:
    todo = configurations([("bfloat16", "xla"), ("float32", "xla")])
    assert only(todo, ["*"]) == todo
    chosen = only(todo, ["float32/*/tree", "bfloat16/xla/plain"])
    assert [c.label for c in chosen] == ["bfloat16/xla/plain", "float32/xla/tree"]
    with pytest.raises(SystemExit, match="2"):
        main(["--only", "int8/*"])
    said = capsys.readouterr().err
    assert "'int8/*' is none of bfloat16/xla/plain, bfloat16/xla/chain" in said


def test_no_prompt_fills_a_page() -> None:
    """So none of them is ever found in the prefix cache, whichever run comes second."""
    pair = Pair(name="", arguments={}, draft_arguments={}, layers=())
    for configuration in configurations([("bfloat16", "xla")]):
        arguments = engine_arguments(pair, configuration, Settings())
        assert arguments["page_size"] > Settings().prompt_tokens


def test_full_products_are_for_float32_and_end() -> None:
    def precision() -> str | None:
        name: str | None = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
        return name

    before = precision()
    jax.config.update("jax_default_matmul_precision", "default")
    try:
        with full_products("bfloat16"):
            assert precision() == "default"
        with full_products("float32"):
            assert precision() == "highest"
        assert precision() == "default"
    finally:
        jax.config.update("jax_default_matmul_precision", before)


# The pairs.


def attended(x: np.ndarray, weights: dict[str, np.ndarray], config: ModelSpec) -> np.ndarray:
    """Causal attention of the tokens x[T, E], from Hugging Face's projections; float32."""
    heads = config.one_layer.attention
    q, k, v = (
        jnp.asarray(x @ weights[f"{name}_proj.weight"].T).reshape(len(x), -1, heads.head_dim)
        for name in "qkv"
    )
    angles = angles_of(7 + jnp.arange(len(x)), head_dim=heads.head_dim, rope=heads.rope)
    q, k = rotate(q, *angles), rotate(k, *angles)
    k, v = (jnp.repeat(y, heads.num_heads // heads.num_kv_heads, axis=1) for y in (k, v))
    scores = jnp.einsum("qhd,khd->hqk", q, k) * heads.head_dim**-0.5
    scores = jnp.where(jnp.tri(len(x), dtype=bool), scores, -jnp.inf)
    out = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), v)
    return np.asarray(out.reshape(len(x), -1) @ weights["o_proj.weight"].T)


def test_wide_heads_are_the_same_function() -> None:
    config = WORKLOADS["tiny"].target
    own = config.one_layer.attention
    widths = {"q": own.num_heads, "k": own.num_kv_heads, "v": own.num_kv_heads}
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.5, shape).astype(np.float32)

    weights = {
        f"{name}_proj.weight": draw(heads * own.head_dim, config.hidden_size)
        for name, heads in widths.items()
    }
    weights["o_proj.weight"] = draw(config.hidden_size, own.num_heads * own.head_dim)
    wide = {
        name: wide_tensor(name, weight, head_dim=own.head_dim) for name, weight in weights.items()
    }
    assert wide["q_proj.weight"].shape[0] == WIDENING * weights["q_proj.weight"].shape[0]
    x = draw(9, config.hidden_size)
    expected = attended(x, weights, config)
    np.testing.assert_allclose(attended(x, wide, wide_config(config)), expected, atol=2e-5)
    turned_wrongly = with_heads(wide_config(config), rope=own.rope)
    assert np.abs(attended(x, wide, turned_wrongly) - expected).max() > 0.01


def test_which_pairs_the_hopper_kernels_serve(tmp_path: Path) -> None:
    """Heads of 64 and 128; what is written is what the loaders read."""
    assert {spec.one_layer.attention.head_dim for spec in bundled_pair(tmp_path).layers} == {32}
    for make, head_dim in ((wide_pair, 128), (random_pair, 64)):
        pair = make(tmp_path / make.__name__)
        target = load_model_spec(Path(pair.arguments["model_path"]))
        path = Path(pair.draft_arguments["speculative_draft_model_path"])
        assert pair.layers == (target, load_eagle3_config(path, target=target).layer)
        assert {spec.one_layer.attention.head_dim for spec in pair.layers} == {head_dim}


def test_a_backend_that_does_not_serve() -> None:
    target = WORKLOADS["tiny"].target
    pair = Pair(name="", arguments={}, draft_arguments={}, layers=(target,))
    assert backend_problem(pair, {"attention_backend": "xla"}) is None
    assert "cpu" in (backend_problem(pair, {"attention_backend": "pallas"}) or "")


# Whole runs.


@pytest.fixture
def tiny(tmp_path: Path) -> Pair:
    pair = dummy_pair(WORKLOADS["tiny"], tmp_path / "pair")
    return replace(pair, prompts=random_prompts(pair, (3, 12)))


def measurement_of(pair: Pair, tmp_path: Path, **more: float) -> Measurement:
    engine = {"compilation_cache_dir": "", "chunked_prefill_size": 32}
    settings = replace(SETTINGS, engine=engine, **more)  # type: ignore[arg-type]
    return Measurement(pair, settings, tmp_path / "deep" / "divergence.json")


def test_a_failure_costs_one_configuration(tiny: Pair, tmp_path: Path) -> None:
    """The next one is still looked at, and the file says what became of both."""
    measurement = measurement_of(tiny, tmp_path)
    todo = (
        Configuration(dtype="float12", backend="xla", mode="plain"),
        Configuration(dtype="float32", backend="pallas", mode="plain"),
    )
    measurement.run(todo)
    engines = measurement.engines
    assert "float12" in engines["float12/xla/plain"]["error"]
    assert "on cpu devices" in engines["float32/pallas/plain"]["skipped"]
    assert not measurement.is_sound
    stored = json.loads((tmp_path / "deep" / "divergence.json").read_text(encoding="utf-8"))
    assert (stored["engines"], stored["rows"]) == (engines, [])
    assert (stored["head_dim"], stored["settings"]["new_tokens"]) == (8, 8)


@pytest.mark.slow
def test_in_float32_a_chain_says_what_plain_decoding_says(tiny: Pair, tmp_path: Path) -> None:
    """After a configuration that fails; the file holds all that was measured."""
    measurement = measurement_of(tiny, tmp_path)
    failing = Configuration(dtype="float12", backend="xla", mode="plain")
    measurement.run((failing, *configurations([("float32", "xla")])[:2]))
    engines, rows = measurement.engines, measurement.rows
    assert engines["float32/xla/chain"]["acceptance_length"]["temperature 1"] >= 1
    assert [(row["what"], row["temperature"]) for row in rows] == [("chain", 0.0), ("chain", 1.0)]
    for row in rows:
        assert (row["num_diverged"], row["tokens_compared"]) == (0, 3 * 8)
        assert row["is_control"]
    assert not measurement.is_sound
    stored = json.loads((tmp_path / "deep" / "divergence.json").read_text(encoding="utf-8"))
    assert (stored["engines"], stored["rows"]) == (engines, rows)


@pytest.mark.slow
def test_plain_decoding_against_itself(tiny: Pair, tmp_path: Path) -> None:
    """The same call again, and one prompt alone: each against the first call's texts."""
    measurement = measurement_of(tiny, tmp_path)
    measurement.run(configurations([("bfloat16", "xla")])[:1])
    rows = [(row["what"], row["temperature"], row["num_prompts"]) for row in measurement.rows]
    runs = [("plain again", 3), ("plain, alone", 1)]
    assert rows == [(what, t, n) for t in (0.0, 1.0) for what, n in runs]
    assert measurement.is_sound
    assert not any(row["is_control"] for row in measurement.rows)


def test_out_of_time(tiny: Pair, tmp_path: Path) -> None:
    measurement = measurement_of(tiny, tmp_path, seconds=-1)
    measurement.run(configurations([("bfloat16", "xla")]))
    assert set(map(str, measurement.engines.values())) == {"{'skipped': 'out of time'}"}
    assert measurement.rows == []


def test_a_control_that_diverges_is_no_sound_result(tiny: Pair, tmp_path: Path) -> None:
    row: Row = {"is_control": False, "num_diverged": 3}
    measurement = measurement_of(tiny, tmp_path)
    measurement.rows.append(row)
    assert measurement.is_sound
    measurement.rows.append({**row, "is_control": True})
    assert not measurement.is_sound


def test_the_printed_table() -> None:
    row: Row = {
        "dtype": "bfloat16",
        "backend": "pallas",
        "what": "chain",
        "against": "plain",
        "temperature": 1.0,
    }
    counted = compare([(1, 9)], [(1, 2)])
    lines = table([{**row, **counted}, {**row, "not_compared": "no texts of plain"}]).splitlines()
    assert lines[2:] == [
        "| bfloat16 | pallas | chain | plain | 1 | 1 of 1 | 2 | 1 | 500.00 [500.00, 500.00] |",
        "| bfloat16 | pallas | chain | plain | 1 | no texts of plain | | | |",
    ]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_the_wide_pair_writes_what_the_bundled_one_writes(tmp_path: Path) -> None:
    settings = replace(SETTINGS, new_tokens=24)
    texts = []
    for name in ("bundled", "wide"):
        pair = make_pair(name, tmp_path, num_prompts=3, prompt_tokens=12)
        configuration = Configuration(dtype="float32", backend="xla", mode="chain")
        with Engine(**engine_arguments(pair, configuration, settings)) as engine:
            texts.append([decode_all(engine, pair.prompts, t, settings) for t in (0.0, 1.0)])
    assert texts[0] == texts[1]  # acceptance lengths too: the draft is what it was
    assert texts[1][0][1] > 1.5


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_a_quick_run(tmp_path: Path) -> None:
    few = ["--only", "float32/*", "bfloat16/xla/plain"]
    assert main(["--quick", "--out", str(tmp_path / "quick.json"), *few]) == 0
    rows = json.loads((tmp_path / "quick.json").read_text(encoding="utf-8"))["rows"]
    controls = [row["what"] for row in rows if row["is_control"]]
    assert controls == ["chain", "chain", "tree", "tree"]
