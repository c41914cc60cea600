"""Layers for multi-token prediction in the published layouts: read from a target's checkpoint, and
drafting for it.

The checkpoints are small and random, and written here under the published names; the reference is
`mtp_reference`, in float64.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jspec.config.engine_args import EngineArgs
from jspec.config.limits import Algorithm
from jspec.errors import CheckpointError, ConfigError, JspecError
from jspec.files.json_files import Fields
from jspec.layers.linear import Shard
from jspec.messages.request import Request
from jspec.models.decoder import Decoder
from jspec.models.files.checkpoint import load_model_spec, load_target, save_target
from jspec.models.files.stored.tensors import stored_tensors
from jspec.models.heads.feature_head import FeatureHead
from jspec.models.heads.head_params import head_params
from jspec.models.placement import init_params
from jspec.models.registry import DRAFTS, family_named, table_of
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.ops import Ops
from jspec.spec.layers.feed_forward import DenseSpec, Gate, MoESpec
from jspec.spec.rope import RopeConfig
from tests.models.dense_forward import dense_forward
from tests.models.head_laws import check_head
from tests.models.mimo_v2_reference import MimoV2Reference
from tests.models.mtp_reference import MtpReference, RecurrentReference
from tests.models.random_params import assert_same
from tests.models.test_families import attend_of
from tests.speculative.engines import Compiled, dial_for, make_request, serve
from tests.speculative.mtp_checkpoints import (
    CONFIGS,
    GLM_4_5_AIR,
    MIMO_7B,
    MIMO_V2_FLASH,
    STEP3P5_FLASH,
    STEPS,
    TINY,
    TINY_GLM,
    drawn,
    engine_of,
    layers_of,
    load,
    write_checkpoint,
)
from tests.speculative.mtp_published import DEEPSEEK, PUBLISHED, QWEN, Published
from tests.support.caches import empty_pools
from tests.support.tiny_models import tiny_tokenizer

LLAMA = {
    **{name: value for name, value in TINY.items() if name != "max_window_layers"},
    "architectures": ["LlamaForCausalLM"],
    "rms_norm_eps": 1e-5,
}
CHAIN, TREE = (STEPS, 1, STEPS + 1), (STEPS, 2, 2 * STEPS + 1)


@pytest.fixture(scope="module", params=CONFIGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    write_checkpoint(path, CONFIGS[request.param])
    return path


def some_requests() -> list[Request]:
    """Return greedy and sampled requests; of one token, of several chunks, and one between."""
    return [
        make_request(
            i, prompt_len=n, seed=900 + i, temperature=i % 2, max_new_tokens=40, ignore_eos=True
        )
        for i, n in enumerate((29, 1, 6))
    ]


def check_identity(plain: Compiled, compiled: Compiled) -> None:
    requests = some_requests()
    expected = [serve(plain, [request], overlap_depth=0).ids[0] for request in requests]
    served = serve(compiled, requests, chunk_size=8, dial=dial_for(requests, expected))
    assert list(served.ids) == expected
    assert served.num_leaked_pages == 0
    counts = {count for accepted in served.accepted for count in accepted}
    assert counts == set(range(STEPS + 1))


@pytest.mark.slow
@pytest.mark.exhaustive  # every drafter on two shards: tests/speculative/test_engine_laws.py
def test_two_shards_write_the_text_of_plain_decoding(checkpoint: Path) -> None:
    """With a tree; test_drafter_laws.py and test_multi_layer.py have chains on one shard."""
    plain = engine_of(load(checkpoint), (0, 1, 1))
    check_identity(plain, engine_of(load(checkpoint, shards=2), TREE))


@pytest.mark.law("every case")
@pytest.mark.exhaustive_cases(  # as others' do
    *("mimo]", "glm4_moe]", "deepseek_v32]", "glm_moe_dsa]")
)
def test_a_target_brings_its_draft(checkpoint: Path) -> None:
    """Every layer has its own weights, and all that it shares are the target's arrays; plain
    decoding and dummy weights read the same file.
    """
    models = load(checkpoint)
    head, own = layers_of(models.drafter), models.params["draft"]
    assert sorted(own["layers"]) == list(range(head.spec.num_layers))
    assert own["embed"]["table"] is models.params["target"]["embed"]["table"]
    stored = load_file(checkpoint / "model.safetensors")
    table = tuple(spec for spec in head.table if spec.layouts)
    for name, value in stored_tensors(table, own, dtype=np.float32).items():
        np.testing.assert_array_equal(value, stored[name])
    kernels = [np.asarray(layer["fuse"]["kernel"]) for layer in own["layers"].values()]
    assert len({kernel.tobytes() for kernel in kernels}) == head.spec.num_layers
    plain = load(checkpoint, speculative_algorithm="NONE")
    assert plain.params["draft"] == {}
    dummy = load(checkpoint, load_format="dummy")
    assert jax.tree.map(jnp.shape, dummy.params) == jax.tree.map(jnp.shape, models.params)


def test_a_draft_may_lie_elsewhere_and_keeps_the_name_it_was_given(checkpoint: Path) -> None:
    """The checkpoint decides the algorithm; the requested name is shown."""
    elsewhere = load(checkpoint, speculative_draft_model_path=str(checkpoint))
    again = load(checkpoint, speculative_algorithm="EAGLE", enable_multi_layer_eagle=True)
    assert_same(
        jax.tree.map(np.asarray, elsewhere.params["draft"]),
        jax.tree.map(np.asarray, again.params["draft"]),
    )
    is_recurrent = not layers_of(again.drafter).spec.per_level
    in_force = Algorithm.NEXTN if is_recurrent else Algorithm.MULTI_LAYER_EAGLE
    for models, given in ((elsewhere, "NEXTN"), (again, "EAGLE")):
        assert models.config.values()["speculative_algorithm"] == given
        assert models.config.algorithm is models.config.speculative.algorithm is in_force
        assert models.drafter.algorithm == in_force


@pytest.mark.slow_cases(
    *("glm4_moe]", "mimo_v2]", "step3p5]", "qwen3_5]", "deepseek_v32]", "glm_moe_dsa]")
)
def test_layers_compute_what_is_published(checkpoint: Path, published: Published) -> None:
    """Compare with float64: one layer by every law of a head, several each over its own rows."""
    models = load(checkpoint)
    drafter, draft = models.drafter, models.params["draft"]
    head = dataclasses.replace(layers_of(drafter), shard=Shard())
    reference = check_published(checkpoint, head, published)
    if not head.spec.per_level:
        size, width = head.spec.layer.vocab_size, head.spec.layer.hidden_size
        recurrence = RecurrentReference.of(reference)
        check_head(head, draft, recurrence, vocab_size=size, width=width)
        return
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 320, 16).tolist()
    hidden = rng.normal(size=(15, 32))
    outs = reference.outputs(tokens, hidden, num_layers=STEPS)
    groups, sizes = drafter.cache_groups, {"num_pages": 5, "page_size": 4, "shards": 1}
    pools = empty_pools(groups, dtype=jnp.float32, ops=Ops(), **sizes)
    given = jnp.asarray(hidden, jnp.float32)
    for layer, expected in enumerate(outs):
        count = len(expected)
        rows = AttentionMetadata(
            page_table=jnp.asarray([[3, 1, 4, 2]], jnp.int32),
            prefix_lens=jnp.zeros(1, jnp.int32),
            cu_q_lens=jnp.asarray([0, count], jnp.int32),
            q_positions=jnp.arange(count, dtype=jnp.int32),
        )
        out, _ = head.forward(
            draft,
            jnp.asarray(tokens[layer + 1 :][:count], jnp.int32),
            given[:count],
            pools,
            rows,
            queries_per_row=None,
            level=layer,
        )
        np.testing.assert_allclose(out, expected, rtol=0, atol=1e-4)
        logits = head.logits(draft, out, level=layer)
        np.testing.assert_allclose(logits, reference.logits(layer, expected), rtol=0, atol=2e-4)
        if head.spec.chained:
            given = out


@pytest.fixture(scope="module")
def published(checkpoint: Path) -> Published:
    return PUBLISHED[load_model_spec(checkpoint).family]


def check_published(
    path: Path, head: FeatureHead, published: Published, *, target: Path | None = None
) -> MtpReference:
    """Compare with the published layers in float64; the head's declaration must match."""
    fields = json.loads((path / "config.json").read_text())
    spec = head.spec
    declared = {
        "recurrent": not spec.per_level,
        "reads_normed": not spec.aux_layer_ids,
        "feeds_normed": spec.feeds_back_normed,
        "own_heads": spec.own_head,
        **{name: getattr(spec, name) for name in ("chained", "hidden_first", "zeroes_first")},
    }
    assert declared == {name: getattr(published, name) for name in declared}
    num_layers = head.spec.num_layers
    stored = {
        name for own in head.table for part in own.layouts[:1] for x in part for name in x.names
    }
    assert stored == published.tensor_names(fields, num_layers)
    return published.reference(path, fields, num_layers=num_layers, target=target)


