"""Text in, text out: tokenizer, chat template, incremental detokenizer, stop strings.

A tokenizer is built from a GGUF file's metadata or from a folder's tokenizer.json. Text leaves through bytes:
every token is a byte string, and only the joined bytes are decoded as UTF-8. So streamed text is always the same
as text decoded at the end.
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
from typing import Any, NoReturn

import tokenizers
from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

from . import vocabulary
from .errors import ModelError, RequestError


class Tokenizer:
    """Text to token ids and back. Make one with `from_gguf` or `from_folder`.

    vocab_size: ids below it are real; a model may have more rows (padding), which must never be sampled.
    special_ids: control tokens such as <|im_end|>. They have no text (`token_bytes` gives b"").
    User-defined tokens such as <think> are matched whole too, but are ordinary text in every other way.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        byte_level: bool,
        special_ids: Iterable[int],
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        add_bos: bool = False,
        chat_template: str | None = None,
    ) -> None:
        self.bos_id = bos_id
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.add_bos = add_bos and bos_id is not None
        self.chat_template = chat_template
        self.special_ids = frozenset(special_ids).union(self.eos_ids, () if bos_id is None else (bos_id,))
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        if backend.id_to_token(self.vocab_size - 1) is None:  # the ids have gaps
            self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        unknown = getattr(backend.model, "unk_token", None)
        self._never_plain = self.special_ids - {backend.token_to_id(unknown) if unknown else None}
        self._alphabet = vocabulary.byte_alphabet() if byte_level else None
        self._writable = bytes(range(256))
        if self._alphabet and not unknown:
            self._writable = bytes(
                byte for char, byte in self._alphabet.items() if backend.token_to_id(char) is not None
            )
        self._bytes: dict[int, bytes] = {}
        self._added = {id: token.content for id, token in backend.get_added_tokens_decoder().items()}
        self._backend = backend
        self._plain = self._without_control(backend)
        self._control = {self._token(id): id for id in sorted(self.special_ids)}
        longest_first = sorted(filter(None, self._control), key=len, reverse=True)
        self._control_pattern = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")

    def _without_control(self, backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
        """A second front on the same BPE model that takes the text of a control token for ordinary text."""
        plain = tokenizers.Tokenizer(backend.model)
        if backend.normalizer is not None:
            plain.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            plain.pre_tokenizer = backend.pre_tokenizer
        added = sorted(backend.get_added_tokens_decoder().items())
        for id, token in added:
            token.special = id in self.special_ids
        plain.add_tokens([token for _, token in added])  # in the order of their ids, so that they get the same ids
        plain.encode_special_tokens = True
        return plain

    # ---- building ----

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build from GGUF metadata (keys "tokenizer.ggml.*", "tokenizer.chat_template"). ModelError: not usable."""
        backend, tokens, types = vocabulary.backend_from_gguf(metadata)

        def token_id(key: str) -> int | None:
            id = metadata.get(f"tokenizer.ggml.{key}_token_id")
            if id is not None and not 0 <= id < len(tokens):
                raise ModelError(f"tokenizer.ggml.{key}_token_id is {id}, but the file has {len(tokens)} tokens.")
            return id

        # A file that says nothing: SentencePiece models and Llama 3 start with BOS (llama.cpp assumes so too).
        kind, pre = metadata["tokenizer.ggml.model"], metadata.get("tokenizer.ggml.pre", "")
        add_bos = kind == "llama" or vocabulary.PRE_TOKENIZERS.get(pre) == "llama3"
        bos, ends = token_id("bos"), [id for key in ("eos", "eot", "eom") if (id := token_id(key)) is not None]
        backend.add_special_tokens([tokens[id] for id in (bos, *ends) if id is not None])  # if not marked as control
        return cls(
            backend,
            byte_level=kind == "gpt2",
            special_ids=[id for id, type in enumerate(types) if type in (vocabulary.CONTROL, vocabulary.UNKNOWN)],
            bos_id=bos,
            eos_ids=ends,
            add_bos=metadata.get("tokenizer.ggml.add_bos_token", add_bos),
            chat_template=metadata.get("tokenizer.chat_template"),
        )

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """Build from tokenizer.json (required), tokenizer_config.json, special_tokens_map.json, chat_template.jinja."""
        folder = Path(path)
        if not (folder / "tokenizer.json").is_file():
            raise ModelError(f"{folder} has no tokenizer.json. Save the tokenizer there in that format (a 'fast' one).")

        def read(name: str) -> dict[str, Any]:
            try:
                value = json.loads((folder / name).read_text(encoding="utf-8")) if (folder / name).is_file() else {}
            except ValueError as error:
                raise ModelError(f"{folder / name} is not valid JSON: {error}") from error
            if not isinstance(value, dict):
                raise ModelError(f"{folder / name} must hold a JSON object.")
            return value

        try:
            backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # `tokenizers` raises plain Exception
            raise ModelError(f"{folder / 'tokenizer.json'} cannot be read: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        decoder = str(backend.decoder)
        if not any(name in decoder for name in ("ByteLevel", "ByteFallback", "Metaspace")):
            raise ModelError(f"{folder / 'tokenizer.json'} is neither a byte-level nor a SentencePiece tokenizer.")
        config = read("special_tokens_map.json") | read("tokenizer_config.json")

        def token_id(key: str) -> int | None:
            token = config.get(key)
            token = token.get("content") if isinstance(token, dict) else token
            if token is not None and backend.token_to_id(token) is None:
                raise ModelError(f"{folder}: {key} is {token!r}, which is not in tokenizer.json.")
            return None if token is None else backend.token_to_id(token)

        template = config.get("chat_template")
        if isinstance(template, list):  # several named ones
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        if (folder / "chat_template.jinja").is_file():
            template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        bos, eos, add_bos = token_id("bos_token"), token_id("eos_token"), config.get("add_bos_token")
        if add_bos is None:  # then the post-processor of tokenizer.json decides
            add_bos = bos is not None and backend.encode("a").ids[:1] == [bos]
        return cls(
            backend,
            byte_level="ByteLevel" in decoder,
            special_ids=[id for id, token in backend.get_added_tokens_decoder().items() if token.special],
            bos_id=bos,
            eos_ids=() if eos is None else (eos,),
            add_bos=bool(add_bos),
            chat_template=template,
        )

    # ---- text to ids ----

    def encode(self, text: str, *, parse_special: bool = True, add_bos: bool | None = None) -> list[int]:
        """Token ids of `text`.

        parse_special: the text of a control token gives its id. False: it gives ordinary tokens, never a control id.
            (BOS may still be put in front.) User-defined tokens are matched either way; the longest match wins.
        add_bos: None means what the model expects. BOS is put in front only if it is not the first id already.
        """
        ids = self._ids(self._backend if parse_special else self._plain, text)
        return self._with_bos(ids, self.add_bos if add_bos is None else add_bos)

    def _ids(self, front: tokenizers.Tokenizer, text: str) -> list[int]:
        try:
            data = text.encode()
        except (AttributeError, UnicodeError) as error:
            raise RequestError(f"A prompt must be a string of valid Unicode, got {text!r:.50}.") from error
        if missing := data.translate(None, self._writable):
            # `tokenizers` would silently drop it. SmolLM2, for one, has no token for the control character 0x04.
            raise RequestError(f"This model has no token for the byte 0x{missing[0]:02x}, which the text contains.")
        ids: list[int] = front.encode(text, add_special_tokens=False).ids
        if front is self._plain and not self._never_plain.isdisjoint(ids):  # an odd vocabulary has a merge to one
            raise RequestError("This text cannot be written without a control token of this model.")
        return ids

    def _with_bos(self, ids: list[int], add_bos: bool) -> list[int]:
        if add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    # ---- ids to text ----

    def _token(self, id: int) -> str:
        token = self._backend.id_to_token(id) if 0 <= id < self.vocab_size else None
        if token is None:
            raise RequestError(f"Token id {id} is outside the vocabulary of {self.vocab_size} tokens.")
        return token

    def token_bytes(self, id: int) -> bytes:
        """The bytes of one token: b"" for a control token, part of a character for some. RequestError: no such id."""
        if (known := self._bytes.get(id)) is None:
            known = self._bytes[id] = b"" if id in self.special_ids else self._spell(id)
        return known

    def _spell(self, id: int) -> bytes:
        if 0 <= id < self.vocab_size and self._backend.id_to_token(id) is None:
            return b""  # a gap in the vocabulary
        token = self._token(id)
        if id in self._added:
            return self._added[id].encode()
        if self._alphabet:  # a character outside the alphabet stands for itself
            return b"".join(bytes([self._alphabet[c]]) if c in self._alphabet else c.encode() for c in token)
        if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()  # SentencePiece writes a space as U+2581

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD. RequestError: an id outside the vocabulary.

        SentencePiece models put a space before the first word, and it is kept: a completion needs it.
        """
        parts = (self._spell(i) if not skip_special and i in self.special_ids else self.token_bytes(i) for i in ids)
        return b"".join(parts).decode("utf-8", errors="replace")

    # ---- chat ----

    @cached_property
    def _template(self) -> Template:
        if self.chat_template is None:
            raise RequestError("This model has no chat template; send a plain prompt.")
        # The template comes with the model, from anyone: the sandbox keeps it from reaching Python objects.
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        env.filters["tojson"] = _to_json
        env.globals["raise_exception"] = _raise_exception
        env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            return env.from_string(self.chat_template)
        except Exception as error:
            raise RequestError(f"The chat template of this model cannot be used: {error}") from error

    def render_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """Messages as the text that the model was trained on. RequestError: bad messages, or the template refuses."""
        check_messages(messages)
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                bos_token="" if self.bos_id is None else self._token(self.bos_id),
                eos_token=self._token(self.eos_ids[0]) if self.eos_ids else "",
                tools=None,
                documents=None,
            )
        except RequestError:
            raise
        except Exception as error:  # a template can raise anything, for example TypeError for "a" + 1
            raise RequestError(f"The chat template cannot be filled in: {error}") from error

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a chat. Control tokens come from the template only; in a message they are ordinary text.

        A control token spelled in a message is hidden behind a marker while the template is filled in, and put back
        afterwards, as plain text. So templates that trim or inspect a message work as ever, and a chat without such
        text is encoded in one go. BOS is added if the model expects it and the template has not written it.
        (Where a tokenizer.json puts a space before the very first word only, a chat that spells a control token gets
        such a space after each control token.)
        """
        check_messages(messages)
        marker = "".join(chr(0xE000 + byte) for byte in secrets.token_bytes(8))  # private-use characters, unguessable
        literals = list(self._control)
        stand_in = {literal: marker + chr(0xF0000 + i) for i, literal in enumerate(literals)}

        def hide(value: Any) -> Any:
            if isinstance(value, str):
                return self._control_pattern.sub(lambda match: stand_in[match[0]], value)
            if isinstance(value, Mapping):
                return {key: hide(item) for key, item in value.items()}
            return [hide(item) for item in value] if isinstance(value, list) else value

        text = self.render_chat([hide(message) for message in messages], add_generation_prompt)
        if marker not in text:
            return self.encode(text)
        ids: list[int] = []
        for i, piece in enumerate(self._control_pattern.split(text)):
            if i % 2:  # split() gives text, separator, text, ...
                ids.append(self._control[piece])
            elif piece:
                shown = re.sub(f"{marker}(.)", lambda match: literals[ord(match[1]) - 0xF0000], piece)
                ids += self._ids(self._plain, shown)
        return self._with_bos(ids, self.add_bos)


def check_messages(messages: Any) -> None:
    """RequestError unless `messages` is a list of dicts with a role and a content, both strings."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise RequestError('Messages must be a list such as [{"role": "user", "content": "Hello"}].')
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"Message {i} must be a dict with role and content, not a {type(message).__name__}.")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                got = f"a {type(message[key]).__name__}" if key in message else "missing"
                raise RequestError(f"Message {i}: {key} must be a string, but it is {got}.")


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)  # jinja's own would escape < and > for HTML


