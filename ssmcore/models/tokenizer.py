"""Text to token ids and back: `tokenizer.json` files, plain bytes, and models without a tokenizer.

Text that comes token by token is given out in whole characters only. Stop texts are the engine's.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ssmcore.errors import CheckpointError, RequestError
from ssmcore.models.config import CONFIG_FILE, read_json, token_ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

    from ssmcore.engine.text import IncrementalDecoder

TOKENIZER_FILE = "tokenizer.json"
BYTES_FILE = "byte_tokenizer.json"

_REPLACEMENT = "\ufffd"
_LONGEST_INCOMPLETE = 3
_CONTEXT = 8


class Tokenizer(Protocol):
    """What the engine asks of a tokenizer.

    Attributes:
        has_text: False where a model came without a tokenizer: then only token ids can be used.
        vocab_size: one more than the greatest token id.
        eos_token_ids: tokens that end a text; they have no text of their own.
    """

    has_text: bool
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with whatever the tokenizer puts before or after it.

        Raises:
            RequestError: there is no tokenizer, or the text is no valid Unicode.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out.

        Raises:
            RequestError: there is no tokenizer.
        """
        ...

    def incremental_decoder(self, context: Sequence[int] = ()) -> IncrementalDecoder:
        """A decoder of tokens that follow `context` (the prompt; it is not given out)."""
        ...


