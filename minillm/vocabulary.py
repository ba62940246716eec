"""From a GGUF file's vocabulary to a `tokenizers` object: byte-level BPE (GPT-2 style) and SentencePiece BPE.

The keys and token types are those of the GGUF specification (ggml project, docs/gguf.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from .errors import ModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # "tokenizer.ggml.token_type"

PRE_TOKENIZERS = ("default", "gpt-2", "smollm", "llama-bpe", "qwen2")  # "tokenizer.ggml.pre"
# The patterns of Llama 3 and Qwen2 are one, but for how many digits stay together.
_DIGITS = {"llama-bpe": r"\p{N}{1,3}", "qwen2": r"\p{N}"}
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    """Cuts text into words and writes their bytes in the byte alphabet. `pre` is one of PRE_TOKENIZERS."""
    if pre in _DIGITS:
        split = pre_tokenizers.Split(Regex(_WORDS.replace("DIGITS", _DIGITS[pre])), "isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "smollm":  # every digit is a word; the rest is cut as in GPT-2
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    return gpt2


def byte_alphabet() -> dict[str, int]:
    """The 256 printable characters that byte-level BPE writes bytes with: {character: byte} (GPT-2, Radford 2019)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]  # spaces, control characters: moved up to 256, 257, ...
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


def backend_from_gguf(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer, with control and user-defined tokens added. ModelError: a key is missing, unknown or wrong."""
    try:
        kind, tokens = metadata["tokenizer.ggml.model"], list(metadata["tokenizer.ggml.tokens"])
        types = list(metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens)))
        if not len(set(tokens)) == len(tokens) == len(types):
            raise ValueError("each token must be listed once and have one type")
        while types and types[-1] == UNUSED:  # rows that only pad the embedding
            types.pop()
            tokens.pop()
        if kind not in ("gpt2", "llama"):
            raise ValueError(f"tokenizer.ggml.model {kind!r} is not supported (known: gpt2, llama)")
        backend = (_byte_level if kind == "gpt2" else _sentencepiece)(metadata, tokens, types)
    except KeyError as error:
        raise ModelError(f"The GGUF file has no {error}, so its text cannot be tokenized.") from error
    except Exception as error:  # `tokenizers` raises plain Exception, for example for a merge of unknown tokens
        raise ModelError(f"The tokenizer in the GGUF file cannot be built: {error}.") from error
    whole = [pair for pair in zip(tokens, types, strict=True) if pair[1] in (UNKNOWN, CONTROL, USER_DEFINED)]
    backend.add_tokens([AddedToken(token, special=type != USER_DEFINED, normalized=False) for token, type in whole])
    return backend


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> tokenizers.Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise ValueError(f"tokenizer.ggml.pre {pre!r} is not supported (known: {', '.join(PRE_TOKENIZERS)})")
    vocab = {token: id for id, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    # Llama 3 takes a word that is a token as that token, even where its merges would not get there.
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizer(pre)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> tokenizers.Tokenizer:
    vocab, scores = {token: id for id, token in enumerate(tokens)}, metadata["tokenizer.ggml.scores"]
    # SentencePiece stores no merges: it joins the neighbours whose joined piece has the highest score. So each way to
    # cut a piece in two is one merge. Control and byte tokens take no part, so that no plain text can spell one.
    pieces = {token: scores[id] for token, id in vocab.items() if types[id] == NORMAL}
    cuts = ((-score, piece[:i], piece[i:]) for piece, score in pieces.items() for i in range(1, len(piece)))
    joins = sorted((rank, left, right) for rank, left, right in cuts if left in pieces and right in pieces)
    merges = [(left, right) for _, left, right in joins]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    unk = None if unknown is None else tokens[unknown]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token=unk, fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "\u2581")
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), spaces]) if prefix else spaces
    return backend