def without_layers(path: Path) -> None:
    stored = load_file(path / "model.safetensors")
    kept = {name: value for name, value in stored.items() if ".mtp" not in name}
    save_file(kept, path / "model.safetensors")


def with_fields(**fields: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | fields))

    return change


@pytest.mark.parametrize(
    ("spoil", "arguments", "kind", "message"),
    [
        (without_layers, {}, CheckpointError, r"model\.mtp_layers\.0\.input_proj\.weight"),
        (
            with_fields(num_nextn_predict_layers=0),
            {},
            ConfigError,
            "num_nextn_predict_layers is 0; expected 1: this family drafts with one layer",
        ),
        (
            with_fields(num_nextn_predict_layers=2),
            {},
            ConfigError,
            "num_nextn_predict_layers is 2; expected 1: this family drafts with one layer",
        ),
        (
            with_fields(architectures=["Qwen2ForCausalLM"]),
            {"load_format": "dummy"},
            ConfigError,
            "family is 'qwen2', whose checkpoints bring no layers .* a family that does .*mimo",
        ),
        (
            None,
            {"speculative_draft_rope_theta": 5.0},
            ConfigError,
            "speculative_draft_rope_theta is 5.0, but the layers for multi-token",
        ),
        (
            None,
            {"speculative_algorithm": "EAGLE3", "enable_multi_layer_eagle": True},
            ConfigError,
            "enable_multi_layer_eagle is True, but speculative_algorithm is 'EAGLE3'",
        ),
    ],
)
def test_a_draft_that_is_not_there_is_refused(
    tmp_path: Path, spoil: Any, arguments: dict[str, Any], kind: type[JspecError], message: str
) -> None:
    write_checkpoint(tmp_path, CONFIGS["mimo"])
    if spoil is not None:
        spoil(tmp_path)
    with pytest.raises(kind, match=message):
        load(tmp_path, **arguments)


