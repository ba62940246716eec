"""Read GGUF files: the header with every number checked against the file, the tensors straight from the mapped file.

Layout (specification: docs/gguf.md of the ggml project): magic, version, two counts, key-value pairs, tensor
descriptions, padding, tensor data. A header that lies could make a naive reader allocate any amount of memory or read
anywhere, so no count, length or offset is used here before it was compared with the bytes that are really there.
"""

from __future__ import annotations

import itertools
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .errors import ModelError

_SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?"}  # value types as numpy's
_SCALARS |= {10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS, _MAX_NESTING = 4, 4  # ggml has at most 4 dimensions; no real file nests arrays deeper
# Blocks dequantised at a time: 32,768 weights stay in the CPU's cache, and torch does not yet start threads for them.
# Threads would gain nothing here, and on a busy machine waiting for each other would cost them many times the work.
_CHUNK_BLOCKS = 1 << 10


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of the file: `shape` in numpy order (rows first), `offset` and `nbytes` in bytes of the file."""

    name: str
    shape: tuple[int, ...]
    type: Any  # gguf.GGMLQuantizationType
    offset: int
    nbytes: int


class GGUFFile:
    """A GGUF file, mapped into memory. `metadata` maps keys to Python values, `tensors` names to `TensorInfo`.

    Raises ModelError, which names the file and the thing that is wrong, for every file that is not whole and sound.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with open(self.path, "rb") as file:
                size = file.seek(0, 2)
                if size < 24:
                    raise ModelError(f"{self.path} is not a GGUF file: it has only {size} bytes.")
                # copy-on-write, because torch warns about memory that it may not write to; nobody writes
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise ModelError(f"Cannot read {self.path}: {error.strerror or error}.") from error
        reader = _HeaderReader(self._map, self.path)
        self.metadata: dict[str, Any] = reader.metadata
        self.tensors: dict[str, TensorInfo] = reader.tensors
        self._bytes = np.frombuffer(self._map, np.uint8)

    def array(self, name: str) -> np.ndarray:
        """Return the raw bytes of a tensor, uint8 `[nbytes]`, as a view of the mapped file."""
        info = self._info(name)
        return self._bytes[info.offset : info.offset + info.nbytes]

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a tensor dequantised to `dtype`, in numpy order (a new tensor, never a view of the file)."""
        out = torch.empty(self._info(name).shape, dtype=dtype)
        self.read_into(name, out)
        return out

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Dequantise a tensor into `out`, a contiguous CPU tensor of its shape and any float type."""
        import gguf

        info, raw = self._info(name), torch.from_numpy(self.array(name))
        kind = info.type.name
        plain = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
        if kind in plain:
            # offsets need not be multiples of the element size as seen from the map's start, so copy before viewing
            out.copy_(raw.clone().view(plain[kind]).view(info.shape))
            return
        block, block_bytes = gguf.GGML_QUANT_SIZES[info.type]
        blocks, flat = raw.view(-1, block_bytes), out.view(-1, block)
        for start in range(0, len(blocks), _CHUNK_BLOCKS):
            part = slice(start, start + _CHUNK_BLOCKS)
            if kind in _FAST:
                flat[part] = _FAST[kind](blocks[part])
            else:
                try:
                    flat[part] = torch.from_numpy(gguf.dequantize(blocks[part].numpy(), info.type))
                except (NotImplementedError, ValueError) as error:
                    raise ModelError(f"{self.path}: type {kind} of tensor {name} is unsupported.") from error

    def _info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise ModelError(f"{self.path} has no tensor named {name}.")
        return self.tensors[name]


def _scale(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Return the half-precision number at byte `start` of each block, as float32 `[blocks, 1]`."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _dequantize_q8_0(blocks: torch.Tensor) -> torch.Tensor:
    """Q8_0: a scale and 32 signed bytes; weight = scale * q."""
    return blocks[:, 2:].view(torch.int8).float().mul_(_scale(blocks, 0))


def _dequantize_q4_1(blocks: torch.Tensor) -> torch.Tensor:
    """Q4_1: a scale, a minimum and 16 bytes; weights 0-15 are the low halves, 16-31 the high: scale * q + minimum."""
    packed = blocks[:, 4:]
    return torch.cat((packed & 15, packed >> 4), 1).float().mul_(_scale(blocks, 0)).add_(_scale(blocks, 2))


# gguf.dequantize knows all types, but is several times slower on the two that the course's model is made of
_FAST = {"Q8_0": _dequantize_q8_0, "Q4_1": _dequantize_q4_1}


class _HeaderReader:
    """Walks the header from front to back; `pos` is the next byte to read."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.size, self.pos = data, path, len(data), 0
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        if data[:4] != b"GGUF":
            raise ModelError(f"{path} is not a GGUF file: it begins with {data[:4]!r}, not b'GGUF'.")
        self.pos = 4
        version = self.number("<I", "version")
        if version not in (2, 3):
            raise self.error(f"GGUF version {version} is not supported, only 2 and 3 (little-endian)")
        num_tensors = self.count("number of tensors", 24)  # the least that one description can take
        num_keys = self.count("number of metadata keys", 12)
        for _ in range(num_keys):
            key = self.string("a metadata key")
            if key in self.metadata:
                raise self.error(f"metadata key {key!r} occurs twice")
            self.metadata[key] = self.value(self.number("<I", f"type of {key}"), key)
        if self.metadata.get("split.count", 1) not in (0, 1):
            raise ModelError(f"{path} is one part of a split model; merge the parts with llama-gguf-split first.")
        self.read_tensors(num_tensors)

    def error(self, what: str) -> ModelError:
        return ModelError(f"{self.path}: {what}. The file is damaged, incomplete or of an unknown kind.")

    def need(self, num_bytes: int, what: str) -> None:
        """Refuse to go on if fewer than `num_bytes` are left."""
        if num_bytes > self.size - self.pos:
            left = self.size - self.pos
            raise self.error(f"{what} needs {num_bytes} bytes at {self.pos}, but the file has only {left} left")

    def number(self, form: str, what: str) -> int:
        self.need(struct.calcsize(form), what)
        (value,) = struct.unpack_from(form, self.data, self.pos)
        self.pos += struct.calcsize(form)
        return value

    def count(self, what: str, least_bytes: int) -> int:
        """Read a count of things that take at least `least_bytes` each."""
        value = self.number("<Q", what)
        self.need(value * least_bytes, f"{what} ({value})")
        return value

    def string(self, what: str) -> str:
        return self.strings(1, what)[0]

    def strings(self, count: int, what: str) -> list[str]:
        """Read `count` strings. One loop without helper calls: a vocabulary has 10^5 of them."""
        data, pos, size, length_at = self.data, self.pos, self.size, struct.Struct("<Q").unpack_from
        out: list[str] = []
        for _ in range(count):
            if size - pos < 8:
                raise self.error(f"{what} ends after {len(out)} of {count} strings")
            (length,) = length_at(data, pos)
            pos += 8
            if length > size - pos:
                raise self.error(f"{what}: a string of {length} bytes at {pos} reaches beyond the file")
            try:
                out.append(data[pos : pos + length].decode())
            except UnicodeDecodeError as error:
                raise self.error(f"{what}: the string at {pos} is not UTF-8") from error
            pos += length
        self.pos = pos
        return out

    def value(self, kind: int, key: str, nesting: int = 0) -> Any:
        if kind in _SCALARS:
            return self.numbers(kind, 1, key)[0]
        if kind == _STRING:
            return self.string(key)
        if kind != _ARRAY:
            raise self.error(f"{key} has the unknown value type {kind}")
        if nesting == _MAX_NESTING:
            raise self.error(f"{key} nests arrays more than {_MAX_NESTING} deep")
        kind = self.number("<I", f"element type of {key}")
        if kind in _SCALARS:
            return self.numbers(kind, self.count(f"length of {key}", np.dtype(_SCALARS[kind]).itemsize), key)
        if kind == _STRING:
            return self.strings(self.count(f"length of {key}", 8), key)
        return [self.value(kind, key, nesting + 1) for _ in range(self.count(f"length of {key}", 12))]

    def numbers(self, kind: int, count: int, key: str) -> list[Any]:
        dtype = np.dtype(_SCALARS[kind])
        self.need(count * dtype.itemsize, key)
        values = np.frombuffer(self.data[self.pos : self.pos + count * dtype.itemsize], dtype).tolist()
        self.pos += count * dtype.itemsize
        return values

    def read_tensors(self, count: int) -> None:
        import gguf

        described = []
        for _ in range(count):
            name = self.string("a tensor's name")
            dims = self.number("<I", f"number of dimensions of {name}")
            if not 1 <= dims <= _MAX_DIMS:
                raise self.error(f"tensor {name} has {dims} dimensions, expected 1 to {_MAX_DIMS}")
            shape = tuple(self.number("<Q", f"shape of {name}") for _ in range(dims))[::-1]
            type_id = self.number("<I", f"type of {name}")
            described.append((name, shape, type_id, self.number("<Q", f"offset of {name}")))

        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 30 or alignment & (alignment - 1):
            raise self.error(f"general.alignment is {alignment!r}, which is not a power of two from 8 on")
        data_start = -(-self.pos // alignment) * alignment
        for name, shape, type_id, offset in described:
            try:
                kind = gguf.GGMLQuantizationType(type_id)
                block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            except (ValueError, KeyError):
                raise self.error(f"tensor {name} has the unknown quantisation type {type_id}") from None
            if 0 in shape or shape[-1] % block:
                raise self.error(f"tensor {name} has shape {shape}; rows must be multiples of {block} ({kind.name})")
            nbytes = math.prod(shape) // block * block_bytes  # Python's integers cannot overflow
            if offset % alignment:
                raise self.error(f"tensor {name} has offset {offset}, which is not a multiple of {alignment}")
            if data_start + offset + nbytes > self.size:
                end = data_start + offset + nbytes
                raise self.error(f"tensor {name} ends at byte {end}, but the file has only {self.size} bytes")
            if name in self.tensors:
                raise self.error(f"tensor {name} occurs twice")
            self.tensors[name] = TensorInfo(name, shape, kind, data_start + offset, nbytes)
        in_order = sorted(self.tensors.values(), key=lambda info: info.offset)
        for first, second in itertools.pairwise(in_order):
            if first.offset + first.nbytes > second.offset:
                raise self.error(f"tensors {first.name} and {second.name} overlap")
