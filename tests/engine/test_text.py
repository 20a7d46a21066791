"""Text that comes in pieces, and stop texts in it."""

from __future__ import annotations

import itertools

import pytest

from ssmcore.engine.text import TextStream


class Pieces:
    """A decoder whose token n is the n-th piece."""

    def __init__(self, pieces: list[str], rest: str = "") -> None:
        self._pieces, self._rest = pieces, rest

    def push(self, token_id: int) -> str:
        return self._pieces[token_id]

    def flush(self) -> str:
        return self._rest


def given(pieces: list[str], stops: list[str], rest: str = "") -> list[str]:
    stream = TextStream(Pieces(pieces, rest), stops)
    shown = []
    for token in range(len(pieces)):
        shown.append(stream.push(token))
        if stream.stopped:
            return shown
    return [*shown, stream.finish()]


def test_without_stop_texts_everything_is_given_at_once():
    assert given(["a", "bc", ""], []) == ["a", "bc", "", ""]


def test_what_may_begin_a_stop_text_is_held_back():
    assert given(["ab", "\n", "x"], ["\n\n"]) == ["ab", "", "\nx", ""]
    assert given(["ab", "\n", "\n", "x"], ["\n\n"]) == ["ab", "", ""]


def test_the_earliest_stop_text_wins():
    assert given(["one two three"], ["three", "two"]) == ["one "]


def test_held_text_is_given_at_the_end():
    assert given(["a", "EN"], ["END"]) == ["a", "", "EN"]


def test_the_end_of_an_incomplete_character_may_complete_a_stop_text():
    assert given(["a", "EN"], ["END"], rest="D") == ["a", "", ""]


@pytest.mark.parametrize("stops", [["aab"], ["ab", "ba"], ["aaa", "b"], ["abab"]])
def test_any_split_gives_the_text_before_the_first_stop_text(stops):
    for letters in itertools.product("ab", repeat=6):
        text = "".join(letters)
        cuts = [at for stop in stops if (at := text.find(stop)) >= 0]
        for sizes in ([1] * 6, [2, 2, 2], [3, 3], [6], [1, 4, 1]):
            pieces, at = [], 0
            for size in sizes:
                pieces.append(text[at : at + size])
                at += size
            wanted = text[: min(cuts)] if cuts else text
            assert "".join(given(pieces, stops)) == wanted, (text, sizes)
