"""An exported head, served over pages, computes what training computed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.errors import CheckpointError, ConfigError
from jspec.files.json_files import read_fields
from jspec.models.families import mimo_v2
from jspec.models.files.checkpoint import load_model_spec, load_target
from jspec.models.files.tensor_files import open_tensors
from jspec.models.heads.eagle1 import load_eagle1, load_eagle1_config
from jspec.models.heads.eagle3 import load_eagle3
from jspec.models.heads.eagle3_config import load_eagle3_config
from jspec.models.heads.feature_head import FeatureHead
from jspec.models.heads.mtp import load_mtp, load_mtp_config
from jspec.models.layer import Params
from jspec.pallas_kernels.ops import Ops
from jspec.spec.model_spec import ModelSpec
from jspec.training.dense import causal_attend, forward
from jspec.training.heads.draft_head import DraftHead, Guess, TargetFeatures
from jspec.training.heads.head_eagle1 import eagle1_head
from jspec.training.heads.head_lm import lm_head_of
from jspec.training.heads.head_mtp import mtp_head
from tests.models.head_laws import TOLERANCE, PagedHead
from tests.training.tiny_pair import random_rows, tiny_head, tiny_target

LENGTH, DEPTHS, START = 12, 3, 6  # a chain is drafted after row START


def trained(
    head: DraftHead, target: ModelSpec, target_params: Params, ids: np.ndarray, folder: Path
) -> tuple[np.ndarray, TargetFeatures, list[Guess]]:
    """Export a random head to `folder`; return (token ids, features, guesses)."""
    params = head.init(target_params, ids, seed=3)
    rows = random_rows(1, LENGTH)
    hidden, aux = forward(
        target,
        target_params,
        rows,
        dtype=jnp.float32,
        attend=causal_attend("xla"),
        aux_layer_ids=head.aux_layer_ids,
    )
    features = TargetFeatures(hidden=hidden, aux=aux)
    whole = head.whole(params, target_params, jnp.asarray(ids))
    guesses = head.guesses(whole, rows, features, num_depths=DEPTHS, dtype=jnp.float32)
    head.save(folder, whole, draft_ids=ids, dtype=np.float32, target=target)
    return np.asarray(rows[0]), features, guesses


def check_chain(paged: PagedHead, ids: np.ndarray, given: Any, guesses: list[Guess]) -> None:
    """Compare a prompt's rows, then forced drafts after row START."""
    fused = np.asarray(paged.fuse(given))
    kv, carried, logits = paged.run(
        paged.empty(), ids[1:], fused[:-1], start=0, count=START + 1, is_prompt=True
    )
    np.testing.assert_allclose(logits, guesses[0].logits[0, : START + 1], **TOLERANCE)
    last = carried[-1:]
    for depth in range(1, DEPTHS):
        token = ids[START + 1 + depth : START + 2 + depth]
        kv, last, logits = paged.run(kv, token, last, start=START + depth)
        np.testing.assert_allclose(logits[0], guesses[depth].logits[0, START], **TOLERANCE)


@pytest.mark.slow
def test_an_exported_eagle3_head_drafts_what_it_learnt(tmp_path: Path) -> None:
    target, target_params = tiny_target()
    head, _, draft_ids = tiny_head(target, target_params)
    ids, features, guesses = trained(head, target, target_params, draft_ids, tmp_path)
    config = load_eagle3_config(tmp_path, target=target)
    params = load_eagle3(tmp_path, config, target_params=target_params, dtype=np.float32)
    paged = PagedHead(FeatureHead(config, Ops()), params)
    check_chain(paged, ids, features.aux[0], guesses)


@pytest.mark.slow
def test_an_exported_eagle1_head_drafts_what_it_learnt(tmp_path: Path) -> None:
    target, target_params = tiny_target()
    head = eagle1_head(target, intermediate_size=40)
    everything = np.arange(target.vocab_size, dtype=np.int32)
    ids, features, guesses = trained(head, target, target_params, everything, tmp_path)
    config = load_eagle1_config(tmp_path, target=target)
    assert config == replace(head.spec, fc_bias=True)
    check_what_peers_read(tmp_path)
    params = load_eagle1(tmp_path, config, target_params=target_params, dtype=np.float32)
    paged = PagedHead(FeatureHead(config, Ops()), params)
    check_chain(paged, ids, features.hidden[0], guesses)
    assert guesses[1].feature is not None


def check_what_peers_read(folder: Path) -> None:
    """SGLang's class always has an fc bias, random if the file has none; vLLM reads `bias` as the
    attention's.
    """
    written = read_fields(folder / "config.json")
    assert written.strings("architectures") == ("LlamaForCausalLMEagle", "EagleLlamaForCausalLM")
    assert not written.get("bias")
    with open_tensors(folder) as tensors:
        assert not tensors.read("fc.bias").any()