def test_step3p5_flash_as_published(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(STEP3P5_FLASH))
    spec = load_model_spec(tmp_path)
    full, sliding = spec.layers[0].attention, spec.layers[1].attention
    assert (full.num_heads, sliding.num_heads, full.num_kv_heads) == (64, 96, 8)
    assert (full.window, sliding.window) == (None, 512)
    assert (full.rotary_dim, sliding.rotary_dim) == (64, None)
    assert (full.rope.theta, full.rope.factor, sliding.rope) == (5e6, 2.0, RopeConfig(theta=1e4))
    assert spec.layers[2].ffn == DenseSpec(inner=11264)
    last = spec.layers[44].ffn
    assert isinstance(last, MoESpec)
    assert (last.gate, last.shared) == (Gate.SILU_WITHIN_7, DenseSpec(inner=1280, limit=16.0))
    assert spec.layers[3].ffn == dataclasses.replace(
        last, gate=Gate.SILU, shared=DenseSpec(inner=1280)
    )
    family = family_named("step3p5")
    assert family.mtp is not None
    layers = family.mtp.read(Fields(path, STEP3P5_FLASH), spec)
    assert layers.layer.layers == (spec.layers[1],) * 3
    assert (layers.chained, layers.own_head, layers.aux_layer_ids) == (True, True, (45,))
    shapes = {own.path: own.shape for own in table_of(spec)}
    assert shapes["layers", 1, "attention", "gate", "kernel"] == (4096, 96)
    assert shapes["layers", 3, "moe", "experts", "down"] == (288, 1280, 4096)
    path.write_text(json.dumps(family.to_json(spec)))
    assert load_model_spec(tmp_path) == spec


def test_glm_4_5_as_published(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GLM_4_5_AIR))
    spec = load_model_spec(tmp_path)
    attention = spec.layers[0].attention
    assert (attention.rotary_dim, attention.qkv_bias, attention.qk_norm) == (64, True, False)
    assert spec.layers[0].ffn == DenseSpec(inner=10944)
    ffn = spec.layers[1].ffn
    assert isinstance(ffn, MoESpec)
    assert ffn.shared == DenseSpec(inner=1408)
    family = family_named("glm4_moe")
    assert family.mtp is not None
    layer = family.mtp.read(Fields(path, GLM_4_5_AIR), spec)
    assert layer.layer.layers == spec.layers[1:2]
    assert (layer.per_level, layer.aux_layer_ids, layer.feeds_back_normed) == (False, (), True)
    assert family.mtp.names(spec).of_layer(0) == "model.layers.46."
    path.write_text(json.dumps(family.to_json(spec)))
    assert load_model_spec(tmp_path) == spec
    path.write_text(json.dumps(GLM_4_5_AIR | {"n_group": 8, "topk_group": 2}))
    grouped = load_model_spec(tmp_path).layers[1].ffn
    assert grouped == dataclasses.replace(ffn, num_groups=8, top_groups=2)


