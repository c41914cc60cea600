"""Check whether a chat template is the target's: markup that it was trained on costs almost
nothing, unseen markup several nats per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jspec.engine.rescorer import Rescorer
from jspec.errors import JspecError
from jspec.messages.request import Request
from jspec.serving.engine import Engine
from jspec.text.template.chat_template import ChatTemplate
from jspec.text.template.chat_templates import ChatTemplates

MOST_NATS = 3.0  # per token of markup
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = "{% for message in messages %}[INST] {{ message.content }} [/INST]{% endfor %}"
PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"
COMMON = {"ChatML's": CHATML, "Llama 3's": LLAMA3, "Mistral's": MISTRAL}


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateCost:
    name: str
    num_tokens: int
    nats: float  # the target's -log p per token of markup; 0 without markup

    @property
    def is_strange(self) -> bool:
        return self.num_tokens > 0 and self.nats > MOST_NATS


def template_costs(
    engine: Engine,
    rescorer: Rescorer,
    contents: Sequence[str],
    *,
    own: ChatTemplates | None = None,
) -> tuple[TemplateCost, ...]:
    """Return the serving template's cost first. own: the checkpoint's, if another one serves."""
    templates: list[tuple[str, ChatTemplate | ChatTemplates]]
    templates = [] if own is None else [("the checkpoint's own", own)]
    templates += [
        (name, ChatTemplate(source=source, where=f"{name} template"))
        for name, source in COMMON.items()
    ]
    alone = [_ids(engine, text) for text in contents]
    messages = [[{"role": "user", "content": text}] for text in contents]
    try:
        served = [engine.chat_prompt(each)[0] for each in messages]
    except JspecError:
        return ()
    base = sum(_nats(engine, rescorer, ids) for ids in alone)
    found = [_cost("the one that serves", engine, rescorer, served, alone, base)]
    for name, template in templates:
        ids = [_ids(engine, template.render(each)) for each in messages]
        found.append(_cost(name, engine, rescorer, ids, alone, base))
    return tuple(found)


def _cost(
    name: str,
    engine: Engine,
    rescorer: Rescorer,
    rendered: Sequence[tuple[int, ...]],
    alone: Sequence[tuple[int, ...]],
    base: float,
) -> TemplateCost:
    num_tokens = sum(map(len, rendered)) - sum(map(len, alone))
    if num_tokens <= 0:
        return TemplateCost(name=name, num_tokens=0, nats=0.0)
    total = sum(_nats(engine, rescorer, ids) for ids in rendered)
    return TemplateCost(name=name, num_tokens=num_tokens, nats=(total - base) / num_tokens)


def _ids(engine: Engine, text: str) -> tuple[int, ...]:
    return engine.requests(prompt=text, sampling_params={"temperature": 0})[0].prompt_ids


def _nats(engine: Engine, rescorer: Rescorer, ids: Sequence[int]) -> float:
    (request,) = _request(engine, ids)
    return -float(rescorer.score(request, ids[-1:]).logprobs[1:].sum())


def _request(engine: Engine, ids: Sequence[int]) -> tuple[Request, ...]:
    return engine.requests(input_ids=ids[:-1], sampling_params={"temperature": 0})
