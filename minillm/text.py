"""Text in, text out: tokenizer, chat template, incremental detokenizer, stop strings.

Text leaves through bytes: every token is a byte string, and only the joined bytes are decoded as UTF-8. So streamed
text is always the same as text decoded at the end.
"""

from __future__ import annotations

import codecs
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import Template, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken

from . import vocabulary
from .errors import ModelError, RequestError


class Tokenizer:
    """Text to token ids and back. Make one with `from_gguf` or `from_folder`.

    vocab_size: ids below it are real; a model may have more rows (padding), which must never be sampled.
    special_ids: control tokens such as <|im_end|>. They have no text (`token_bytes` gives b"").
    User-defined tokens such as <think> are matched whole too, but are ordinary text in every other way.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, bos_id: int | None, eos_ids: list[int], add_bos: bool, template: str | None
    ) -> None:
        self.bos_id = bos_id
        self.eos_ids = tuple(dict.fromkeys(eos_ids))  # each once
        self.add_bos = add_bos and bos_id is not None
        self.chat_template = template
        ends = [*self.eos_ids] if bos_id is None else [bos_id, *self.eos_ids]
        backend.add_special_tokens([backend.id_to_token(id) for id in ends])  # if not marked as such
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special or id in ends)
        self.vocab_size = 1 + max(backend.get_vocab().values())  # the ids may have gaps
        self._backend = backend
        self._added = {id: token.content.encode() for id, token in added.items()}
        self._control = {added[id].content: id for id in self.special_ids}
        longest_first = sorted(self._control, key=len, reverse=True)
        self._control_pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._alphabet = vocabulary.byte_alphabet() if "ByteLevel" in str(backend.decoder) else {}
        self._missing = {byte for char, byte in self._alphabet.items() if backend.token_to_id(char) is None}

        # A second front on the same BPE model, which takes the text of a control token for ordinary text.
        self._plain = tokenizers.Tokenizer(backend.model)
        self._plain.normalizer, self._plain.pre_tokenizer = backend.normalizer, backend.pre_tokenizer
        for id, token in added.items():
            token.special = id in self.special_ids
        self._plain.add_tokens([added[id] for id in sorted(added)])  # in this order they get the same ids
        self._plain.encode_special_tokens = True
        self._never_plain = self.special_ids - {self._control.get(getattr(backend.model, "unk_token", None) or "")}

        # A control token that is meant is written there as its stand-in: an added token that takes the same spaces and
        # is matched wherever it stands. So a chat is one text for `tokenizers`, which spells control tokens or not.
        secret = _unguessable()
        self._stand_in = {token: f"{secret}{id};" for token, id in self._control.items()}
        self._stands_for = {self._stand_in[token]: id for token, id in self._control.items()}
        pairs = [(text, added[id]) for text, id in self._stands_for.items()]
        stand_ins = [AddedToken(text, lstrip=t.lstrip, rstrip=t.rstrip, normalized=False) for text, t in pairs]
        self._plain.add_tokens(stand_ins)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build from GGUF metadata (keys "tokenizer.ggml.*", "tokenizer.chat_template"). ModelError: not usable."""
        backend = vocabulary.backend_from_gguf(metadata)

        def token_id(key: str) -> int | None:
            id = metadata.get(f"tokenizer.ggml.{key}_token_id")
            if id is not None and backend.id_to_token(id) is None:
                raise ModelError(f"tokenizer.ggml.{key}_token_id is {id}, but the file has no such token.")
            return id

        # A file that says nothing: SentencePiece models and Llama 3 start with BOS (llama.cpp assumes so too).
        kind, pre = metadata["tokenizer.ggml.model"], metadata.get("tokenizer.ggml.pre")
        return cls(
            backend,
            bos_id=token_id("bos"),
            eos_ids=[id for key in ("eos", "eot", "eom") if (id := token_id(key)) is not None],
            add_bos=metadata.get("tokenizer.ggml.add_bos_token", kind == "llama" or pre == "llama-bpe"),
            template=metadata.get("tokenizer.chat_template"),
        )

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """Build from tokenizer.json (required), tokenizer_config.json and chat_template.jinja."""
        folder = Path(path)
        try:
            backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
            config_file, template_file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
            config = dict(json.loads(config_file.read_text(encoding="utf-8"))) if config_file.is_file() else {}
            if template_file.is_file():
                config["chat_template"] = template_file.read_text(encoding="utf-8")
        except Exception as error:  # `tokenizers` raises plain Exception
            raise ModelError(f"The tokenizer in {folder} (tokenizer.json) cannot be read: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        if not any(name in str(backend.decoder) for name in ("ByteLevel", "ByteFallback", "Metaspace")):
            raise ModelError(f"{folder / 'tokenizer.json'} is neither a byte-level nor a SentencePiece tokenizer.")

        def token_id(key: str) -> int | None:
            token = config.get(key)
            token = token.get("content", token) if isinstance(token, dict) else token
            id = backend.token_to_id(token) if isinstance(token, str) else None
            if token is not None and id is None:
                raise ModelError(f"{folder}: {key} is {token!r:.50}, which is not in tokenizer.json.")
            return id

        bos, eos, add_bos = token_id("bos_token"), token_id("eos_token"), config.get("add_bos_token")
        if add_bos is None:  # then the post-processor of tokenizer.json decides
            add_bos = bos is not None and backend.encode("a").ids[:1] == [bos]
        template = _default_template(config.get("chat_template"), folder)
        return cls(backend, bos, [] if eos is None else [eos], add_bos, template)

    def encode(self, text: str, *, parse_special: bool = True, add_bos: bool | None = None) -> list[int]:
        """Token ids of `text`. BOS is put in front if the model expects it (or `add_bos`) and it is not there already.

        parse_special: the text of a control token gives its id. False: it gives ordinary tokens, never a control id.
        """
        self._check(text)
        ids = self._backend.encode(text, add_special_tokens=False).ids if parse_special else self._encode_plain(text)
        return self._with_bos(ids, self.add_bos if add_bos is None else add_bos)

    def _check(self, text: str) -> None:
        """RequestError unless every byte of `text` can be given to the model."""
        try:
            data = text.encode()
        except (AttributeError, UnicodeError) as error:
            raise RequestError(f"A prompt must be a string of valid Unicode, got {text!r:.50}.") from error
        if missing := self._missing.intersection(data):
            # `tokenizers` would silently drop it. SmolLM2, for one, has no token for the control character 0x04.
            raise RequestError(f"This model has no token for the byte 0x{min(missing):02x}, which the text contains.")

    def _encode_plain(self, text: str) -> list[int]:
        """Token ids of `text`: a control id for each stand-in, and for nothing else. RequestError: not possible."""
        encoding = self._plain.encode(text, add_special_tokens=False)
        if not self._never_plain.isdisjoint(encoding.ids):  # an odd vocabulary has a merge to one
            raise RequestError("This text cannot be written without a control token of this model.")
        # A stand-in is known by its text (with the spaces it takes): in a vocabulary with gaps its id may be another's.
        pairs = zip(encoding.tokens, encoding.ids, strict=True)
        return [self._stands_for.get(token.strip(), id) for token, id in pairs]

    def _with_bos(self, ids: list[int], add_bos: bool) -> list[int]:
        return [self.bos_id, *ids] if add_bos and self.bos_id is not None and ids[:1] != [self.bos_id] else ids

    def token_bytes(self, id: int, skip_special: bool = True) -> bytes:
        """The bytes of one token: b"" for a control token, part of a character for some. RequestError: no such id."""
        if not 0 <= id < self.vocab_size:
            raise RequestError(f"Token id {id} is outside the vocabulary of {self.vocab_size} tokens.")
        if skip_special and id in self.special_ids:
            return b""
        if id in self._added:
            return self._added[id]
        token = self._backend.id_to_token(id) or ""  # "": a gap in the vocabulary
        if self._alphabet:  # a character outside the alphabet stands for itself
            return b"".join(bytes([self._alphabet[c]]) if c in self._alphabet else c.encode() for c in token)
        if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()  # SentencePiece writes a space as U+2581

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD. RequestError: an id outside the vocabulary.

        SentencePiece models put a space before the first word, and it is kept: a completion needs it.
        """
        return b"".join(self.token_bytes(id, skip_special) for id in ids).decode(errors="replace")

    @cached_property
    def _template(self) -> Template:
        if self.chat_template is None:
            raise RequestError("This model has no chat template; send a plain prompt.")
        # The template comes with the model, from anyone: the sandbox keeps it from reaching Python objects.
        extensions = ["jinja2.ext.loopcontrols", _Generation]
        env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

        def raise_exception(message: str) -> None:
            raise RequestError(f"The chat template refuses these messages: {message}")

        env.globals["raise_exception"] = raise_exception
        # jinja's own would escape for HTML; models were trained on transformers' form
        env.filters["tojson"] = lambda value, **options: json.dumps(value, **{"ensure_ascii": False, **options})
        return env.from_string(self.chat_template)

    def render_chat(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """Messages as the text that the model was trained on. RequestError: bad messages, or the template refuses."""
        check_messages(messages)
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                bos_token="" if self.bos_id is None else self.decode([self.bos_id], skip_special=False),
                eos_token=self.decode(self.eos_ids[:1], skip_special=False),
                tools=None,
            )
        except RequestError:
            raise
        except Exception as error:  # a template can raise anything, for example TypeError for "a" + 1
            raise RequestError(f"The chat template of this model cannot be used: {error}") from error

    def encode_chat(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a chat. Control tokens come from the template only; in a message they are ordinary text.

        A control token spelled in a message is hidden behind a marker while the template is filled in, and put back
        afterwards, as plain text: the rest of the chat keeps its ids. BOS is added if the model expects it and the
        template has not written it. RequestError: as of `render_chat` and `encode`.
        """
        check_messages(messages)
        marker = _unguessable()

        def hide(value: str) -> str:
            return self._control_pattern.sub(lambda match: f"{marker}{self._control[match[0]]};", value)

        def show(value: str) -> str:
            return re.sub(rf"{marker}(\d+);", lambda match: self.decode([int(match[1])], False), value)

        hidden = [{key: hide(value) for key, value in message.items()} for message in messages]
        text = self.render_chat(hidden, add_generation_prompt)
        self._check(show(text))  # and not the stand-ins, which an error message must not tell
        text = self._control_pattern.sub(lambda match: self._stand_in[match[0]], text)
        return self._with_bos(self._encode_plain(show(text)), self.add_bos)


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %} marks what is trained on (transformers); here it is just its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Scope:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _unguessable() -> str:
    """Eight private-use characters, which no text contains."""
    return "".join(chr(0xE000 + byte) for byte in secrets.token_bytes(8))


