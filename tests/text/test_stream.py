"""Streams of text: characters are never cut, stop strings never leak, nothing else is held back."""

import itertools
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxspec.errors import InvalidRequest
from jaxspec.text import Detokenizer, StopMatcher

CASES = settings(deadline=None, max_examples=300)


class Bytes256:
    """The smallest tokenizer: id = byte, and 256, 257 are specials of two bytes of text each."""

    special_ids = frozenset({256, 257})

    def id_to_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b"<" + bytes([token_id - 256 + ord("A")])


def decode(ids: Sequence[int], skip_special: bool) -> str:
    table = Bytes256()
    shown = [i for i in ids if not (skip_special and i in table.special_ids)]
    return b"".join(map(table.id_to_bytes, shown)).decode(errors="replace")


def stream(ids: Sequence[int], cuts: Iterable[int], skip_special: bool) -> list[str]:
    """The pushes of ``ids`` cut at ``cuts``, and the flush as the last entry."""
    detokenizer = Detokenizer(Bytes256(), skip_special=skip_special)
    bounds = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [
        *(detokenizer.push(ids[a:b]) for a, b in itertools.pairwise(bounds)),
        detokenizer.flush(),
    ]


# Mostly pieces of real text, so that characters are cut at every place, with noise and specials between.
PIECES = st.one_of(
    st.sampled_from(["é", "漢字", "🙂", "a"]).map(lambda text: list(text.encode())),
    st.sampled_from(["🙂", "漢"]).flatmap(
        lambda text: st.integers(0, len(text.encode())).map(lambda n: list(text.encode()[:n]))
    ),
    st.lists(st.integers(0, 257), max_size=4),
)
IDS = st.lists(PIECES, max_size=12).map(lambda pieces: [token_id for piece in pieces for token_id in piece])


@CASES
@given(ids=IDS, cuts=st.lists(st.integers(0, 100), max_size=8), skip_special=st.booleans())
@example(ids=[0xED, 0xA0, 0x80], cuts=[1, 2], skip_special=True)  # an encoded surrogate
@example(ids=[0xF0, 0x9F, 256, 0x99, 0x82], cuts=[3], skip_special=True)  # a special inside a character
@example(ids=[0xF0, 0x9F, 0xF0, 0x9F, 0x99, 0x82], cuts=[2], skip_special=False)  # broken off, then whole
def test_pushes_and_flush_are_the_decoding_of_everything(ids, cuts, skip_special) -> None:
    assert "".join(stream(ids, cuts, skip_special)) == decode(ids, skip_special)


@CASES
@given(ids=IDS)
@example(ids=[0xED, 0xA0])
@example(ids=[0xF4, 0x8F, 0xBF])
@example(ids=[0xF4, 0x90])
def test_only_what_can_still_become_a_character_is_held(ids) -> None:
    """Whatever is held back, some continuation of at most three bytes makes one valid character of it."""
    detokenizer = Detokenizer(Bytes256())
    shown = "".join(detokenizer.push([token_id]) for token_id in ids)
    held = b"".join(bytes([i]) for i in ids if i < 256).decode(errors="replace").removeprefix(shown)
    assert held in ("", "�")
    if held:
        tail = bytes(i for i in ids[-5:] if i < 256)[-3:]
        assert any(can_become_a_character(tail[start:]) for start in range(len(tail)))
    assert detokenizer.flush() == held


def can_become_a_character(head: bytes) -> bool:
    for fill in (0x80, 0x90, 0xA0, 0xBF):
        for length in (2, 3, 4):
            try:
                whole = head + bytes([fill] * (length - len(head)))
                if len(whole) == length and len(whole.decode()) == 1:
                    return True
            except UnicodeDecodeError:
                continue
    return False


def test_d02_half_a_character_waits_for_its_other_half() -> None:
    face = "🙂".encode()
    detokenizer = Detokenizer(Bytes256())
    assert detokenizer.push(face[:2]) == ""
    assert detokenizer.push(face[2:]) == "🙂"
    assert detokenizer.flush() == ""


def test_d02_a_stream_that_ends_inside_a_character_shows_it_once_as_replacement() -> None:
    detokenizer = Detokenizer(Bytes256())
    assert detokenizer.push("a🙂".encode()[:3]) == "a"
    assert detokenizer.flush() == "�"
    assert detokenizer.flush() == ""


