"""An engine's calls with text, messages and token ids, wherever its requests run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jspec.config.engine_args import EngineArgs
from jspec.engine.weights.loading import ModelPaths, end_of_sequence_ids
from jspec.errors import RequestError
from jspec.messages.adapter import Adapter
from jspec.messages.request import Request
from jspec.models.files.checkpoint import load_sampling_defaults
from jspec.serving.generation import Generation
from jspec.serving.loop_thread import LoopThread
from jspec.serving.method_forms import forwarded, mirrored
from jspec.text.calls.tools import check_tools
from jspec.text.intake import NO_TOKENIZER, Ids, Intake, Params, Prompt
from jspec.text.template.chat_templates import ChatTemplates
from jspec.text.tokenizer.encoding import encoded
from jspec.text.tokenizer.token_texts import TokenTexts
from jspec.text.tokenizer.tokenizer import Tokenizer


class TextEngine:
    """A tokenizer, templates and defaults, over a subclass that runs the requests."""

    args: EngineArgs
    _intake: Intake
    _generation: Generation
    _loop_thread: LoopThread

    def _intake_from(
        self, paths: ModelPaths, *, find_adapter: Callable[[str], Adapter]
    ) -> Callable[..., Intake]:
        """Read what turns text into requests, and return the intake without the runner's facts."""
        self._tokenizer: Tokenizer | None = None
        if not self.args.skip_tokenizer_init:
            self._tokenizer = Tokenizer.from_directory(paths.tokenizer)
        self.eos_token_ids = end_of_sequence_ids(paths.target, self._tokenizer)
        templates = ChatTemplates.find(paths.tokenizer, named=self.args.chat_template)
        is_models = self.args.sampling_defaults == "model"
        defaults = load_sampling_defaults(paths.target) if is_models else {}
        if self.args.max_thinking_tokens is not None:
            defaults["max_thinking_tokens"] = self.args.max_thinking_tokens
        return functools.partial(
            Intake,
            self._tokenizer,
            eos_token_ids=self.eos_token_ids,
            chat_templates=templates,
            defaults=defaults,
            find_adapter=find_adapter,
        )

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises RequestError if the engine runs with skip_tokenizer_init."""
        if self._tokenizer is None:
            raise RequestError(f"text was requested; {NO_TOKENIZER} token ids only")
        return self._tokenizer

    @functools.cached_property
    def token_texts(self) -> TokenTexts:
        """The text of each single id. Raises RequestError like `tokenizer`."""
        return TokenTexts(self.tokenizer)

    def requests(
        self,
        prompt: str | None = None,
        input_ids: Ids | None = None,
        sampling_params: Params = None,
        **options: Any,
    ) -> tuple[Request, ...]:
        """Return the n Requests of one prompt, tokenized and seeded. Raises RequestError."""
        return self._intake.requests(
            Prompt(text=prompt, input_ids=input_ids, sampling=sampling_params, **options)
        )

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        return self._intake.defaults

    chat_prompt = forwarded("_intake", Intake.chat)

    async_generate = forwarded("_generation", Generation.async_generate)
    generate = mirrored(async_generate)
    async_score = forwarded("_generation", Generation.async_score)
    score = mirrored(async_score)
    requests_of = forwarded("_generation", Generation.requests_of)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: Params = None,
        *,
        stream: bool = False,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        lora_path: str | None = None,
    ) -> Any:
        """Generate an answer to messages ({"role", "content"}) with the chat template.

        Without max_new_tokens, an answer may fill the context. continue_final_message: the answer
        continues the assistant's last message. tools: described by the template; calls are part of
        the answer's text. lora_path: the name of a loaded LoRA adapter. The result is that of
        `generate`.
        """
        ids, sampling = self.chat_prompt(
            messages,
            sampling_params,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=chat_template_kwargs,
            tools=None if tools is None else check_tools(tools, None, None).shown_tools,
        )
        return self.generate(
            input_ids=ids, sampling_params=sampling, stream=stream, lora_path=lora_path
        )

    def encode(self, text: str | Sequence[str], *, add_special_tokens: bool = True) -> Any:
        """Return the ids of a text, or of each text of a list, encoded like a prompt."""
        return encoded(self.tokenizer, text, add_special_tokens=add_special_tokens)

    check_ids = forwarded("_intake", Intake.check_ids)

    def decode(self, ids: Ids, *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids. Raises RequestError for an id outside the vocabulary."""
        known = self.check_ids("ids", ids)
        return self.tokenizer.decode(known, skip_special_tokens=skip_special_tokens)
