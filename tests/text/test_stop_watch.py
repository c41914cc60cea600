"""StopWatch finds the same stop, at the same id, as the text does."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.config.limits import SpeculativeConfig
from jspec.messages.protocols import StopWatch
from jspec.messages.request import Request, SamplingParams, StreamChunk
from jspec.messages.step_options import PLAIN
from jspec.scheduler.sequence import Sequence
from jspec.text.stop import stop_watch
from jspec.text.stop.stop_matcher import StopAutomaton
from jspec.text.stream import TokenizedStream
from jspec.text.tokenizer.token_bytes import TokenBytes
from jspec.text.tokenizer.tokenizer import Tokenizer
from tests.text.test_stream import ids_and_stops


@st.composite
def cut_anywhere(draw: st.DrawFn, ids: tuple[int, ...]) -> list[tuple[int, ...]]:
    edges = sorted({0, len(ids)} | draw(st.sets(st.integers(0, len(ids)))))
    return [ids[a:b] for a, b in itertools.pairwise(edges)]


PARTS = [b"\xf0\x9f", b"\x99\x82", b"\xe4\xbd", b"\xa0", b"\xff", b"E", b"END", b"\xc3"]


def watch_of(tokenizer: Tokenizer, stop: list[str]) -> StopWatch:
    found = TokenizedStream(tokenizer, stop=stop).watch()
    assert found is not None
    return found


def show(watch: StopWatch, pushes: list[tuple[int, ...]]) -> tuple[int, str | None]:
    """Return (num_ids, match), pushing only what does not pass, like the scheduler."""
    num_ids = 0
    for ids in pushes:
        if watch.passes(ids):
            num_ids += len(ids)
            continue
        cut = watch.push(ids)
        assert cut.matched is not None
        return num_ids + cut.num_ids, cut.matched
    assert watch.flush() == ""
    return num_ids, watch.matched


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_watch_finds_what_the_text_has(data: st.DataObject, byte_level: Tokenizer) -> None:
    ids, stop = data.draw(ids_and_stops(byte_level))
    stop = [text for text in stop if "\ufffd" not in text]
    pushes = data.draw(cut_anywhere(ids))
    stream = TokenizedStream(byte_level, stop=stop)
    num_ids = sum(stream.push(part).num_ids for part in pushes)
    stream.flush()
    assert show(watch_of(byte_level, stop), pushes) == (num_ids, stream.matched)


def test_torn_characters_before_a_stop_string_change_nothing() -> None:
    # Tokens of any bytes: what a vocabulary of bytes may have.
    tokens = TokenBytes(lambda _: None)
    tokens.update(enumerate(PARTS))
    tables = stop_watch.StopTables(tokens)
    for torn in (0, 2, 4, 7):
        watch = tables.watch(StopAutomaton.from_strings(["END", "\U0001f642"]))
        assert watch is not None
        assert show(watch, [(torn, 5), (torn,), (6, 5)]) == (4, "END")
    watch = tables.watch(StopAutomaton.from_strings(["END", "\U0001f642"]))
    assert watch is not None
    assert show(watch, [(2, 0), (1, 3)]) == (3, "\U0001f642")


def test_what_bytes_cannot_tell_is_not_watched(
    byte_level: Tokenizer, sentencepiece: Tokenizer
) -> None:
    for stop in (["\ufffd"], ["a", "x\ud800"]):
        assert TokenizedStream(byte_level, stop=stop).watch() is None
    by_regex = StopAutomaton.from_strings(["a"], ["b+"])
    assert TokenizedStream(byte_level, stop=by_regex).watch() is None
    assert TokenizedStream(sentencepiece, stop=["a"]).watch() is None


def test_few_tables_are_kept_and_each_stays_small(byte_level: Tokenizer) -> None:
    tables = stop_watch.StopTables(byte_level.all_bytes)
    for i in range(3 * stop_watch.MAX_TABLES):
        tables.watch(StopAutomaton.from_strings([f"stop {i}"]))
    assert len(tables._tables) == stop_watch.MAX_TABLES
    table = stop_watch.StopTable(byte_level.all_bytes, ["a" * 200])
    for state in range(200):
        table.pass_all(state, range(byte_level.vocab_size))
        assert len(table._known) <= stop_watch.MAX_KNOWN


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_watched_sequence_has_the_text_of_its_stream(
    data: st.DataObject, byte_level: Tokenizer
) -> None:
    ids, stop = data.draw(ids_and_stops(byte_level))
    stop = [text for text in stop if "\ufffd" not in text] or ["x"]
    keeps = data.draw(st.booleans())
    params = SamplingParams(
        max_new_tokens=len(ids) + data.draw(st.integers(1, 2)), stop=tuple(stop), no_stop_trim=keeps
    )
    assert params.options == PLAIN
    chunks = chunks_of(byte_level, params, data.draw(cut_anywhere(ids)))
    stream = TokenizedStream(byte_level, stop=stop, no_stop_trim=keeps)
    cut = stream.push(ids)
    assert "".join(chunk.text for chunk in chunks) == cut.text + stream.flush()
    assert sum(len(chunk.new_ids) for chunk in chunks) == cut.num_ids


def chunks_of(
    tokenizer: Tokenizer, params: SamplingParams, rounds: list[tuple[int, ...]]
) -> list[StreamChunk]:
    """Emit `rounds` in a watched sequence, then abort it unless it ended."""
    request = Request(request_id="r", prompt_ids=(1,), sampling=params, seed=0)
    sequence = Sequence.begin(
        request,
        arrival=0,
        max_new_tokens=params.wanted_tokens,
        stream=TokenizedStream(tokenizer, stop=params.stop, no_stop_trim=params.no_stop_trim),
        draft_shape=SpeculativeConfig.plain(),
    )
    assert sequence.watch is not None
    chunks = []
    for ids in rounds:
        if ids:
            cut = sequence.absorb(ids)
            chunks.append(sequence.piece(cut).chunk())
            if cut.finish is not None:
                return chunks
    return [*chunks, sequence.abort("enough").chunk()]