def test_an_invalid_byte_is_shown_at_once() -> None:
    detokenizer = Detokenizer(Bytes256())
    assert detokenizer.push([0x80]) == "�"
    assert detokenizer.push([0xE2, 0x28]) == "�("


def test_special_tokens_show_only_on_request() -> None:
    ids = [*b"hi", 256, *b"!", 257]
    assert "".join(stream(ids, [], skip_special=True)) == "hi!"
    assert "".join(stream(ids, [3], skip_special=False)) == "hi<A!<B"


def naive_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Grows the text by one character at a time; the first stop string at its end cuts it, the longest of several."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


def naive_held(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that starts some stop string."""
    heads = [stop[:length] for stop in stops for length in range(1, len(stop))]
    return max((len(head) for head in heads if text.endswith(head)), default=0)


def pieces_of(text: str, cuts: Iterable[int]) -> list[str]:
    bounds = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


STOPS = st.lists(st.text("ab<", min_size=1, max_size=7), max_size=4)


@CASES
@given(text=st.text("ab<", max_size=30), stops=STOPS, cuts=st.lists(st.integers(0, 100), max_size=8))
@example(text="xabcd", stops=["abcd", "bc"], cuts=[2, 4])
@example(text="aabaabaaa", stops=["aabaaa"], cuts=[5])
@example(text="aabaaabaaa<", stops=["aabaaa<"], cuts=[7])  # a suffix of a suffix goes on
def test_matcher_agrees_with_the_naive_rule_however_the_text_is_cut(text, stops, cuts) -> None:
    matcher = StopMatcher(stops)
    seen, shown = "", ""
    for piece in pieces_of(text, cuts):
        seen += piece
        shown += matcher.push(piece)
        kept, stopped = naive_stop(seen, stops)
        assert matcher.stopped == stopped
        assert shown == (kept if stopped else seen[: len(seen) - naive_held(seen, stops)])
    assert shown + matcher.flush() == naive_stop(text, stops)[0]


def test_c09_pieces_that_later_complete_a_stop_string_are_not_sent() -> None:
    matcher = StopMatcher(["DEFGHIJ"])
    assert [matcher.push(piece) for piece in ("A", "BC", "DE", "FGH", "IJK", "L")] == ["A", "BC", "", "", "", ""]
    assert matcher.stopped
    assert matcher.flush() == ""


def test_c09_a_match_that_fails_or_never_ends_is_released() -> None:
    matcher = StopMatcher(["DEFGHIJ"])
    assert [matcher.push(piece) for piece in ("CDEF", "X", "DE")] == ["C", "DEFX", ""]
    assert not matcher.stopped
    assert matcher.flush() == "DE"
    assert matcher.flush() == ""


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 11])
def test_c10_a_stop_string_spelled_as_text_never_shows_whatever_the_chunks(size) -> None:
    text = "Bye <|im_start|<|im_end|>\n<|im_start|>user"
    matcher = StopMatcher(["<|im_end|>"])
    shown = [matcher.push(text[start : start + size]) for start in range(0, len(text), size)]
    assert "".join(shown) + matcher.flush() == "Bye <|im_start|"


def test_c11_match_across_a_chunk_and_near_miss() -> None:
    def shown(text: str, stops: list[str], size: int) -> str:
        matcher = StopMatcher(stops)
        return "".join([matcher.push(text[i : i + size]) for i in range(0, len(text), size)]) + matcher.flush()

    for size in range(1, 8):
        assert shown("The quick brown fox jumps", ["own fox"], size) == "The quick br"
        assert shown("The quick brown fog lifts", ["own fox"], size) == "The quick brown fog lifts"
        assert shown("The quick brown fog lifts", ["own fox", "own fog", "own"], size) == "The quick br"


def test_c12_text_that_starts_no_stop_string_is_shown_at_once() -> None:
    matcher = StopMatcher(["ZZZZZZZZZZ", "\n\nQ:"])
    for word in ("Once", " upon", " a", " time"):
        assert matcher.push(word) == word
    assert StopMatcher([]).push("anything") == "anything"


def test_of_stops_that_end_together_the_longest_counts() -> None:
    matcher = StopMatcher(["c", "abc", "bc"])
    assert matcher.push("xabc") == "x"


@pytest.mark.parametrize("stops", [[""], ["a", ""], [7]])
def test_an_empty_stop_string_is_refused(stops) -> None:
    with pytest.raises(InvalidRequest, match=rf"stop\[{len(stops) - 1}\]: expected a non-empty string, got"):
        StopMatcher(stops)