class ByteTokenizer:
    """A token is a byte; ids from 256 on are special."""

    has_text = True

    def __init__(self, eos_token_ids: Sequence[int], vocab_size: int | None = None) -> None:
        self.eos_token_ids = tuple(eos_token_ids)
        self.vocab_size = max(256, *(1 + i for i in eos_token_ids), vocab_size or 0)

    def encode(self, text: str) -> list[int]:
        """The UTF-8 bytes of `text`."""
        return list(_utf8(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text; bytes that are no UTF-8 become U+FFFD."""
        return bytes(i for i in token_ids if i < 256).decode("utf-8", "replace")

    def incremental_decoder(self, context: Sequence[int] = ()) -> IncrementalDecoder:
        """A decoder; a character that `context` leaves incomplete is completed."""
        decoder = _ByteDecoder()
        for token_id in context[-_LONGEST_INCOMPLETE:]:
            decoder.push(token_id)
        return decoder


class _ByteDecoder:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(bytes((token_id,))) if token_id < 256 else ""

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class JsonTokenizer:
    """A `tokenizer.json`, through the library `tokenizers`."""

    has_text = True

    def __init__(self, tokenizer: RustTokenizer, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_ids = tuple(eos_token_ids)
        self.vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    def encode(self, text: str) -> list[int]:
        """Token ids, those of the tokenizer's template included."""
        _utf8(text)
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text, special tokens left out."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def incremental_decoder(self, context: Sequence[int] = ()) -> IncrementalDecoder:
        """A decoder that knows the end of `context`, on which spaces may depend."""
        return _WindowDecoder(self, context)


class _WindowDecoder:
    """Decodes a window of tokens again with every new one, and gives out what is new and whole.

    The window begins with tokens that are out already, because a token's text may depend on those
    before it. Text that ends in U+FFFD may be an incomplete character and waits.
    """

    def __init__(self, tokenizer: JsonTokenizer, context: Sequence[int]) -> None:
        self._decode = tokenizer.decode
        self._ids = list(context[-_CONTEXT:])
        self._known = self._decode(self._ids).rstrip(_REPLACEMENT) if self._ids else ""
        self._out = len(self._ids)
        self._given = 0

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        fresh = self._fresh()
        if fresh.endswith(_REPLACEMENT):
            if len(self._ids) - self._out <= 1 + _LONGEST_INCOMPLETE:
                return ""
            # more than one character waits: only the last can be incomplete
            tail = min(_LONGEST_INCOMPLETE, len(fresh) - len(fresh.rstrip(_REPLACEMENT)))
            return self._give(fresh[: len(fresh) - tail])
        text = self._give(fresh)
        if fresh:
            self._ids = self._ids[self._out :][-_CONTEXT:]
            self._known = self._decode(self._ids)
            self._out = len(self._ids)
            self._given = 0
        return text

    def flush(self) -> str:
        return self._give(self._fresh())

    def _fresh(self) -> str:
        return self._decode(self._ids)[len(self._known) :]

    def _give(self, fresh: str) -> str:
        text = fresh[self._given :]
        self._given = max(self._given, len(fresh))
        return text


class NoTokenizer:
    """Stands where a model directory has no tokenizer: token ids work, text is refused."""

    has_text = False

    def __init__(self, directory: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._directory = directory
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)

    def encode(self, text: str) -> list[int]:
        """Refused."""
        raise RequestError(self._message())

    def decode(self, token_ids: Sequence[int]) -> str:
        """Refused."""
        raise RequestError(self._message())

    def incremental_decoder(self, context: Sequence[int] = ()) -> IncrementalDecoder:
        """A decoder that never gives text: requests of token ids get token ids."""
        return _Silent()

    def _message(self) -> str:
        return (
            f"{self._directory} has no {TOKENIZER_FILE}; give prompts as token ids, or put the"
            " model's tokenizer file there"
        )


class _Silent:
    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def load_tokenizer(directory: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a model directory; a `NoTokenizer` where there is none.

    Args:
        directory: may hold `tokenizer.json`, or `byte_tokenizer.json` with
            `{"type": "bytes", "eos_token_id": 256}`.
        vocab_size: the model's; every token id must be below it.

    Raises:
        CheckpointError: a file that cannot be read, or a tokenizer of another model.
    """
    path, bytes_path = directory / TOKENIZER_FILE, directory / BYTES_FILE
    if path.is_file() and bytes_path.is_file():
        raise CheckpointError(f"{directory} has both {TOKENIZER_FILE} and {BYTES_FILE}; remove one")
    tokenizer: Tokenizer
    if bytes_path.is_file():
        path = bytes_path
        values = read_json(path)
        if values.get("type") != "bytes":
            raise CheckpointError(f"{path}: type is {values.get('type')!r}, wanted 'bytes'")
        tokenizer = ByteTokenizer(token_ids(values.get("eos_token_id"), f"{path}: eos_token_id"))
    elif path.is_file():
        rust = _read_rust(path)
        tokenizer = JsonTokenizer(rust, _eos_token_ids(directory, rust))
    else:
        return NoTokenizer(directory, vocab_size, _eos_token_ids(directory, None))
    if tokenizer.vocab_size > vocab_size:
        raise CheckpointError(
            f"{path}: token ids reach {tokenizer.vocab_size - 1}, but the model's vocabulary ends"
            f" at {vocab_size - 1}; the tokenizer belongs to another model"
        )
    return tokenizer


def _read_rust(path: Path) -> RustTokenizer:
    from tokenizers import Tokenizer as RustTokenizer

    try:
        return RustTokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _eos_token_ids(directory: Path, tokenizer: RustTokenizer | None) -> tuple[int, ...]:
    """From the first file that names any: generation settings, model, tokenizer settings."""
    for file in ("generation_config.json", CONFIG_FILE):
        found = token_ids(_value(directory / file, "eos_token_id"), f"{file}: eos_token_id")
        if found:
            return found
    if tokenizer is not None:
        for file in ("tokenizer_config.json", "special_tokens_map.json"):
            token = _value(directory / file, "eos_token")
            if isinstance(token, dict):
                token = token.get("content")
            if isinstance(token, str):
                found_id = tokenizer.token_to_id(token)
                if found_id is not None:
                    return (found_id,)
    return ()


def _value(path: Path, key: str) -> Any:
    return read_json(path).get(key) if path.is_file() else None


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text is no valid Unicode: a lone surrogate at character {error.start}"
        ) from error
