"""Examination of a running engine's head on its texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jspec.cli.diagnosis import findings
from jspec.cli.diagnosis.agreement import Agreement, Evidence, gather, measure
from jspec.cli.diagnosis.costs import Timing
from jspec.cli.diagnosis.findings import Finding, Trial
from jspec.cli.diagnosis.readings import (
    Reading,
    eagle3_readings,
    nearby_layers,
    shifted_readings,
    target_readings,
)
from jspec.cli.diagnosis.records import Diagnosis, Pair, buckets_of, by_depth
from jspec.cli.diagnosis.templates import TemplateCost, template_costs
from jspec.cli.diagnosis.tensors import TensorFact, coarse_levels, coverage, facts_of, suspicious
from jspec.cli.diagnosis.texts import Text
from jspec.engine.rescorer import Rescorer
from jspec.errors import ConfigError, RequestError
from jspec.models.decoder import Decoder
from jspec.models.heads.feature_head import FeatureHead
from jspec.serving.engine import Engine
from jspec.spec.head_spec import Join
from jspec.text.template.chat_templates import ChatTemplates
from jspec.training.heads.draft_head import DraftHead
from jspec.training.heads.head_eagle1 import TrainedEagle1
from jspec.training.heads.head_eagle3 import TrainedEagle3
from jspec.training.heads.head_mtp import TrainedMtp

FIRST_TEXTS = 4  # texts on which every reading is tried
LEAST_TOKENS = 50  # over all texts, since rules use shares
PROMISING = 4  # number of readings that are then measured on all texts
Say = Callable[[str], None]


def head_of(drafter: Any) -> DraftHead | None:
    head = getattr(drafter, "model", None)
    if not isinstance(head, FeatureHead):
        return None
    spec = head.spec
    try:
        if spec.join is Join.WIDE:
            return TrainedEagle3(spec)
        if spec.input_norm:
            return TrainedMtp(spec)
        return TrainedEagle1(spec) if spec.num_layers == 1 else None
    except ConfigError:  # a variant without a training form
        return None


class Examination:
    """Call `run` first, then `diagnosis`. texts: made by `engine`, which must still run."""

    def __init__(self, engine: Engine, texts: Sequence[Text], *, say: Say) -> None:
        self._engine, self._served, self._say = engine, engine.served, say
        self._texts = [text for text in texts if text.ids]
        if not self._texts:
            raise RequestError("every text is empty; expected prompts that the target continues")
        self._spec = engine.limits.draft_shape
        self._dtype = engine.config.dtype
        self._target: Decoder = self._served.models.target
        on_one = self._served.mesh.size == 1
        self._head = head_of(self._served.models.drafter) if on_one else None
        self._layer_ids = tuple(self._head.aux_layer_ids) if self._head is not None else ()
        self._params = self._served.params["draft"]
        self._most = max(len(t.request.prompt_ids) + len(t.ids) for t in self._texts) + 64
        self._evidence: Evidence | None = None
        self._base: Agreement | None = None
        self._tried: list[Trial] = []
        self._findings: list[Finding] = []
        self._costs: tuple[TemplateCost, ...] = ()
        self._tensors: tuple[TensorFact, ...] = ()

    def run(self, contents: Sequence[str]) -> None:
        if self._head is not None:
            self._look_at_tensors()
            self._say("the head, teacher-forced")
            self._force(self._head)
        self._say("the template")
        self._look_at_template(contents)
        if self._evidence is not None and self._base is not None and not self._findings:
            self._say("other readings of the head")
            self._try(self._evidence, self._base)
            levels = coarse_levels(self._tensors)
            fits = findings.fits(self._base, is_coarse=levels is not None)
            if not self._findings and not fits:
                self._findings.append(findings.unfit(self._base, levels))

    def _look_at_tensors(self) -> None:
        self._tensors = facts_of(self._params)
        wrong = suspicious(self._tensors)
        if wrong:
            more = f"; and {len(wrong) - 3} more tensors" if len(wrong) > 3 else ""
            self._findings.append(
                Finding(
                    kind="tensors",
                    what="; ".join(wrong[:3]) + more,
                    repair="get the head's file again, or export it again",
                )
            )

    def _force(self, head: DraftHead) -> None:
        layers = nearby_layers(self._layer_ids, self._target.spec.num_layers)
        self._evidence = self._gather(self._target, layers)
        self._base = self._measure(head, self._evidence)
        if (count := int(self._base.anchors.sum())) < LEAST_TOKENS:
            raise RequestError(
                f"the texts have {count} tokens after which the head's guesses can be checked; "
                f"expected at least {LEAST_TOKENS}: give more prompts or more --max-new-tokens"
            )
        shifted = [
            (reading, self._measure(head, self._evidence, shift=reading.shift))
            for reading in shifted_readings(head)
        ]
        found = findings.of_serving(self._base, shifted, self._texts)
        if found is not None:
            self._findings.append(found)

    def _gather(self, target: Decoder, layers: tuple[int, ...]) -> Evidence:
        target = dataclasses.replace(target, aux_layer_ids=layers)
        rescorer = Rescorer(self._served, most_tokens=self._most, target=target)
        return gather(rescorer, self._texts, layers)

    def _measure(self, head: DraftHead, evidence: Evidence, *, shift: int = 0) -> Agreement:
        return measure(
            head,
            self._params,
            evidence,
            layer_ids=tuple(head.aux_layer_ids),
            num_steps=self._spec.num_steps,
            dtype=self._dtype,
            shift=shift,
        )

    def _try(self, evidence: Evidence, base: Agreement) -> None:
        without = self._without_windows()
        if without is not None:
            reading, other = without
            self._tried.append(Trial.of(reading, self._read(reading, other), base))
            saved = evidence.prompt_loss - other.prompt_loss
            if saved >= findings.LEAST_NATS:
                what = (
                    f"{reading.fault}: without it the prompts cost it {saved:.2f} nats a token less"
                )
                self._findings.append(Finding(kind="window", what=what, repair=reading.repair))
                return
        some = evidence.of_texts(range(0, len(self._texts), -(-len(self._texts) // FIRST_TEXTS)))
        first = self._read_all(some)
        serving = next(first)[1]
        tried = [(Trial.of(reading, found, serving), reading) for reading, found in first]
        tried.sort(key=lambda pair: -pair[0].gain)
        for trial, reading in tried:
            if len(self._tried) < PROMISING and trial.gain > 0:
                found = self._read(reading, evidence)
                self._tried.append(Trial.of(reading, found, base))
        best = findings.best(self._tried)
        if best is not None:
            self._findings.append(best.finding)

    def _read_all(self, evidence: Evidence) -> Iterator[tuple[Reading, Agreement]]:
        head = self._head
        assert head is not None
        serving = Reading(kind="", fault="", repair="", head=head, layer_ids=self._layer_ids)
        yield serving, self._read(serving, evidence)
        readings = shifted_readings(head)
        if isinstance(head, TrainedEagle3):
            readings = eagle3_readings(head.spec, self._target.spec)
        target, shares = self._served.params["target"], self._served.models.source.shares
        own = {name: part for name, part in self._params.items() if name not in shares}
        for reading in (*target_readings(head, self._layer_ids, own, target), *readings):
            yield reading, self._read(reading, evidence)

    def _read(self, reading: Reading, evidence: Evidence) -> Agreement:
        return measure(
            reading.head,
            reading.params(self._params),
            evidence,
            layer_ids=reading.layer_ids,
            num_steps=self._spec.num_steps,
            dtype=self._dtype,
            shift=reading.shift,
        )

    def _without_windows(self) -> tuple[Reading, Evidence] | None:
        spec = self._target.spec
        windows = self._windows
        if not windows or min(windows) >= self._most or self._head is None:
            return None
        layers = tuple(
            dataclasses.replace(
                layer, attention=dataclasses.replace(layer.softmax_attention, window=None)
            )
            for layer in spec.layers
        )
        target = dataclasses.replace(self._target, spec=dataclasses.replace(spec, layers=layers))
        reading = Reading(
            kind="window",
            fault=f"the target attends to a window of {windows[0]} tokens, and was "
            "trained without, as it seems",
            repair="set sliding_window to null in the target's config, if the target is such a one",
            head=self._head,
            layer_ids=self._layer_ids,
        )
        return reading, self._gather(target, self._layer_ids)

    @property
    def _windows(self) -> tuple[int, ...]:
        found = {layer.attention.window for layer in self._target.spec.layers}
        return tuple(sorted(window for window in found if window is not None))

    def _look_at_template(self, contents: Sequence[str]) -> None:
        args = self._engine.args
        if args.skip_tokenizer_init or not contents:
            return
        own = None
        if args.chat_template is not None:
            own = ChatTemplates.from_directory(self._engine.config.tokenizer_path)
        rescorer = Rescorer(self._served, most_tokens=max(self._most, 1024))
        self._costs = template_costs(self._engine, rescorer, contents[:FIRST_TEXTS], own=own)
        if not self._costs or not self._costs[0].is_strange:
            return
        better = [cost for cost in self._costs[1:] if not cost.is_strange]
        instead = min(better, key=lambda cost: cost.nats).name if better else "none of the common"
        self._findings.append(
            Finding(
                kind="template",
                what=f"the chat template's markup costs the target {self._costs[0].nats:.1f} nats "
                "a token: it was not trained on it, and neither was the head",
                repair=f"serve with the template that the target was trained on; {instead} "
                "template costs it less"
                if better
                else "serve with the template that the target was trained on; no common one is",
            )
        )

    def diagnosis(
        self, *, step: Timing, propose_seconds: float | None, plain_step: Timing
    ) -> Diagnosis:
        steps = [each for text in self._texts for each in text.steps]
        base, evidence = self._base, self._evidence
        emitted = [each.num_emitted for each in steps]
        return Diagnosis(
            pair=self._pair(),
            num_texts=len(self._texts),
            num_tokens=sum(len(text.ids) for text in self._texts),
            acceptance_length=float(np.mean(emitted)) if emitted else 1.0,
            acceptance_error=float(np.std(emitted)) / len(emitted) ** 0.5 if emitted else 0.0,
            served_by_depth=by_depth([s.num_accepted for s in steps], self._spec.num_steps),
            forced_by_depth=None if base is None else base.by_depth,
            confidence=None if base is None else base.confidence,
            unlike_served=None if base is None else findings.unlike_served(base, self._texts)[0],
            buckets=buckets_of(self._texts, base),
            coverage=None
            if evidence is None or "draft_ids" not in self._params
            else coverage(self._params["draft_ids"], evidence),
            step_seconds=step.seconds,
            step_error=step.error,
            propose_seconds=propose_seconds,
            plain_step_seconds=plain_step.seconds,
            plain_step_error=plain_step.error,
            templates=self._costs,
            tensors=self._tensors,
            tried=tuple((t.reading.kind, t.reading.fault, t.gain, t.errors) for t in self._tried),
            findings=tuple(self._findings),
            undecided=self._undecided(),
        )

    def _undecided(self) -> tuple[str, ...]:
        if self._base is None or any(found.kind != "unfit" for found in self._findings):
            return ()
        is_coarse = coarse_levels(self._tensors) is not None
        return (
            *findings.undecided_serving(self._base, self._texts),
            *findings.undecided_trials(self._tried),
            *findings.undecided_fit(self._base, is_coarse=is_coarse),
        )

    def _pair(self) -> Pair:
        models, spec = self._served.models, self._spec
        draft = models.draft_layer
        sizes = getattr(getattr(models.drafter, "head", None), "config", None)
        return Pair(
            algorithm=self._engine.config.speculative_algorithm,
            shape=f"{spec.num_steps}/{spec.topk}/{spec.num_draft_tokens}",
            dtype=self._dtype,
            head=str(self._engine.config.speculative_draft_model_path or "none"),
            aux_layer_ids=self._layer_ids,
            rope_theta=None if draft is None else draft.layers[0].softmax_attention.rope.theta,
            target_rope_theta=self._target.spec.layers[-1].softmax_attention.rope.theta,
            windows=self._windows,
            draft_vocab_size=getattr(sizes, "draft_vocab_size", None),
        )
