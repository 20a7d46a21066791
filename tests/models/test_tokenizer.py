"""Tokenizers: bytes, `tokenizer.json`, none; whole characters only while tokens come."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from ssmcore.errors import CheckpointError, RequestError
from ssmcore.models.tokenizer import ByteTokenizer, JsonTokenizer, load_tokenizer

TEXT = "naïve — 😀😃 日本語\n  \U0001f469\u200d\U0001f52c ok"


def byte_level() -> Tokenizer:
    """A byte-level vocabulary with two merges that end inside characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(alphabet)}
    merges = []
    for pair in (b"\xf0\x9f", b"\x80\xf0"):
        symbols = [_symbol(byte) for byte in pair]
        merges.append(tuple(symbols))
        vocab["".join(symbols)] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    return tokenizer


def _symbol(byte: int) -> str:
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return (
        chr(byte)
        if byte in plain
        else chr(256 + [b for b in range(256) if b not in plain].index(byte))
    )


def byte_fallback() -> Tokenizer:
    """Words that begin with a mark for the space, other characters as bytes."""
    vocab = {"<unk>": 0, "\u2581": 1, "\u2581ok": 2, "a": 3}
    vocab |= {f"<0x{byte:02X}>": 4 + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


TOKENIZERS = {
    "bytes": ByteTokenizer([256]),
    "byte-level": JsonTokenizer(byte_level(), [258]),
    "byte-fallback": JsonTokenizer(byte_fallback(), []),
}


def stream(tokenizer, ids, context=()):
    decoder = tokenizer.incremental_decoder(context)
    return [decoder.push(i) for i in ids] + [decoder.flush()]


@pytest.mark.parametrize("name", ["bytes", "byte-level"])
def test_text_comes_back(name):
    tokenizer = TOKENIZERS[name]
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


@pytest.mark.parametrize("name", ["bytes", "byte-level"])
def test_a_stream_never_gives_half_a_character(name):
    tokenizer = TOKENIZERS[name]
    parts = stream(tokenizer, tokenizer.encode(TEXT))
    assert "".join(parts) == TEXT
    assert all("\ufffd" not in part for part in parts)


def test_characters_come_out_as_soon_as_they_are_whole():
    tokenizer = TOKENIZERS["bytes"]
    assert stream(tokenizer, "aé😀".encode()) == ["a", "", "é", "", "", "", "😀", ""]


def test_tokens_that_end_inside_characters_do_not_hold_back_a_long_run():
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("\U0001f600" * 20)
    parts = stream(tokenizer, ids)
    assert "".join(parts) == "\U0001f600" * 20
    assert max(map(len, parts)) <= 2


@pytest.mark.parametrize("name", ["bytes", "byte-level"])
@given(ids=st.lists(st.integers(0, 258), max_size=40))
@settings(max_examples=150, deadline=None)
def test_a_stream_of_any_tokens_gives_the_decoded_text(name, ids):
    tokenizer = TOKENIZERS[name]
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@given(text=st.text(max_size=20))
@settings(max_examples=150, deadline=None)
def test_a_stream_of_byte_tokens_between_words_gives_the_text(text):
    tokenizer = TOKENIZERS["byte-fallback"]
    ids = [token for char in text for token in (3, *(4 + byte for byte in char.encode()))]
    assert "".join(stream(tokenizer, ids)) == "".join("a" + char for char in text)


def test_a_space_depends_on_what_came_before():
    tokenizer = TOKENIZERS["byte-fallback"]
    assert "".join(stream(tokenizer, [2, 2])) == "ok ok"
    assert "".join(stream(tokenizer, [2, 2], context=[3])) == " ok ok"


def test_an_incomplete_character_of_the_prompt_is_completed():
    context = list("é".encode())[:1]
    assert "".join(stream(TOKENIZERS["bytes"], "é".encode()[1:], context)) == "é"


def test_special_tokens_have_no_text():
    assert TOKENIZERS["bytes"].decode([104, 256, 105]) == "hi"
    tokenizer = TOKENIZERS["byte-level"]
    ids = [*tokenizer.encode("h"), 258, *tokenizer.encode("i")]
    assert tokenizer.decode(ids) == "".join(stream(tokenizer, ids)) == "hi"


@pytest.mark.parametrize("name", ["bytes", "byte-level"])
def test_a_lone_surrogate_is_refused(name):
    with pytest.raises(RequestError, match="character 2"):
        TOKENIZERS[name].encode("ab\ud800")


def test_the_byte_tokenizer_is_found_by_its_file(tmp_path):
    (tmp_path / "byte_tokenizer.json").write_text('{"type": "bytes", "eos_token_id": 256}')
    tokenizer = load_tokenizer(tmp_path, 257)
    assert (tokenizer.eos_token_ids, tokenizer.vocab_size) == ((256,), 257)
    with pytest.raises(CheckpointError, match=r"reach 256.*ends at 255"):
        load_tokenizer(tmp_path, 256)


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    byte_level().save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path, 259).vocab_size == 259
    with pytest.raises(CheckpointError, match=r"tokenizer\.json.*reach 258"):
        load_tokenizer(tmp_path, 258)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config": {"eos_token_id": 7}, "config": {"eos_token_id": 1}}, (7,)),
        ({"generation_config": {}, "config": {"eos_token_id": [1, 2]}}, (1, 2)),
        ({"tokenizer_config": {"eos_token": "<|endoftext|>"}}, (258,)),
        ({"special_tokens_map": {"eos_token": {"content": "<|endoftext|>"}}}, (258,)),
        ({"tokenizer_config": {"eos_token": "<|nothing|>"}}, ()),
        ({}, ()),
    ],
)
def test_end_of_text_comes_from_the_first_file_that_names_it(files, expected, tmp_path):
    byte_level().save(str(tmp_path / "tokenizer.json"))
    for name, values in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(values))
    assert load_tokenizer(tmp_path, 300).eos_token_ids == expected


def test_without_a_tokenizer_only_text_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"eos_token_id": 3}')
    tokenizer = load_tokenizer(tmp_path, 100)
    assert (tokenizer.has_text, tokenizer.eos_token_ids, tokenizer.vocab_size) == (False, (3,), 100)
    assert stream(tokenizer, [1, 2]) == ["", "", ""]
    for call in (lambda: tokenizer.encode("a"), lambda: tokenizer.decode([1])):
        with pytest.raises(RequestError, match=r"tokenizer\.json"):
            call()


@pytest.mark.parametrize(
    ("name", "text"), [("tokenizer.json", "{}"), ("byte_tokenizer.json", '{"type": "words"}')]
)
def test_a_tokenizer_file_that_is_none_is_named(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=name):
        load_tokenizer(tmp_path, 300)


def test_two_tokenizers_are_refused(tmp_path):
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "byte_tokenizer.json").write_text('{"type": "bytes"}')
    with pytest.raises(CheckpointError, match="both"):
        load_tokenizer(tmp_path, 300)
