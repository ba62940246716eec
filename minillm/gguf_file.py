"""Read GGUF files: the header with every number checked against the file, the tensors straight from the mapped file.

Layout (specification: docs/gguf.md of the ggml project): magic, version, two counts, key-value pairs, tensor
descriptions, padding, tensor data. A header that lies could make a naive reader allocate any amount of memory or read
anywhere, so no count, length or offset is used here before it was compared with the bytes that are really there.
"""

from __future__ import annotations

import math
import mmap
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch

from .errors import ModelError

_SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?"}  # value types as numpy's
_SCALARS |= {10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9
# Weights dequantised at a time: they stay in the CPU's cache, and torch does not yet start threads for so few. Threads
# would gain nothing here, and on a busy machine waiting for each other would cost them many times the work.
_CHUNK = 1 << 15


class TensorInfo(NamedTuple):
    """One tensor of the file: `shape` in numpy order (rows first), `offset` and `nbytes` in bytes of the file."""

    shape: tuple[int, ...]
    type: gguf.GGMLQuantizationType
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
                # copy-on-write, because torch warns about memory that it may not write to; nobody writes
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise ModelError(f"Cannot read {self.path}: {error}.") from error
        self._pos = 0  # the next byte of the header to read
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._read_header()
        self.shapes = {name: info.shape for name, info in self.tensors.items()}

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a tensor dequantised to `dtype`, in numpy order (a new tensor, never a view of the file)."""
        info = self.tensors[name]
        block, block_bytes = gguf.GGML_QUANT_SIZES[info.type]
        raw = torch.frombuffer(self._map, dtype=torch.uint8, count=info.nbytes, offset=info.offset)
        out = torch.empty(info.shape, dtype=dtype)
        blocks, flat, step = raw.view(-1, block_bytes), out.view(-1, block), _CHUNK // block
        try:
            for start in range(0, len(blocks), step):
                flat[start : start + step] = _dequantize(blocks[start : start + step], info.type)
        except NotImplementedError as error:
            raise ModelError(f"{self.path}: type {info.type.name} of tensor {name} is unsupported.") from error
        return out

    def _error(self, what: str) -> ModelError:
        return ModelError(f"{self.path}: {what}. The file is damaged, incomplete or of an unknown kind.")

    def _need(self, num_bytes: int, what: str) -> None:
        """Refuse to go on if fewer than `num_bytes` are left."""
        if num_bytes > len(self._map) - self._pos:
            raise self._error(f"{what} needs {num_bytes} bytes at {self._pos}, more than the file has left")

    def _take(self, num_bytes: int, what: str) -> bytes:
        self._need(num_bytes, what)
        self._pos += num_bytes
        return self._map[self._pos - num_bytes : self._pos]

    def _number(self, num_bytes: int, what: str) -> int:
        return int.from_bytes(self._take(num_bytes, what), "little")

    def _count(self, what: str, least_bytes: int) -> int:
        """Read a count of things that take at least `least_bytes` each."""
        value = self._number(8, what)
        self._need(value * least_bytes, f"{what} ({value})")
        return value

    def _string(self, what: str) -> str:
        text = self._take(self._number(8, what), what)
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise self._error(f"{what}: the string before {self._pos} is not UTF-8") from error

    def _value(self, key: str) -> Any:
        kind = self._number(4, f"type of {key}")
        is_array = kind == _ARRAY
        if is_array:
            kind = self._number(4, f"element type of {key}")
        if kind != _STRING and kind not in _SCALARS:  # arrays of arrays too, as in llama.cpp
            raise self._error(f"{key} has the unknown value type {kind}")
        size = 8 if kind == _STRING else np.dtype(_SCALARS[kind]).itemsize
        count = self._count(f"length of {key}", size) if is_array else 1
        if kind == _STRING:
            values = [self._string(key) for _ in range(count)]
        else:
            values = np.frombuffer(self._take(count * size, key), _SCALARS[kind]).tolist()
        return values if is_array else values[0]

    def _read_header(self) -> None:
        if (magic := self._map[:4]) != b"GGUF":
            raise ModelError(f"{self.path} is not a GGUF file: it begins with {magic!r}, not b'GGUF'.")
        self._pos = 4
        version = self._number(4, "version")
        if version not in (2, 3):
            raise self._error(f"GGUF version {version} is not supported, only 2 and 3 (little-endian)")
        num_tensors = self._count("number of tensors", 24)  # the least that one description can take
        for _ in range(self._count("number of metadata keys", 12)):
            key = self._string("a metadata key")
            self.metadata[key] = self._value(key)
        for _ in range(num_tensors):
            name = self._string("a tensor's name")
            if name in self.tensors:
                raise self._error(f"tensor {name} occurs twice")
            self.tensors[name] = self._tensor_info(name)

        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
            raise self._error(f"general.alignment is {alignment!r}, which is not a power of two from 8 on")
        data_start = -(-self._pos // alignment) * alignment
        for name, info in self.tensors.items():
            if info.offset % alignment:
                raise self._error(f"tensor {name} has offset {info.offset}, which is not a multiple of {alignment}")
            offset = data_start + info.offset
            if offset + info.nbytes > len(self._map):
                raise self._error(f"tensor {name} ends at byte {offset + info.nbytes}, beyond the file's end")
            self.tensors[name] = info._replace(offset=offset)

    def _tensor_info(self, name: str) -> TensorInfo:
        """Read one tensor's description, in which the offset counts from where the tensor data starts."""
        dims = self._number(4, f"number of dimensions of {name}")
        if not 1 <= dims <= 4:
            raise self._error(f"tensor {name} has {dims} dimensions, expected 1 to 4")
        shape = tuple(self._number(8, f"shape of {name}") for _ in range(dims))[::-1]
        type_id = self._number(4, f"type of {name}")
        try:
            kind = gguf.GGMLQuantizationType(type_id)
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise self._error(f"tensor {name} has the unknown quantisation type {type_id}") from None
        if 0 in shape or shape[-1] % block:
            raise self._error(f"tensor {name} has shape {shape}; rows must be multiples of {block} ({kind.name})")
        nbytes = math.prod(shape) // block * block_bytes  # Python's integers cannot overflow
        return TensorInfo(shape, kind, self._number(8, f"offset of {name}"), nbytes)


def _dequantize(blocks: torch.Tensor, kind: gguf.GGMLQuantizationType) -> torch.Tensor:
    """Return the weights of `blocks`, uint8 `[blocks, bytes]`, as float32 `[blocks, weights of a block]`.

    gguf.dequantize knows all types, but is several times slower on the two that the course's model is made of.
    """
    if kind.name == "Q8_0":  # a scale and 32 signed bytes q; weight = scale * q
        return blocks[:, 2:].view(torch.int8).float().mul_(_half(blocks, 0))
    if kind.name == "Q4_1":  # a scale, a minimum, 16 bytes: their low halves, then their high; scale * q + minimum
        packed = blocks[:, 4:]
        return torch.cat((packed & 15, packed >> 4), 1).float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))
    return torch.from_numpy(gguf.dequantize(blocks.numpy(), kind))


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Return the half-precision number at byte `start` of each block, as float32 `[blocks, 1]`."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()
