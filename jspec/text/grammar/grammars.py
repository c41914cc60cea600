"""Grammars: compiled once by the package that was chosen, then asked at every node of a tree.

The packages are extras (`BACKENDS`). Their masks are a function of the bytes so far, so a
sequence's tokens do not depend on which drafts were asked about.
"""

from __future__ import annotations

import importlib.util
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Protocol

from jspec.errors import ConfigError, RequestError, shown
from jspec.files.json_files import long_integer
from jspec.messages.grammar import Grammar, GrammarSource, ReasoningMarks
from jspec.text.grammar.grammar_state import CompiledGrammar
from jspec.text.grammar.grammar_vocabulary import Vocabulary
from jspec.text.grammar.llguidance_grammars import LlguidanceGrammars
from jspec.text.grammar.reasoning_first import Mark, ReasoningFirst
from jspec.text.grammar.xgrammar_grammars import XgrammarGrammars
from jspec.text.tokenizer.tokenizer import Tokenizer

MAX_CACHED = 64  # compiled grammars, the last ones used
# A package keeps what it learns while it works, up to some 100 MB in a second, and tells no size:
# so seconds of work bound what is kept. One that worked longer is made anew, which is milliseconds.
MAX_WORK = 1.0
MAX_ALL_WORK = 4.0


class Backend(Protocol):
    """One package, for one vocabulary. Making one raises ImportError where it is not installed."""

    def compile(self, source: GrammarSource) -> CompiledGrammar:
        """Raises ValueError, TypeError, RuntimeError or RecursionError for what is none."""
        ...


# By SGLang's names; the extra that installs each has a name of its own.
BACKENDS: Mapping[str, Callable[[Vocabulary], Backend]] = {
    "llguidance": LlguidanceGrammars,
    "xgrammar": XgrammarGrammars,
}
DEFAULT_BACKEND = "llguidance"
EXTRAS: Mapping[str, str] = {"llguidance": "grammar", "xgrammar": "xgrammar"}


def check_package(backend: str) -> None:
    """Raises ConfigError where one that was asked for is not installed. The default one may lack
    until a grammar needs it: it is an extra, and most requests have no grammar."""
    extra = EXTRAS.get(backend)
    if extra is None or backend == DEFAULT_BACKEND or importlib.util.find_spec(backend):
        return
    raise ConfigError(
        f"grammar_backend is {backend!r}, and that package is not installed; expected it "
        f"(pip install 'jspec[{extra}]'), {DEFAULT_BACKEND} or none"
    )


class Grammars:
    """Compiles for one vocabulary. Safe to share between threads.

    vocab_size: V of the model, which may have more ids than the tokenizer has tokens. backend: one
    of BACKENDS, or none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        backend: str = DEFAULT_BACKEND,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._backend_name = backend
        self._known: OrderedDict[GrammarSource, CompiledGrammar] = OrderedDict()
        self._vocabulary: Vocabulary | None = None
        self._backend: Backend | None = None
        self._marks: dict[str, Mark] = {}
        self._lock = threading.Lock()

    def compile(self, source: GrammarSource) -> Grammar:
        """The grammar, maybe from before.

        Raises RequestError naming the parameter for one that is wrong or too large, and where there
        is no tokenizer, no end of sequence, or no package for it.
        """
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
        """All but the last one, until the others are few and have worked little."""
        seconds = sum(grammar.work.seconds for grammar in self._known.values())
        while len(self._known) > MAX_CACHED or (len(self._known) > 1 and seconds > MAX_ALL_WORK):
            _, dropped = self._known.popitem(last=False)
            seconds -= dropped.work.seconds

    def after_reasoning(self, grammar: Grammar, marks: ReasoningMarks) -> Grammar:
        """The grammar of an answer that may reason first. One that was compiled here."""
        with self._lock:
            assert self._vocabulary is not None
            mark = self._marks.get(marks.close)
            if mark is None:
                mark = self._marks[marks.close] = Mark(marks.close, self._vocabulary.tokens)
        opens = None
        if marks.open is not None and self._tokenizer is not None:
            opens = self._tokenizer.token_to_id(marks.open)
        return ReasoningFirst(grammar, mark, opens=opens)

    def _compile(self, source: GrammarSource) -> CompiledGrammar:
        name, backend = source.kind.value, self._made_backend(source.kind.value)
        try:
            return backend.compile(source)
        except (ValueError, TypeError, RuntimeError, RecursionError) as error:
            reason = long_integer(error) or " ".join(str(error).split())[:400]
            raise RequestError(f"{name} is {shown(source.text)}: {reason}") from None

    def _made_backend(self, name: str) -> Backend:
        """Made with the first grammar. name: of the parameter that asks."""
        if self._backend is not None:
            return self._backend
        if self._tokenizer is None:
            raise RequestError(
                f"a grammar is asked for ({name}) and the engine has no tokenizer "
                f"(skip_tokenizer_init); expected one, since a grammar speaks of text"
            )
        if not self._eos_token_ids:
            raise RequestError(
                f"a grammar is asked for ({name}) and the model names no end of sequence; expected "
                f"eos_token_id in its config, since nothing else can end the text of a grammar"
            )
        package = self._backend_name
        if package not in BACKENDS:
            raise RequestError(
                f"a grammar is asked for ({name}) and grammar_backend is {package!r}; expected an "
                f"engine with one of {', '.join(BACKENDS)}"
            )
        if self._vocabulary is None:
            self._vocabulary = Vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids)
        try:
            self._backend = BACKENDS[package](self._vocabulary)
        except ImportError:
            raise RequestError(
                f"a grammar is asked for ({name}), which needs the package {package}, and that is "
                f"not installed: pip install 'jspec[{EXTRAS[package]}]'"
            ) from None
        return self._backend