def _default_template(template: Any, folder: Path) -> str | None:
    """The chat template, or of a list of {"name", "template"} the one named "default". ModelError: there is none."""
    if isinstance(template, list):
        named = (one.get("template") for one in template if isinstance(one, dict) and one.get("name") == "default")
        if (template := next(named, None)) is None:
            raise ModelError(f'{folder}: chat_template is a list, but no template in it is named "default".')
    if template is not None and not isinstance(template, str):
        raise ModelError(f"{folder}: chat_template must be a string or a list of named ones, got {template!r:.50}.")
    return template


def check_messages(messages: Any) -> None:
    """RequestError unless `messages` is a list of dicts of strings, with a role and a content."""
    if not isinstance(messages, (list, tuple)) or not messages or not all(isinstance(m, Mapping) for m in messages):
        raise RequestError('Messages must be a list such as [{"role": "user", "content": "Hello"}].')
    for i, message in enumerate(messages):
        for key in ("role", "content", *message):
            if not isinstance(message.get(key), str):
                raise RequestError(f"Message {i}: {key} must be a string, not {message.get(key)!r:.50}.")


class IncrementalDetokenizer:
    """Token ids to text, piece by piece: `push` each id, then `flush`. The pieces joined are `tokenizer.decode(ids)`.

    A character that is split over tokens comes out whole with its last token, or as U+FFFD if it is never completed.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes  # a function: token id to bytes
        # exercise 08.5
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # end exercise 08.5

    def push(self, id: int) -> str:
        """The text that became certain with this token: often a word, sometimes ""."""
        # exercise 08.5
        return self._decoder.decode(self._token_bytes(id))
        # end exercise 08.5

    def flush(self) -> str:
        """The rest, at the end of the request. Nothing is left afterwards."""
        # exercise 08.5
        return self._decoder.decode(b"", final=True)
        # end exercise 08.5


def held_back(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of `text` could be the beginning of a stop string (0 if none).

    The longest such end counts, shorter than the stop string itself: `text` holds no whole one.
    """
    # exercise 08.4
    possible = ((stop, n) for stop in stops for n in range(1, min(len(stop), len(text) + 1)))
    return max((n for stop, n in possible if text.endswith(stop[:n])), default=0)
    # end exercise 08.4


class StopStrings:
    """Cuts streamed text before the first stop string and never emits a part of one.

    First means completed first (of two completed at once, the longer), however the text is cut into pieces.
    """

    def __init__(self, stops: str | Sequence[str] = ()) -> None:
        self.stops = [stops] if isinstance(stops, str) else list(stops)
        if not all(isinstance(stop, str) and stop for stop in self.stops):
            raise RequestError(f"Stop strings must be strings that are not empty, got {self.stops!r}.")
        self.hit = False
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Take the next piece; returns (text that may be shown now, whether a stop string was met)."""
        if self.hit:
            return "", True
        text = self._held + text
        met = [(start + len(stop), start) for stop in self.stops if (start := text.find(stop)) >= 0]
        if met:
            self.hit, self._held = True, ""
            return text[: min(met)[1]], True
        keep = len(text) - held_back(text, self.stops)
        self._held = text[keep:]
        return text[:keep], False

    def flush(self) -> str:
        """What was held back and turned out not to be a stop string, at the end of the request."""
        rest, self._held = self._held, ""
        return rest
