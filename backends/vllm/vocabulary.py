"""A Hugging Face tokenizer as a `Vocabulary`: tokens of text, and the bytes of every token."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from backends.vocabulary import Tokens

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


class UnknownTokenizer(Exception):
    """The tokenizer is of a kind whose tokens we cannot turn into bytes; the message says which."""


class HfVocabulary:
    """Of a `tokenizers.Tokenizer`. `vocab_size` is the model's, which may have more rows than there are tokens."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        vocab_size: int,
        bos_text: str,
        eos_text: str,
        end_tokens: Iterable[int],
        has_types: bool = False,
    ) -> None:
        """`has_types`: the model is told which of two texts a token is of."""
        self._has_types = has_types
        source = tokenizer.to_str()
        kind = type(tokenizer)
        self._parsing = _plain(kind.from_str(source))
        self._literal = _plain(kind.from_str(source))
        self._literal.encode_special_tokens = True  # `<|name|>` is text
        self.vocab_size = vocab_size
        self.bos_text = bos_text
        self.eos_text = eos_text
        self.end_tokens = frozenset(end_tokens)
        self.suppressed_tokens: frozenset[int] = frozenset()
        first = self._parsing.encode("a", add_special_tokens=True).ids[:1]
        self.adds_bos = bool(bos_text) and first == [self._parsing.token_to_id(bos_text)]
        self._pieces, self._names = _pieces(json.loads(source), self._parsing.get_vocab(with_added_tokens=True))

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> Tokens:
        tokenizer = self._parsing if parse_special else self._literal
        return np.array(tokenizer.encode(text, add_special_tokens=add_special).ids, np.int32)

    def pair(self, one: str, other: str) -> tuple[Tokens, int | None]:
        """Two texts as one input, as the tokenizer joins them, and where the second begins, for models that are told.

        Others must not be told: vLLM's engine dies of it.
        """
        joined = self._parsing.encode(one, other, add_special_tokens=True)
        begin = joined.type_ids.index(1) if self._has_types and 1 in joined.type_ids else None
        return np.array(joined.ids, np.int32), begin

    def piece(self, token: int) -> bytes:
        return self._pieces.get(token, b"")

    def special_piece(self, token: int) -> bytes:
        return self._names.get(token) or self.piece(token)


def _plain(tokenizer: Any) -> Any:
    """Neither cut nor padded, whatever its file says."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _pieces(source: dict[str, Any], vocab: dict[str, int]) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """The bytes of all tokens that have some, and the names of control tokens."""
    added = {entry["id"]: entry for entry in source.get("added_tokens") or ()}
    names = {id: entry["content"].encode() for id, entry in added.items() if entry["special"]}
    kinds = set(_kinds(source.get("decoder")))
    if "ByteLevel" in kinds:
        of = _byte_level
    elif "ByteFallback" in kinds or "Metaspace" in kinds:
        of = _sentence_piece
    elif "WordPiece" in kinds:
        of = _word_piece
    else:
        raise UnknownTokenizer(f"its tokenizer's decoder is {', '.join(sorted(kinds)) or 'missing'}")
    pieces = {
        id: added[id]["content"].encode() if id in added else of(text) for text, id in vocab.items() if id not in names
    }
    return pieces, names


def _kinds(decoder: dict[str, Any] | None) -> Iterable[str]:
    if decoder is None:
        return
    yield decoder["type"]
    for inner in decoder.get("decoders", ()):
        yield from _kinds(inner)


def _byte_letters() -> dict[str, int]:
    """The letters in which byte-level BPE writes bytes: printable ones for themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_LETTERS = _byte_letters()


def _byte_level(text: str) -> bytes:
    return b"".join(bytes((_LETTERS[char],)) if char in _LETTERS else char.encode() for char in text)


def _sentence_piece(text: str) -> bytes:
    byte = _BYTE.fullmatch(text)
    return bytes((int(byte[1], 16),)) if byte else text.replace(_SPACE, " ").encode()


def _word_piece(text: str) -> bytes:
    return text.removeprefix("##").encode() if text.startswith("##") else f" {text}".encode()
