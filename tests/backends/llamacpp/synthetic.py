"""Tiny models from random weights, for what the demo model cannot do: embeddings, ranking, gaps, and being refused.

Each function writes one GGUF file into a folder and returns its path; the same arguments give the same weights. What
they say means nothing, but every number of it can be checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from gguf import GGUFReader, GGUFWriter, PoolingType, TokenType

WIDTH = 32
HEADS = 4
FEED_FORWARD = 64
LAYERS = 2
BERT_CONTEXT = 128
DECODER_CONTEXT = 1024
BUCKETS = 32

# --- vocabularies -----------------------------------------------------------------------------------------------------

PAD, UNK, CLS, SEP, MASK = range(5)
_BERT_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_WORDS = "the cat sat on mat dog ran far away what is a capital of france paris berlin it was not here".split()


def _wordpiece() -> list[str]:
    """Any lower-case text, by word or by letter. A word's beginning is marked, as llama.cpp's converter does it."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,?!"
    words = [word for word in _WORDS if len(word) > 1]
    return [*_BERT_SPECIAL, *(f"\u2581{text}" for text in (*words, *letters)), *letters]


WORDPIECE = _wordpiece()


class Words(msgspec.Struct, frozen=True):
    """A WordPiece vocabulary: its tokens, and which of them are the special ones."""

    tokens: list[str]
    pad: int = PAD
    unknown: int = UNK
    begin: int = CLS
    end: int = SEP
    mask: int = MASK


OUR_WORDS = Words(WORDPIECE)


def read_words(path: Path) -> Words:
    """Those of a model's GGUF, or of one that has nothing but a vocabulary."""
    fields = GGUFReader(path).fields

    def value(name: str) -> Any:
        return fields[f"tokenizer.ggml.{name}"].contents()

    ids = ("padding_token_id", "unknown_token_id", "cls_token_id", "seperator_token_id", "mask_token_id")
    return Words(value("tokens"), *map(value, ids))


def _byte_letters() -> list[str]:
    """The letter byte-level BPE writes for each byte: itself where it can be seen, else one from 256 on."""
    seen = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    unseen = [byte for byte in range(256) if byte not in seen]
    return [chr(byte) if byte in seen else chr(256 + unseen.index(byte)) for byte in range(256)]


_MERGES = ("t h", "th e", "Ġ the", "i n", "e r", "Ġ a", "o n", "a n", "an d", "Ġ and")
_SPECIAL = ("<|begin|>", "<|end|>", "<|turn|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|sep|>")
_BPE = [*_byte_letters(), *(merge.replace(" ", "") for merge in _MERGES), *_SPECIAL]
BEGIN, END, END_OF_TURN, FIM_PREFIX, FIM_SUFFIX, FIM_MIDDLE, DECODER_SEP = range(len(_BPE) - len(_SPECIAL), len(_BPE))
THE = _BPE.index("the")


def _add_wordpiece(writer: GGUFWriter, words: Words) -> None:
    writer.add_tokenizer_model("bert")
    writer.add_token_list(words.tokens)
    writer.add_token_types(
        [TokenType.CONTROL if token in _BERT_SPECIAL else TokenType.NORMAL for token in words.tokens]
    )
    writer.add_token_type_count(2)
    writer.add_bos_token_id(words.begin)
    writer.add_unk_token_id(words.unknown)
    writer.add_sep_token_id(words.end)
    writer.add_pad_token_id(words.pad)
    writer.add_mask_token_id(words.mask)


def _add_bpe(writer: GGUFWriter, *, adds_bos: bool, adds_eos: bool) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(_BPE)
    writer.add_token_types([TokenType.CONTROL if token in _SPECIAL else TokenType.NORMAL for token in _BPE])
    writer.add_token_merges(_MERGES)
    writer.add_bos_token_id(BEGIN)
    writer.add_eos_token_id(END)
    writer.add_eot_token_id(END_OF_TURN)
    writer.add_sep_token_id(DECODER_SEP)
    writer.add_uint32("tokenizer.ggml.fim_pre_token_id", FIM_PREFIX)
    writer.add_uint32("tokenizer.ggml.fim_suf_token_id", FIM_SUFFIX)
    writer.add_uint32("tokenizer.ggml.fim_mid_token_id", FIM_MIDDLE)
    writer.add_add_bos_token(adds_bos)
    writer.add_add_eos_token(adds_eos)


# --- models -----------------------------------------------------------------------------------------------------------


def write_bert(
    folder: Path,
    name: str = "bert",
    *,
    pooling: PoolingType | None = PoolingType.MEAN,
    words: Words = OUR_WORDS,
    context: int = BERT_CONTEXT,
) -> Path:
    """An encoder that reads a text both ways and has no KV cache. With pooling RANK it has a classification head.

    `pooling` None: the file does not say.
    """
    writer = _writer(folder / f"{name}.gguf", "bert", context)
    writer.add_layer_norm_eps(1e-5)
    writer.add_causal_attention(False)
    if pooling is not None:
        writer.add_pooling_type(pooling)
    _add_wordpiece(writer, words)
    shapes = {
        "token_embd.weight": (len(words.tokens), WIDTH),
        "token_types.weight": (2, WIDTH),
        "position_embd.weight": (context, WIDTH),
        **_normal("token_embd_norm"),
    }
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            shapes |= _linear(f"{block}.{part}", WIDTH, WIDTH)
        shapes |= _linear(f"{block}.ffn_up", WIDTH, FEED_FORWARD) | _linear(f"{block}.ffn_down", FEED_FORWARD, WIDTH)
        shapes |= _normal(f"{block}.attn_output_norm") | _normal(f"{block}.layer_output_norm")
    if pooling == PoolingType.RANK:
        shapes |= _linear("cls", WIDTH, WIDTH) | _linear("cls.output", WIDTH, 1)
    return _write(writer, shapes)