def _raise_exception(message: str) -> NoReturn:
    raise RequestError(f"The chat template refuses these messages: {message}")


class IncrementalDetokenizer:
    """Token ids to text, piece by piece: `push` each id, then `flush`. The pieces joined are `tokenizer.decode(ids)`.

    A character that is split over tokens comes out whole with its last token. U+FFFD comes out only for bytes that
    no later byte could mend; a character that is still incomplete at the end becomes one U+FFFD in `flush`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, id: int) -> str:
        """The text that became certain with this token: often a word, sometimes ""."""
        return self._decoder.decode(self._token_bytes(id))

    def flush(self) -> str:
        """The rest, at the end of the request."""
        return self._decoder.decode(b"", final=True)


def held_back(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of `text` could be the beginning of a stop string (0 if none).

    >>> held_back("see\\nUs", ["\\nUser:"])
    3
    """
    for count in range(min(len(text), max(map(len, stops), default=0)), 0, -1):
        if any(len(stop) > count and stop.startswith(text[-count:]) for stop in stops):
            return count
    return 0


class StopStrings:
    """Cuts streamed text before the first stop string and never emits a part of one.

    First means completed first, as it would be with one character at a time; if two are completed by the same
    character, the longer. So the result does not depend on how the text is cut into pieces.
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
        text = self._held + text  # shorter than one stop string plus the new piece, so the whole is scanned once
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
