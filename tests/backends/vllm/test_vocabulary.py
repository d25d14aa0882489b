"""Tokenizers of all kinds as vocabularies: their tokens are the bytes of the text."""

from __future__ import annotations

from typing import Any

import pytest

from backends.vllm.vocabulary import HfVocabulary, UnknownTokenizer

tokenizers = pytest.importorskip("tokenizers", reason="Hugging Face's tokenizers are not installed")

TEXTS = ("Hello, world", "zwölf Boxkämpfer 🥊", " two  spaces\n\ttab", "日本")


def vocabulary(tokenizer: Any) -> HfVocabulary:
    return HfVocabulary(tokenizer, vocab_size=1000, bos_text="<s>", eos_text="</s>", end_tokens=[1])


def byte_level(**special: Any) -> Any:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        vocab_size=400,
    )
    tokenizer.train_from_iterator(["Hello, world. Hello, you."], trainer)
    return tokenizer


def sentence_piece() -> Any:
    tokens = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "H", "e", "l", "o", "▁w", "r", "d"]
    model = tokenizers.models.BPE(
        vocab={token: id for id, token in enumerate(tokens)}, merges=[], byte_fallback=True, unk_token="<s>"
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    tokenizer.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


@pytest.mark.parametrize("make", [byte_level, sentence_piece])
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_the_text(make: Any, text: str) -> None:
    vocab = vocabulary(make())
    tokens = vocab.tokenize(text, add_special=False, parse_special=True)
    assert b"".join(vocab.piece(token) for token in tokens.tolist()).decode() == text


@pytest.mark.parametrize("make", [byte_level, sentence_piece])
def test_control_tokens_have_a_name_and_no_text(make: Any) -> None:
    vocab = vocabulary(make())
    (token,) = vocab.tokenize("</s>", add_special=False, parse_special=True).tolist()
    assert token in vocab.end_tokens
    assert (vocab.piece(token), vocab.special_piece(token)) == (b"", b"</s>")
    literal = vocab.tokenize("</s>", add_special=False, parse_special=False).tolist()
    assert len(literal) > 1
    assert b"".join(map(vocab.piece, literal)) == b"</s>"


def test_whether_a_text_is_begun() -> None:
    plain = byte_level()
    assert not vocabulary(plain).adds_bos
    plain.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    begun = vocabulary(plain)
    assert begun.adds_bos
    assert begun.tokenize("a", add_special=True, parse_special=True)[0] == 0
    assert begun.tokenize("a", add_special=False, parse_special=True)[0] != 0


def test_a_padded_tokenizer_pads_nothing() -> None:
    padded = byte_level()
    padded.enable_padding(length=50)
    padded.enable_truncation(max_length=2)
    vocab = vocabulary(padded)
    assert len(vocab.tokenize("zzzzz", add_special=False, parse_special=True)) == 5


def test_pairs() -> None:
    tokenizer = byte_level()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A </s> $B:1", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    told = HfVocabulary(tokenizer, vocab_size=1000, bos_text="", eos_text="", end_tokens=(), has_types=True)
    tokens, begin = told.pair("q", "d")
    assert tokens[0] == 0
    assert tokens[2] == 1
    assert begin == 3
    assert vocabulary(tokenizer).pair("q", "d")[1] is None


def test_a_kind_that_is_not_known_is_said() -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<s>": 1}, unk_token="<s>"))
    with pytest.raises(UnknownTokenizer, match="decoder is missing"):
        vocabulary(tokenizer)