def test_a_config_of_mimo_has_what_peers_read_of_it() -> None:
    """vLLM refuses a rotary factor above 1, SGLang layers without these keys."""
    target, _ = tiny_target()
    written = mimo_v2.to_json(target)
    attention = target.layers[0].attention
    assert written["partial_rotary_factor"] == 1.0
    assert written["layernorm_epsilon"] == target.rms_norm_eps
    assert written["swa_num_attention_heads"] == attention.num_heads
    assert (written["swa_head_dim"], written["swa_v_head_dim"]) == (attention.head_dim,) * 2


@dataclass(frozen=True)
class OneLayer:
    """One MTP layer with the interface of a draft head."""

    head: FeatureHead
    index: int

    @property
    def spec(self) -> Any:
        model = self.head.spec.layer
        return SimpleNamespace(layer=replace(model, layers=model.layers[:1]))

    def features(self, params: Params, given: Any) -> Any:
        del params
        return given

    def forward(
        self, params: Params, ids: Any, hidden: Any, kv: Any, rows: Any, **static: Any
    ) -> Any:
        before = (None,) * self.index
        out, pools = self.head.forward(
            params, ids, hidden, (*before, *kv), rows, level=self.index, **static
        )
        return out, pools[self.index :]

    def logits(self, params: Params, out: Any) -> Any:
        return self.head.logits(params, out, level=self.index)


@pytest.mark.slow
@pytest.mark.parametrize("chained", [False, True])
def test_exported_layers_for_multi_token_prediction_draft_what_they_learnt(
    chained: bool, tmp_path: Path
) -> None:
    target, target_params = tiny_target()
    head = mtp_head(target, num_layers=DEPTHS, intermediate_size=40, chained=chained)
    everything = np.arange(target.vocab_size, dtype=np.int32)
    ids, features, guesses = trained(head, target, target_params, everything, tmp_path)
    config, names = load_mtp_config(tmp_path, target=target, num_layers=DEPTHS)
    assert config == head.spec
    assert config.chained == chained
    params = load_mtp(tmp_path, config, names, target_params=target_params, dtype=np.float32)
    hidden = np.asarray(features.aux[0])
    for layer in range(DEPTHS):
        one: Any = OneLayer(FeatureHead(config, Ops(), names=names), layer)
        paged = PagedHead(one, params)
        count = LENGTH - 1 - layer
        _, out, logits = paged.run(
            paged.empty(), ids[layer + 1 :], hidden[:count], start=0, is_prompt=True
        )
        hidden = out if chained else hidden
        np.testing.assert_allclose(logits, guesses[layer].logits[0], **TOLERANCE)


@pytest.mark.slow
def test_an_exported_language_model_says_what_it_learnt(tmp_path: Path) -> None:
    target, target_params = tiny_target()
    head = lm_head_of(target, hidden_size=32, intermediate_size=40, num_layers=2, head_dim=8)
    everything = np.arange(target.vocab_size, dtype=np.int32)
    ids, _, guesses = trained(head, target, target_params, everything, tmp_path)
    spec = load_model_spec(tmp_path)
    assert spec == head.spec
    params = jax.tree.map(jnp.asarray, load_target(tmp_path, spec, dtype=np.float32))
    attend = causal_attend("xla")
    hidden, _ = forward(spec, params, jnp.asarray(ids[None]), dtype=jnp.float32, attend=attend)
    assert len(guesses) == 1
    assert guesses[0].logits.shape == (1, LENGTH - 1, target.vocab_size)  # row t: of token t + 2
    logits = hidden[0, 1:] @ params["lm_head"]["kernel"]
    np.testing.assert_allclose(guesses[0].logits[0], logits, **TOLERANCE)


def test_layers_of_another_target_are_refused(tmp_path: Path) -> None:
    target, target_params = tiny_target()
    head = mtp_head(target, num_layers=1, intermediate_size=40)
    everything = np.arange(target.vocab_size, dtype=np.int32)
    params = head.init(target_params, everything, seed=0)
    head.save(tmp_path, params, draft_ids=everything, dtype=np.float32, target=target)
    other = replace(target, vocab_size=target.vocab_size + 8)
    with pytest.raises(CheckpointError, match=r"\(48, 32\); expected the target's \(56, 32\)"):
        load_mtp_config(tmp_path, target=other, num_layers=1)
    with pytest.raises(ConfigError, match="speculative_num_steps is 2; expected at most 1"):
        load_mtp_config(tmp_path, target=target, num_layers=2)