def write_decoder(
    folder: Path,
    name: str = "decoder",
    *,
    pooling: PoolingType | None = None,
    adds_bos: bool = False,
    adds_eos: bool = False,
    causal: bool = True,
    vocabulary: bool = True,
) -> Path:
    """A Llama that generates, with tokens to fill gaps.

    One that is not `causal` reads both ways, and only embeds. Without `vocabulary` it has tokens, but no text for them.
    """
    writer = _writer(folder / f"{name}.gguf", "llama", DECODER_CONTEXT)
    _add_decoder_fields(writer)
    writer.add_causal_attention(causal)
    if pooling is not None:
        writer.add_pooling_type(pooling)
    if vocabulary:
        _add_bpe(writer, adds_bos=adds_bos, adds_eos=adds_eos)
    else:
        writer.add_tokenizer_model("no_vocab")
        writer.add_vocab_size(len(_BPE))
    return _write(writer, _decoder_shapes())


def write_decoder_reranker(folder: Path, name: str = "decoder-reranker", *, template: str = "") -> Path:
    """A Qwen3 that answers with the probabilities of "yes" and "no". `template` is that of its prompts."""
    writer = _writer(folder / f"{name}.gguf", "qwen3", DECODER_CONTEXT)
    _add_decoder_fields(writer)
    writer.add_pooling_type(PoolingType.RANK)
    writer.add_classifier_output_labels(["yes", "no"])
    if template:
        writer.add_chat_template([{"name": "rerank", "template": template}])
    _add_bpe(writer, adds_bos=False, adds_eos=False)
    shapes = _decoder_shapes() | {"cls.output.weight": (2, WIDTH)}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.attn_{part}_norm.weight": (WIDTH // HEADS,) for part in "qk"}
    return _write(writer, shapes)


def write_t5(folder: Path, name: str = "t5") -> Path:
    """An encoder and a decoder that looks at what it encoded."""
    writer = _writer(folder / f"{name}.gguf", "t5", BERT_CONTEXT)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_relative_attn_buckets_count(BUCKETS)
    writer.add_decoder_start_token_id(BEGIN)
    _add_bpe(writer, adds_bos=False, adds_eos=True)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(_BPE), WIDTH)}
    for side, attentions in (("enc", ("attn",)), ("dec", ("attn", "cross_attn"))):
        shapes[f"{side}.output_norm.weight"] = (WIDTH,)
        for layer in range(LAYERS):
            block = f"{side}.blk.{layer}"
            for attention in attentions:
                shapes[f"{block}.{attention}_norm.weight"] = (WIDTH,)
                shapes |= {f"{block}.{attention}_{part}.weight": (WIDTH, WIDTH) for part in "qkvo"}
            shapes[f"{block}.attn_rel_b.weight"] = (BUCKETS, HEADS)
            shapes[f"{block}.ffn_norm.weight"] = (WIDTH,)
            shapes[f"{block}.ffn_up.weight"] = (FEED_FORWARD, WIDTH)
            shapes[f"{block}.ffn_down.weight"] = (WIDTH, FEED_FORWARD)
    return _write(writer, shapes)


# --- parts ------------------------------------------------------------------------------------------------------------


def _writer(path: Path, architecture: str, context: int) -> GGUFWriter:
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(context)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    return writer


def _add_decoder_fields(writer: GGUFWriter) -> None:
    writer.add_head_count_kv(HEADS)
    writer.add_key_length(WIDTH // HEADS)
    writer.add_value_length(WIDTH // HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)


def _decoder_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(_BPE), WIDTH),
        "output_norm.weight": (WIDTH,),
        "output.weight": (len(_BPE), WIDTH),
    }
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        shapes |= {f"{block}.{norm}_norm.weight": (WIDTH,) for norm in ("attn", "ffn")}
        shapes |= {f"{block}.attn_{part}.weight": (WIDTH, WIDTH) for part in ("q", "k", "v", "output")}
        shapes |= {f"{block}.ffn_{part}.weight": (FEED_FORWARD, WIDTH) for part in ("gate", "up")}
        shapes[f"{block}.ffn_down.weight"] = (WIDTH, FEED_FORWARD)
    return shapes


def _linear(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _normal(name: str) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (WIDTH,), f"{name}.bias": (WIDTH,)}


def _weights(shapes: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, np.ndarray]]:
    """Norms near 1, the rest as large as keeps the numbers that flow through them near 1."""
    random = np.random.default_rng(7)
    for name, shape in shapes.items():
        values = random.normal(scale=1.0 if len(shape) == 1 else shape[-1] ** -0.5, size=shape)
        if len(shape) == 1:
            values = 0.1 * values + (1.0 if name.endswith("norm.weight") else 0.0)
        yield name, values.astype(np.float32)


def _write(writer: GGUFWriter, shapes: Mapping[str, Sequence[int]]) -> Path:
    for name, values in _weights(shapes):
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert writer.path is not None
    return writer.path
