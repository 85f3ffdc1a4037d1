"""Text from tokens as they come: whole characters, nothing past a stop string."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from readmit import demo_model
from readmit.detokenizer import Detokenizer

Tokenizer = Any


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return AutoTokenizer.from_pretrained(demo_model.prepare())


def pieces(detokenizer: Detokenizer, tokens: list[int]) -> list[str]:
    out = []
    for token in tokens:
        out.append(detokenizer.push(token))
        if detokenizer.stopped:
            return out
    return [*out, detokenizer.flush()]


@given(text=st.text(max_size=60))
@settings(deadline=None)
def test_the_pieces_make_the_text(tokenizer: Tokenizer, text: str) -> None:
    prompt = tokenizer.encode("A prompt")
    assert "".join(pieces(Detokenizer(tokenizer, prompt), tokenizer.encode(text))) == tokenizer.decode(
        tokenizer.encode(text), skip_special_tokens=True
    )


@given(text=st.text(alphabet="abc\N{SNOWMAN}", max_size=40), stop=st.text(alphabet="abc", min_size=1, max_size=4))
@settings(deadline=None)
def test_the_text_ends_before_the_first_stop_string(tokenizer: Tokenizer, text: str, stop: str) -> None:
    detokenizer = Detokenizer(tokenizer, tokenizer.encode("A prompt"), [stop])
    assert "".join(pieces(detokenizer, tokenizer.encode(text))) == text.partition(stop)[0]
    assert detokenizer.stopped == (stop in text)


def test_a_character_over_several_tokens_comes_whole(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("\N{OX}\N{SNOWMAN}")
    out = pieces(Detokenizer(tokenizer, []), tokens)
    assert len(tokens) > 2
    assert [piece for piece in out if piece] == ["\N{OX}", "\N{SNOWMAN}"]


def test_a_character_that_never_ends_is_shown_as_broken(tokenizer: Tokenizer) -> None:
    first, *_ = tokenizer.encode("\N{OX}")
    assert pieces(Detokenizer(tokenizer, []), [first]) == ["", "\N{REPLACEMENT CHARACTER}"]


def test_what_might_become_a_stop_string_is_held_back(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, [], ["END"])
    (letter_e,), (letter_n,), (letter_x,) = (tokenizer.encode(letter) for letter in "ENX")
    assert [detokenizer.push(token) for token in (letter_x, letter_e, letter_n, letter_x)] == ["X", "", "", "ENX"]
