"""Weight updates of a serving engine.

    read      read and check files or arrays in a thread, while steps use the old weights
    wait      if requested, let running requests finish; newer ones wait
    switch    between two steps; running requests return to the queue or end

A LoRA adapter is read and written into a free slot while steps run, since no request uses it yet.
`messages.protocols.Weights` reads and switches; this module knows no device and no file.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict, Unpack

from jspec.config.lora_paths import check_name
from jspec.errors import ConfigError, RequestError, shown, shown_json
from jspec.messages.protocols import Weights
from jspec.messages.weight_update import (
    AdapterUpdate,
    ArrayUpdate,
    DiskUpdate,
    InFlight,
    Model,
    WeightUpdate,
)
from jspec.scheduler.adapters import LoadedAdapters
from jspec.serving.gathering import to_its_end
from jspec.serving.loop import EngineLoop
from jspec.serving.loop_thread import LoopThread
from jspec.serving.weight_update_gate import OnEngineThread

SUCCESS = "Succeeded to update model weights."  # SGLang's words
POLL_SECONDS = 0.005
MAX_VERSION_CHARS = 256
MAX_PATH_CHARS = 4096  # the longest that Linux takes

LOGGER = logging.getLogger("jspec.scheduler")


class UpdateOptions(TypedDict, total=False):
    """Options of every update; see `LiveWeights.async_update_weights_from_tensor`."""

    weight_version: str | None
    abort_all_requests: bool
    wait_for_requests: bool
    keep_pause: bool
    flush_cache: bool


class LiveWeights:
    """The weight operations of `jspec.Engine`, one at a time, with SGLang's names and answers. A
    failed update changes nothing, and its error names everything that is wrong."""

    def __init__(
        self, loop_thread: LoopThread, loop: EngineLoop, weights: Weights, *, max_loras: int = 0
    ) -> None:
        self._loop_thread, self._loop, self._weights = loop_thread, loop, weights
        self.adapters = LoadedAdapters(max_loras, loop.uses)
        self._updating = asyncio.Lock()
        self.may_submit = asyncio.Event()  # cleared while an update waits for running requests
        self.may_submit.set()
        self.updated_model_path: str | None = None  # of the last update from disk

    @property
    def weight_version(self) -> str:
        return self._loop.weight_version

    async def async_update_weights_from_disk(
        self,
        model_path: str | os.PathLike[str],
        load_format: str | None = None,
        *,
        selector: str | None = None,
        speculative_draft_model_path: str | os.PathLike[str] | None = None,
        **options: Unpack[UpdateOptions],
    ) -> dict[str, Any]:
        """Load all weights from a directory of the served architecture.

        model_path: the target's, and the draft's if that was read from the target's directory
        load_format: auto or safetensors, which are the same
        selector: target, draft (model_path is then the draft's) or all (which needs
            speculative_draft_model_path if the draft has its own directory)
        options: see `async_update_weights_from_tensor`

        Raises CheckpointError, ConfigError or RequestError, without any change.
        """
        model_path = _directory("model_path", model_path)
        if speculative_draft_model_path is not None:
            speculative_draft_model_path = _directory(
                "speculative_draft_model_path", speculative_draft_model_path
            )
        if load_format not in (None, "auto", "safetensors"):
            raise RequestError(
                f"load_format is {shown_json(load_format)}; expected auto or safetensors: what a "
                "directory has is found there"
            )
        update = self._disk_update(model_path, _models(selector), speculative_draft_model_path)
        if selector == "all" and update.draft is None and self._weights.has_draft:
            raise RequestError(
                "selector is all, and the draft has a directory of its own; expected "
                "speculative_draft_model_path beside model_path"
            )
        return await self._update(update, **options)

    def _disk_update(
        self, model_path: str, model: Model | None, draft_path: str | None
    ) -> DiskUpdate:
        weights = self._weights
        if model is Model.DRAFT:
            if draft_path not in (None, model_path):
                raise RequestError(
                    f"selector is draft, and speculative_draft_model_path {shown_json(draft_path)} "
                    f"is not model_path {shown_json(model_path)}; expected one of them"
                )
            return DiskUpdate(draft=model_path)
        if model is Model.TARGET:
            return DiskUpdate(target=model_path)
        if draft_path is None and weights.draft_is_in_target:
            draft_path = model_path
        return DiskUpdate(target=model_path, draft=draft_path)

    async def async_update_weights_from_tensor(
        self,
        named_tensors: Iterable[tuple[str, Any]] | Mapping[str, Any],
        *,
        selector: str | None = None,
        **options: Unpack[UpdateOptions],
    ) -> dict[str, Any]:
        """Replace some weights by arrays of numpy or jax (or torch, through DLPack).

        Names and shapes are those of checkpoints.

        selector: target, draft, or all: the target's weight if it has that name, else the draft's
        weight_version: new name of the weights; None: unchanged
        abort_all_requests: end all requests. Otherwise they are retracted and continue after the
            update, when prompt and output are prefilled again. If a request has no token yet, the
            log-probabilities and hidden states of its prompt come from the new weights
        wait_for_requests: let requests finish first, while newer ones wait
        keep_pause: generate nothing until continue_generation()
        flush_cache: accepted for compatibility with SGLang; KV of earlier weights is never used

        Returns {"success": True, "message", "num_paused_requests": number that continue}.
        """
        pairs = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
        arrays: dict[str, Any] = {}
        for name, array in pairs:
            if name in arrays:
                raise RequestError(f"{name} is given twice; expected each tensor once")
            arrays[name] = array
        return await self._update(ArrayUpdate(arrays=arrays, model=_models(selector)), **options)

    async def _update(
        self,
        update: WeightUpdate,
        *,
        weight_version: str | None = None,
        abort_all_requests: bool = False,
        wait_for_requests: bool = False,
        keep_pause: bool = False,
        flush_cache: bool = True,
    ) -> dict[str, Any]:
        del flush_cache
        in_flight = InFlight.RETRACT
        if abort_all_requests and wait_for_requests:
            raise RequestError(
                "abort_all_requests and wait_for_requests are true; expected one of them"
            )
        if abort_all_requests or wait_for_requests:
            in_flight = InFlight.ABORT if abort_all_requests else InFlight.WAIT
        check_version(weight_version)

        async def run() -> int:
            async with self._updating:
                prepared = await to_its_end(self._weights.prepare, update)
                path = update.target if isinstance(update, DiskUpdate) else None
                return await self._switch(prepared, path, weight_version, in_flight, keep_pause)

        num_paused = await self._loop_thread.call(run())
        return {"success": True, "message": SUCCESS, "num_paused_requests": num_paused}

    async def _switch(
        self,
        prepared: Any,
        path: str | None,
        version: str | None,
        in_flight: InFlight,
        keep_pause: bool,
    ) -> int:
        loop = self._loop

        async def update(on_engine_thread: OnEngineThread) -> None:
            await on_engine_thread(lambda: self._weights.switch(prepared))
            self.updated_model_path = path or self.updated_model_path
            if in_flight is InFlight.ABORT:
                for request_id in loop.request_ids:
                    loop.abort(request_id)
            loop.set_weight_version(loop.weight_version if version is None else version)
            LOGGER.info(
                "other weights are in force: version %r, from %s; requests that go on: %d",
                *(loop.weight_version, path or "arrays or a draft's directory"),
                len(loop.request_ids),
            )
            if keep_pause:
                loop.pause()

        try:
            if in_flight is InFlight.WAIT:
                self.may_submit.clear()
                await self._until_idle()
            await loop.between_steps(update)
            return len(loop.request_ids)
        finally:
            self.may_submit.set()

    async def _until_idle(self) -> None:
        while self._loop.request_ids:
            if self._loop.is_paused:
                num_there = len(self._loop.request_ids)
                there = "1 request is" if num_there == 1 else f"{num_there} requests are"
                raise RequestError(
                    f"wait_for_requests is true, but generation is paused and {there} there, which "
                    "would never end; expected it false"
                )
            await asyncio.sleep(POLL_SECONDS)

    # LoRA adapters.

    def load_at_start(self, paths: Iterable[tuple[str, str]]) -> None:
        """Load adapters before the loop runs. Raises CheckpointError or ConfigError."""
        for name, path in paths:
            lora = self.adapters.place(name, path)
            update = AdapterUpdate(slot=lora.slot, path=path)
            self._weights.switch(self._weights.prepare(update))
            self.adapters.add(lora)

    async def async_load_lora_adapter(
        self, lora_name: str, lora_path: str | os.PathLike[str], pinned: bool = False
    ) -> dict[str, Any]:
        """Load a LoRA adapter in peft's layout under a new name, while requests run.

        pinned: accepted for compatibility with SGLang; adapters stay until they are unloaded.
        Returns {"success": True, "loaded_adapters": the path of each by name}. Raises
        CheckpointError, ConfigError or RequestError, without any change.
        """
        del pinned
        name, path = check_name(lora_name), _directory("lora_path", lora_path)

        async def run() -> dict[str, Any]:
            async with self._updating:
                lora = self.adapters.place(name, path)
                await self._write(AdapterUpdate(slot=lora.slot, path=path))
                self.adapters.add(lora)
                LOGGER.info("LoRA adapter %r is loaded from %s", name, path)
                return self._loaded()

        return await self._loop_thread.call(run())

    async def async_unload_lora_adapter(self, lora_name: str) -> dict[str, Any]:
        """Refuse new requests for an adapter, and wait until its present requests have ended.
        Returns the same as `async_load_lora_adapter`.

        Raises RequestError for an unknown name, or if generation is paused and requests use it.
        """

        async def run() -> dict[str, Any]:
            lora = self.adapters.find(lora_name)
            if self._loop.is_paused and self._loop.uses(lora):
                raise RequestError(
                    f"lora_name is {shown(lora_name)}, but generation is paused and requests with "
                    "this adapter are there; expected generation to go on"
                )
            self.adapters.remove(lora)
            while self._loop.uses(lora):
                await asyncio.sleep(POLL_SECONDS)
            async with self._updating:
                if self.adapters.is_free(lora.slot):
                    await self._write(AdapterUpdate(slot=lora.slot, path=None))
            LOGGER.info("LoRA adapter %r is unloaded", lora_name)
            return self._loaded()

        return await self._loop_thread.call(run())

    async def _write(self, update: AdapterUpdate) -> None:
        prepared = await to_its_end(self._weights.prepare, update)
        await to_its_end(self._weights.switch, prepared)

    def _loaded(self) -> dict[str, Any]:
        paths = {name: lora.path for name, lora in self.adapters.by_name.items()}
        return {"success": True, "loaded_adapters": paths}

    async def async_get_weights_by_name(
        self, name: str, truncate_size: int = 100, *, selector: str | None = None
    ) -> list[Any]:
        """Return the first `truncate_size` rows of a checkpoint tensor as nested lists.

        selector: target, draft, or None: the first that has that name. Raises RequestError for an
        unknown name.
        """
        if type(truncate_size) is not int or truncate_size < 0:
            raise RequestError(
                f"truncate_size is {shown_json(truncate_size)}; expected 0 or more rows"
            )
        array = await self.weight(name, selector=selector)
        rows: list[Any] = array[:truncate_size].astype("float32").tolist()
        return rows

    async def weight(self, name: str, *, selector: str | None = None) -> Any:
        """Return a whole tensor as a numpy array in the served dtype. Raises RequestError."""
        model = _models(selector)

        async def run() -> Any:
            async with self._updating:  # an update may be about to delete what is read
                return await to_its_end(self._weights.tensor, name, model)

        return await self._loop_thread.call(run())

    async def update_weight_version(
        self, new_version: str, *, abort_all_requests: bool = False
    ) -> None:
        """Rename the current weights; requests admitted before keep the former name."""
        check_version(new_version)
        loop = self._loop

        def rename() -> None:
            for request_id in loop.request_ids if abort_all_requests else ():
                loop.abort(request_id)
            loop.set_weight_version(new_version, renames=True)

        await self._loop_thread.ask(rename)


def _models(selector: str | None) -> Model | None:
    if selector in (None, "all"):
        return None
    if selector not in [model.value for model in Model]:
        raise RequestError(f"selector is {shown_json(selector)}; expected target, draft or all")
    return Model(selector)


def _directory(name: str, value: Any) -> str:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str) or not text:
        raise RequestError(f"{name} is {shown_json(value)}; expected a directory with a checkpoint")
    if len(text) > MAX_PATH_CHARS:
        raise RequestError(
            f"{name} has {len(text)} characters; expected a path of at most {MAX_PATH_CHARS}"
        )
    return text


def check_version(version: Any) -> None:
    if version is None:
        return
    if not isinstance(version, str) or not 0 < len(version) <= MAX_VERSION_CHARS:
        raise ConfigError(
            f"weight_version is {shown_json(version)}; expected a name of 1 to {MAX_VERSION_CHARS} "
            "characters"
        )
