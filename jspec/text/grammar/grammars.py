"""Grammar compilation and caching."""

from __future__ import annotations

import threading
from collections import OrderedDict

from jspec.errors import RequestError, shown
from jspec.files.json_files import long_integer
from jspec.messages.grammar import Grammar, GrammarSource, ReasoningMarks
from jspec.text.grammar.grammar_state import CompiledGrammar
from jspec.text.grammar.grammar_vocabulary import Vocabulary
from jspec.text.grammar.llguidance_grammars import LlguidanceGrammars
from jspec.text.grammar.reasoning_first import AnyText, Mark, ReasoningFirst
from jspec.text.tokenizer.decoders import cuts_the_end
from jspec.text.tokenizer.tokenizer import Tokenizer

MAX_CACHED = 64  # compiled grammars, least recently used dropped first
# llguidance caches up to some 100 MB per second of work, without reporting how much, so CPU seconds
# bound the cache. A grammar over the bound is compiled again (milliseconds).
MAX_WORK = 1.0
MAX_ALL_WORK = 4.0


class Grammars:
    """A compiler and cache for one vocabulary. Thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        backend: str = "llguidance",
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._backend = backend
        self._known: OrderedDict[GrammarSource, CompiledGrammar] = OrderedDict()
        self._vocabulary: Vocabulary | None = None
        self._compiler: LlguidanceGrammars | None = None
        self._marks: dict[str, Mark] = {}
        self._lock = threading.Lock()

    def compile(self, source: GrammarSource) -> Grammar:
        """Return the compiled grammar. Raises RequestError, naming the parameter."""
        with self._lock:
            found = self._known.get(source)
            if found is None or found.work.failed or found.work.seconds > MAX_WORK:
                self._known.pop(source, None)
                found = self._compile(source)
            self._known[source] = found
            self._known.move_to_end(source)
            self._drop_the_least_used()
            return found

    def _drop_the_least_used(self) -> None:
        seconds = sum(grammar.work.seconds for grammar in self._known.values())
        while len(self._known) > MAX_CACHED or (len(self._known) > 1 and seconds > MAX_ALL_WORK):
            _, dropped = self._known.popitem(last=False)
            seconds -= dropped.work.seconds

    def after_reasoning(
        self, grammar: Grammar | None, marks: ReasoningMarks, *, budget: int | None = None
    ) -> Grammar:
        """Let an answer reason before `grammar`, which was compiled here; None: before any text.
        budget: most tokens of reasoning. Raises RequestError if no token can end it."""
        with self._lock:
            assert self._tokenizer is not None  # or nothing could be compiled or counted
            if self._vocabulary is None:
                self._vocabulary = self._new_vocabulary(self._tokenizer)
            mark = self._marks.get(marks.close)
            if mark is None:
                mark = self._marks[marks.close] = Mark(marks.close, self._vocabulary.own_tokens)
        opens = None if marks.open is None else self._tokenizer.token_to_id(marks.open)
        if budget is not None and mark.continues(0) is None:
            raise RequestError(
                f"max_thinking_tokens is {budget} and no token of the tokenizer begins "
                f"{marks.close}; expected a model that can end its reasoning so"
            )
        return ReasoningFirst(grammar or AnyText(), mark, opens=opens, budget=budget)

    def _compile(self, source: GrammarSource) -> CompiledGrammar:
        name, compiler = source.kind.value, self._made_compiler(source.kind.value)
        try:
            return compiler.compile(source)
        except (ValueError, TypeError, RuntimeError, RecursionError) as error:
            reason = long_integer(error) or " ".join(str(error).split())[:400]
            raise RequestError(f"{name} is {shown(source.text)}: {reason}") from None

    def _made_compiler(self, name: str) -> LlguidanceGrammars:
        if self._compiler is not None:
            return self._compiler
        if self._tokenizer is None:
            raise RequestError(
                f"a grammar is requested ({name}) and the engine has no tokenizer "
                f"(skip_tokenizer_init); expected one, since a grammar constrains text"
            )
        if not self._eos_token_ids:
            raise RequestError(
                f"a grammar is requested ({name}) and the model names no end of sequence; expected "
                f"eos_token_id in its config, since nothing else can end the text of a grammar"
            )
        if self._backend == "none":
            raise RequestError(
                f"a grammar is requested ({name}) and grammar_backend is 'none'; expected an "
                f"engine with llguidance"
            )
        if part := cuts_the_end(self._tokenizer.backend):
            raise RequestError(
                f"a grammar is requested ({name}) and the tokenizer's decoder has {part}, which "
                f"cuts the end of a text; expected a decoder that leaves it as it is"
            )
        if self._vocabulary is None:
            self._vocabulary = self._new_vocabulary(self._tokenizer)
        try:
            self._compiler = LlguidanceGrammars(self._vocabulary)
        except ImportError:
            raise RequestError(
                f"a grammar is requested ({name}), which needs the package llguidance, and that is "
                f"not installed: pip install 'jspec[grammar]'"
            ) from None
        return self._compiler

    def _new_vocabulary(self, tokenizer: Tokenizer) -> Vocabulary:
        return Vocabulary(tokenizer, self._vocab_size, self._eos_token_ids)
