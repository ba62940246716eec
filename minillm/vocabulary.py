"""From a GGUF file's vocabulary to a `tokenizers` object: byte-level BPE (GPT-2 style) and SentencePiece BPE.

The keys and token types are those of the GGUF specification (ggml project, docs/gguf.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from .errors import ModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # "tokenizer.ggml.token_type"

# How text is cut into words before BPE, by the names in "tokenizer.ggml.pre". A file without the key counts as GPT-2.
PRE_TOKENIZERS = {
    "default": "gpt2", "gpt-2": "gpt2", "gpt2": "gpt2",
    "smollm": "digits",
    "llama-bpe": "llama3", "llama3": "llama3", "llama-v3": "llama3",
    "qwen2": "qwen2", "deepseek-r1-qwen": "qwen2",
}  # fmt: skip
# The patterns of Llama 3 and Qwen2 are one, but for how many digits stay together.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGITS = {"llama3": r"\p{N}{1,3}", "qwen2": r"\p{N}"}


def pre_tokenizer(kind: str) -> pre_tokenizers.PreTokenizer:
    """Cuts text into words and writes their bytes in the byte alphabet. `kind` is a value of PRE_TOKENIZERS."""
    if kind in _DIGITS:
        split = pre_tokenizers.Split(Regex(_WORDS.replace("DIGITS", _DIGITS[kind])), "isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if kind == "digits":  # every digit is a word; the rest is cut as in GPT-2
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    return gpt2


def byte_alphabet() -> dict[str, int]:
    """The 256 printable characters that byte-level BPE writes bytes with: {character: byte} (GPT-2, Radford 2019)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]  # spaces, control characters: moved up to 256, 257, ...
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


def merges_from_scores(pieces: Mapping[str, float]) -> list[tuple[str, str]]:
    """BPE merges of a SentencePiece vocabulary `{piece: score}`, best first.

    SentencePiece stores no merges: it joins the adjacent pair whose joined piece has the highest score. So each way
    to cut a piece into two pieces is one merge, ranked by the score of the whole.
    """
    found = [
        (-score, piece[:cut], piece[cut:])
        for piece, score in pieces.items()
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    return [(left, right) for _, left, right in sorted(found)]


def backend_from_gguf(metadata: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, list[str], list[int]]:
    """The tokenizer, and the text and type of each token. ModelError: a key is missing, unknown or inconsistent."""

    def need(key: str) -> Any:
        if (value := metadata.get(f"tokenizer.ggml.{key}")) is None:
            raise ModelError(f"The GGUF file has no tokenizer.ggml.{key}, so its text cannot be tokenized.")
        return value

    kind, tokens = need("model"), list(need("tokens"))
    types = list(metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens)))
    if len(types) != len(tokens):
        raise ModelError(f"The GGUF file has {len(tokens)} tokens but {len(types)} token types.")
    while types and types[-1] == UNUSED:  # rows that only pad the embedding
        types.pop()
        tokens.pop()
    vocab = {token: id for id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for id, token in enumerate(tokens) if vocab[token] != id)
        raise ModelError(f"The GGUF file lists the token {twice!r} more than once.")
    if kind == "gpt2":
        pre = str(metadata.get("tokenizer.ggml.pre", "default"))
        if pre not in PRE_TOKENIZERS:
            known = ", ".join(PRE_TOKENIZERS)
            raise ModelError(f"Pre-tokenizer {pre!r} (tokenizer.ggml.pre) is not supported. Known: {known}.")
        build = partial(_byte_level, vocab, need("merges"), PRE_TOKENIZERS[pre])
    elif kind == "llama":
        unknown = metadata.get("tokenizer.ggml.unknown_token_id")
        prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
        build = partial(_sentencepiece, vocab, types, need("scores"), unknown, prefix)
    else:
        raise ModelError(f"Tokenizer model {kind!r} (tokenizer.ggml.model) is not supported. Known: gpt2, llama.")
    try:
        backend = build()
    except Exception as error:  # `tokenizers` raises plain Exception, for example for a merge of unknown tokens
        raise ModelError(f"The tokenizer in the GGUF file cannot be built: {error}.") from error
    whole = [
        (token, type) for token, type in zip(tokens, types, strict=True) if type in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    backend.add_tokens([AddedToken(text, special=type != USER_DEFINED, normalized=False) for text, type in whole])
    return backend, tokens, types


def _byte_level(vocab: dict[str, int], merges: Sequence[str], kind: str) -> tokenizers.Tokenizer:
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    # Llama 3 takes a word that is a token as that token, even where its merges would not get there.
    backend = tokenizers.Tokenizer(models.BPE(vocab, pairs, ignore_merges=kind == "llama3"))
    if kind == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizer(kind)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(
    vocab: dict[str, int], types: list[int], scores: Sequence[float], unknown: int | None, prefix: bool
) -> tokenizers.Tokenizer:
    # Control and byte tokens take no part in merges, so that no plain text can spell one.
    pieces = {token: float(scores[id]) for token, id in vocab.items() if types[id] == NORMAL}
    unk = None if unknown is None else list(vocab)[unknown]
    bpe = models.BPE(vocab, merges_from_scores(pieces), unk_token=unk, fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(bpe)
    spaces = normalizers.Replace(" ", "\u2581")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), spaces]) if prefix else spaces
    return backend