def write_layer_alone(path: Path, architecture: str, **changes: Any) -> None:
    """Write a dense layer without a target, with the copies of the target's that such exports
    have."""
    config = GLM_4_5_AIR | TINY_GLM | {"n_routed_experts": None, "use_qk_norm": False}
    config |= {"architectures": [architecture], "num_hidden_layers": 1}
    config |= {"partial_rotary_factor": 0.5 if architecture == QWEN else None, **changes}
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    target = family_named("llama").read(Fields(path, LLAMA))
    mtp = DRAFTS[architecture]
    layers = mtp.read(Fields(path / "config.json", config), target)
    table = tuple(own for own in head_params(layers, mtp.names(target)) if own.layouts)
    tensors = stored_tensors(table, drawn(table, seed=5), dtype=np.float32)
    copy = np.zeros((320, 32), np.float32)
    for name in ("embed_tokens", "shared_head.head"):
        tensors[f"model.layers.0.{name}.weight"] = copy
    save_file(tensors, path / "model.safetensors")


def write_pair(path: Path, architecture: str, **changes: Any) -> tuple[Path, Path]:
    """Write a Llama, and a separate layer."""
    target, alone = path / "target", path / "alone"
    spec = family_named("llama").read(Fields(path, LLAMA))
    save_target(target, spec, init_params(table_of(spec), seed=1), dtype=np.float32)
    tiny_tokenizer().save(str(target / "tokenizer.json"))
    write_layer_alone(alone, architecture, **changes)
    return target, alone


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [(DEEPSEEK, {}), (QWEN, {}), (DEEPSEEK, {"chain_hidden_post_norm": False})],
)
def test_a_layer_of_its_own_drafts_for_a_dense_target(
    architecture: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """It fulfils every law of a head, also if it was trained to read itself before its final
    norm."""
    target, alone = write_pair(tmp_path, architecture, **changes)
    published = PUBLISHED[architecture]
    if changes:
        published = dataclasses.replace(published, feeds_normed=False)
    models = load(target, speculative_draft_model_path=str(alone))
    assert models.config.algorithm is Algorithm.NEXTN
    head = dataclasses.replace(layers_of(models.drafter), shard=Shard())
    reference = check_published(alone, head, published, target=target)
    check_head(
        head,
        models.params["draft"],
        RecurrentReference.of(reference),
        vocab_size=320,
        width=32,
    )
    stored = load_file(alone / "model.safetensors")
    table = tuple(own for own in head.table if own.layouts)
    for name, value in stored_tensors(table, models.params["draft"], dtype=np.float32).items():
        np.testing.assert_allclose(value, stored[name], rtol=0, atol=1e-6)
    with pytest.raises(ConfigError, match="family is 'llama', whose checkpoints bring no layers"):
        load(target)


@pytest.mark.slow
@pytest.mark.exhaustive  # no draft changes a text: tests/speculative/test_engine_laws.py
def test_a_layer_of_its_own_changes_no_text(tmp_path: Path) -> None:
    """A chain on one shard, of the layout whose layer has gates and separate norms."""
    target, alone = write_pair(tmp_path, QWEN)
    models = load(target, speculative_draft_model_path=str(alone))
    check_identity(engine_of(models, (0, 1, 1)), engine_of(models, CHAIN))


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        (DEEPSEEK, {"kv_lora_rank": 8, "index_topk": 9}, "index_topk is 9; expected no such key"),
        (DEEPSEEK, {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2; expected 1"),
        (QWEN, {"output_gate_type": "sigmoid"}, "output_gate_type is 'sigmoid'; expected 'swish'"),
        (QWEN, {"attn_output_gate": False}, "attn_output_gate is False; expected True"),
        (QWEN, {"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers is 2; expected 1"),
    ],
)
def test_what_of_a_layer_of_its_own_is_not_served_is_refused(
    architecture: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        write_layer_alone(tmp_path, architecture, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swiglu_limits": [5.0] * 48}, "swiglu_limits has 5.0 for layer 3; expected 0 or 7.0"),
        ({"use_head_wise_attn_gate": False}, "use_head_wise_attn_gate is False; expected True"),
        ({"sink": True}, "sink is True; expected False"),
        ({"layer_types": ["full_attention"] * 9}, "layer_types has 9 entries; expected one for"),
        ({"layer_types": ["linear_attention"] * 48}, "layer_types has 'linear_attention'"),
        ({"yarn_only_types": None}, "rope_scaling is .* without yarn_only_types; expected the"),
        ({"moe_layers_enum": "all"}, "moe_layers_enum is 'all'; expected numbers of layers"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method .awq.; expected .fp8."),
    ],
)
def test_variants_of_step3p5_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(STEP3P5_FLASH | changes))
    with pytest.raises(JspecError, match=message):
        load_model_spec(tmp_path)


def test_experts_among_step3p5_s_own_layers_are_refused() -> None:
    family = family_named("step3p5")
    assert family.mtp is not None
    fields = Fields(Path("config.json"), STEP3P5_FLASH | {"moe_layers_enum": "3,46"})
    with pytest.raises(ConfigError, match="moe_layers_enum has 46, a layer for multi-token"):
        family.mtp.read(fields, family.read(fields))


def test_more_steps_than_layers_are_refused(mimo_v2: Path) -> None:
    """This is for a family that runs no layer twice."""
    message = (
        r"speculative_num_steps is 4; expected at most 3, the layers that .*config\.json has for it"
        r": one a step, none of which this family \(mimo_v2\) runs again"
    )
    with pytest.raises(ConfigError, match=message):
        load(mimo_v2, speculative_num_steps=4)


def test_the_bundled_target_has_layers_in_a_directory_of_their_own() -> None:
    assert EngineArgs(speculative_algorithm="NEXTN").bundled_draft == "draft_mtp"
    named = EngineArgs(speculative_algorithm="NEXTN", model_path="elsewhere")
    assert named.bundled_draft is None


def test_mimo_7b_is_qwen2_with_one_layer_more(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIMO_7B))
    spec = load_model_spec(tmp_path)
    as_qwen2 = MIMO_7B | {"architectures": ["Qwen2ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(as_qwen2))
    assert dataclasses.replace(spec, family="qwen2") == load_model_spec(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(family_named("mimo").to_json(spec)))
    assert load_model_spec(tmp_path) == spec
    names = [name for own in table_of(spec) for part in own.layouts for name in part[0].names]
    assert not any(".mtp" in name for name in names)


@pytest.fixture(scope="module")
def mimo_v2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mimo_v2_target")
    write_checkpoint(path, CONFIGS["mimo_v2"])
    return path


def test_mimo_v2_computes_what_is_published(mimo_v2: Path) -> None:
    """Over three windows, against float64: logits, and the residual that its layers read."""
    spec = load_model_spec(mimo_v2)
    params = load_target(mimo_v2, spec, dtype=np.float32)
    tokens = np.random.default_rng(1).integers(0, 320, 22).tolist()
    tensors = load_file(mimo_v2 / "model.safetensors")
    reference = MimoV2Reference(config=CONFIGS["mimo_v2"], tensors=tensors)
    residual, logits = reference.run(tokens)
    found, _, aux = dense_forward(
        spec, params, tokens, aux_layer_ids=(spec.num_layers,), attend_of=attend_of
    )
    np.testing.assert_allclose(aux, residual, rtol=0, atol=1e-4)
    np.testing.assert_allclose(found, logits, rtol=0, atol=2e-4)
    decoder = Decoder(spec, Ops())
    pools = empty_pools(
        decoder.cache_groups, num_pages=7, page_size=4, shards=1, dtype=jnp.float32, ops=Ops()
    )
    rows = AttentionMetadata(
        page_table=jnp.asarray([[3, 1, 6, 2, 4, 5]], jnp.int32),
        prefix_lens=jnp.zeros(1, jnp.int32),
        cu_q_lens=jnp.asarray([0, len(tokens)], jnp.int32),
        q_positions=jnp.arange(len(tokens), dtype=jnp.int32),
    )
    on_device = jax.tree.map(jnp.asarray, params)
    forward = jax.jit(functools.partial(decoder.forward, queries_per_row=None))
    hidden, _, _ = forward(on_device, jnp.asarray(tokens, jnp.int32), pools, rows)
    np.testing.assert_allclose(decoder.logits(on_device, hidden), logits, rtol=0, atol=2e-4)


def test_mimo_v2_flash_as_published(tmp_path: Path) -> None:
    """Both spellings of its config, and its own layers."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MIMO_V2_FLASH))
    spec = load_model_spec(tmp_path)
    first, second = spec.layers[:2]
    assert (first.attention.window, second.attention.window) == (None, 129)
    assert (first.attention.num_kv_heads, second.attention.num_kv_heads) == (4, 8)
    assert (first.attention.rope.theta, second.attention.rope.theta) == (5e6, 1e4)
    assert (first.attention.sinks, second.attention.sinks) == (False, True)
    assert {layer.attention.rotary_dim for layer in spec.layers} == {64}
    assert first.ffn == DenseSpec(inner=16384)
    assert isinstance(second.ffn, MoESpec)
    full = [i for i, layer in enumerate(spec.layers) if layer.attention.window is None]
    assert full == [0, 5, 11, 17, 23, 29, 35, 41, 47]
    family = family_named("mimo_v2")
    assert family.mtp is not None
    layers = family.mtp.read(Fields(path, MIMO_V2_FLASH), spec).layer.layers
    assert layers == (dataclasses.replace(second, ffn=DenseSpec(inner=16384)),) * 3
    shapes = {own.path: own.shape for own in table_of(spec)}
    assert shapes["layers", 0, "attention", "qkv", "kernel"] == (4096, 64 * 192 + 4 * (192 + 128))
    assert shapes["layers", 1, "attention", "out", "kernel"] == (64 * 128, 4096)
    path.write_text(json.dumps(family.to_json(spec)))
    assert load_model_spec(tmp_path) == spec
    of_transformers = {
        name: value
        for name, value in MIMO_V2_FLASH.items()
        if not name.startswith(("swa_", "hybrid", "moe_layer", "sliding", "partial", "rope_"))
    }
    rope = {"rope_type": "default", "partial_rotary_factor": 0.334}
    of_transformers |= {
        "sliding_window": 129,
        "layer_types": ["full_attention" if i in full else "sliding_attention" for i in range(48)],
        "mlp_layer_types": ["dense", *["sparse"] * 47],
        "rope_parameters": {
            "full_attention": rope | {"rope_theta": 5e6},
            "sliding_attention": rope | {"rope_theta": 1e4},
        },
    }
    path.write_text(json.dumps(of_transformers))
    assert load_model_spec(tmp_path) == spec


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_group": 8}, "n_group is 8; expected 1: groups of experts"),
        ({"n_shared_experts": 1}, "n_shared_experts is 1; expected 0"),
        ({"swa_head_dim": 128}, "swa_head_dim is 128; expected 192"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; expected 'sigmoid'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method .awq.; expected .fp8."),
        ({"v_head_dim": 256, "swa_v_head_dim": 256}, "v_head_dim is 256; expected 1 to 192"),
        ({"moe_layer_freq": [0, 1]}, "the layers' MLPs are .*; expected 48 of 'dense' or"),
    ],
)
def test_variants_of_mimo_v2_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIMO_V2_FLASH | changes))
    with pytest.raises(JspecError, match=message):
        load_model_spec(tmp_path)


def test_a_recurrent_layer_drafts_the_ids_of_a_map_alone(tmp_path: Path) -> None:
    """Layers that draft one level each have no map of ids, and are refused one."""
    write_checkpoint(tmp_path, CONFIGS["mimo"])
    ids, file = np.arange(3, 320, 7), tmp_path / "hot.npy"
    np.save(file, ids)
    models = load(tmp_path, speculative_token_map=str(file), speculative_eagle_topk=2)
    draft, target = models.params["draft"], models.params["target"]
    np.testing.assert_array_equal(draft["draft_ids"], ids)
    kernel = np.asarray(target["lm_head"]["kernel"])
    np.testing.assert_array_equal(draft["lm_head"]["kernel"], kernel[:, ids])
    assert models.source.with_target is not None
    dummy = load(tmp_path, speculative_token_map=str(file), load_format="dummy")
    assert jax.tree.map(jnp.shape, dummy.params) == jax.tree.map(jnp.shape, models.params)
    several = tmp_path / "several"
    several.mkdir()
    write_checkpoint(several, CONFIGS["mimo_v2"])
    with pytest.raises(ConfigError, match="layers that draft one level each; expected it unset"):
        load(several, speculative_token_map=str(file))
