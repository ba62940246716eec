"""The GGUF reader: equal to what was written, and safe against headers that lie."""

from __future__ import annotations

import contextlib
import itertools
import random
import struct
import tracemalloc

import gguf
import helpers_models
import numpy as np
import pytest
import torch

from minillm.errors import ModelError
from minillm.gguf_file import GGUFFile
from minillm.weights import open_checkpoint

Type = gguf.GGMLQuantizationType

METADATA = {
    "test.string": "naïve 猫",
    "test.yes": True,
    "test.int": 7,
    "test.float": 0.5,
    "test.strings": [f"piece {i}" for i in range(50)] + [""],
    "test.ints": [1, 2, -3],
    "test.floats": [0.25, -1.0],
    "test.bools": [True, False],
}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A whole tiny model as F32 GGUF, with every kind of metadata value."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    changes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2,
                   "num_key_value_heads": 1, "head_dim": 16}  # fmt: skip
    tensors = helpers_models.hf_tensors("smollm2", **changes)
    return helpers_models.save_gguf(path, "smollm2", tensors, metadata=METADATA, **changes)


def header_bytes(path) -> int:
    return min(info.offset for info in GGUFFile(path).tensors.values())


def test_metadata_round_trip(small):
    metadata = GGUFFile(small).metadata
    assert {key: metadata[key] for key in METADATA} == METADATA
    assert metadata["test.yes"] is True
    reference = gguf.GGUFReader(small)
    theirs = {key: field.contents() for key, field in reference.fields.items() if not key.startswith("GGUF.")}
    assert metadata == theirs


def test_plain_tensors_equal_the_bytes_of_the_file(small):
    file = GGUFFile(small)
    info = file.tensors["token_embd.weight"]
    assert info.shape == (101, 32), "numpy order: rows first"
    assert info.nbytes == 101 * 32 * 4 and info.type == Type.F32
    raw = small.read_bytes()[info.offset : info.offset + info.nbytes]
    assert file.tensor("token_embd.weight").numpy().tobytes() == raw


QUANTISED = [Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0]


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_dequantisation_equals_the_reference(tmp_path, kind):
    values = torch.randn(70, 96).numpy()
    path = tmp_path / "t.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    packed = gguf.quantize(values, kind)
    writer.add_tensor("t", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(path)
    expected = torch.from_numpy(np.ascontiguousarray(gguf.dequantize(packed, kind)))
    got = file.tensor("t")
    assert got.dtype == torch.float32 and torch.equal(got, expected.view(70, 96))
    assert torch.equal(file.tensor("t", torch.bfloat16), expected.view(70, 96).bfloat16())


def test_q4_1_by_hand(tmp_path):
    """Scale 0.5, minimum -2, bytes 0x10 .. 0x1F: low halves 0 to 15 come first, the high halves are all 1."""
    block = np.concatenate([np.array([0.5, -2.0], np.float16).view(np.uint8), np.arange(0x10, 0x20, dtype=np.uint8)])
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("t", block[None], raw_dtype=Type.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = [0.5 * i - 2.0 for i in range(16)] + [-1.5] * 16
    assert GGUFFile(tmp_path / "t.gguf").tensor("t").tolist() == [expected]


def test_many_blocks_cross_the_chunks(tmp_path, monkeypatch):
    from minillm import gguf_file

    tensors = {"model.embed_tokens.weight": torch.randn(33, 96)}
    path = helpers_models.save_gguf(tmp_path / "t.gguf", "smollm2", tensors, Type.Q8_0)
    whole = GGUFFile(path).tensor("token_embd.weight")
    monkeypatch.setattr(gguf_file, "_CHUNK", 7 * 32)
    assert torch.equal(GGUFFile(path).tensor("token_embd.weight"), whole)


def test_unsupported_quantisation_type_is_named(tmp_path):
    path = tmp_path / "t.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("t", np.zeros((1, gguf.GGML_QUANT_SIZES[Type.Q8_K][1]), np.uint8), raw_dtype=Type.Q8_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"type Q8_K of tensor t is unsupported"):
        GGUFFile(path).tensor("t")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"PK\x03\x04" + bytes(100), bytes(1000), b"GGUF" + b"\xff" * 60])
def test_foreign_files(tmp_path, content):
    path = tmp_path / "f.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"f.gguf"):
        GGUFFile(path)


def test_missing_file(tmp_path):
    with pytest.raises(ModelError, match=r"Cannot read"):
        GGUFFile(tmp_path / "none.gguf")


def test_version_1_and_big_endian(tmp_path, small):
    for version in (struct.pack("<I", 1), struct.pack(">I", 3)):
        path = tmp_path / "v.gguf"
        path.write_bytes(b"GGUF" + version + small.read_bytes()[8:])
        with pytest.raises(ModelError, match=r"GGUF version .* is not supported"):
            GGUFFile(path)


def test_version_2_is_read(tmp_path, small):
    path = tmp_path / "v.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", 2) + small.read_bytes()[8:])
    assert GGUFFile(path).metadata == GGUFFile(small).metadata


def test_every_truncation_is_refused(tmp_path, small):
    whole = small.read_bytes()
    path = tmp_path / "short.gguf"
    end = max(info.offset + info.nbytes for info in GGUFFile(small).tensors.values())
    for length in [*range(0, header_bytes(small), 29), *range(header_bytes(small), end, 997), end - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"short.gguf"):
            GGUFFile(path)


def _fields(path) -> dict[str, int]:
    """Where the header's counts, lengths and offsets lie, found by searching for the names before them."""
    data = path.read_bytes()

    def after(name: str) -> int:
        return data.index(name.encode()) + len(name)

    return {
        "number of tensors": 8,
        "number of keys": 16,
        "length of a key": 24,
        "length of a string": after("test.string") + 4,
        "length of a string array": after("test.strings") + 8,
        "length of a string in an array": after("test.strings") + 16,
        "length of a number array": after("test.ints") + 8,
        "length of a tensor's name": after("token_embd.weight") - len("token_embd.weight") - 8,
        "first dimension": after("token_embd.weight") + 4,
        "second dimension": after("token_embd.weight") + 12,
        "tensor offset": after("token_embd.weight") + 24,
    }


HUGE = [2**16, 2**31, 2**32 - 1, 2**40, 2**61, 2**62, 2**63, 2**64 - 1, 2**64 - 32]


def test_huge_numbers_are_refused_without_taking_memory(tmp_path, small):
    whole = small.read_bytes()
    path = tmp_path / "huge.gguf"
    for (field, at), value in itertools.product(_fields(small).items(), HUGE):
        path.write_bytes(whole[:at] + struct.pack("<Q", value) + whole[at + 8 :])
        tracemalloc.start()
        with pytest.raises(ModelError, match=r"huge.gguf"):
            GGUFFile(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2 * len(whole) + 200_000, f"{field} = {value} took {peak} bytes"


def _patched(small, tmp_path, at, new):
    whole = small.read_bytes()
    path = tmp_path / "patched.gguf"
    path.write_bytes(whole[:at] + new + whole[at + len(new) :])
    return path


def test_structural_lies(tmp_path, small):
    fields = _fields(small)
    lies = [
        (fields["first dimension"], struct.pack("<Q", 0), "shape"),
        (fields["first dimension"] - 4, struct.pack("<I", 0), "0 dimensions"),
        (fields["first dimension"] - 4, struct.pack("<I", 5), "5 dimensions"),
        (fields["tensor offset"] - 4, struct.pack("<I", 999), "unknown quantisation type 999"),
        (fields["tensor offset"] - 4, struct.pack("<I", 4), "unknown quantisation type 4"),  # a removed type
        (fields["tensor offset"], struct.pack("<Q", 1), "not a multiple of 32"),
        (fields["length of a string"] - 4, struct.pack("<I", 13), "unknown value type 13"),
        (fields["length of a string"] + 8, b"\xff", "not UTF-8"),
    ]
    for at, new, message in lies:
        with pytest.raises(ModelError, match=message):
            GGUFFile(_patched(small, tmp_path, at, new))


def test_duplicates_and_nested_arrays(tmp_path, small):
    whole = small.read_bytes()
    path = tmp_path / "twice.gguf"
    path.write_bytes(whole.replace(b"blk.0.attn_k.weight", b"blk.0.attn_q.weight"))
    with pytest.raises(ModelError, match=r"blk.0.attn_q.weight occurs twice"):
        GGUFFile(path)
    deep = struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<I", 9)
    path.write_bytes(b"GGUF" + deep + struct.pack("<IQ", 9, 1) * 5000 + bytes(64))
    with pytest.raises(ModelError, match=r"k has the unknown value type 9"):
        GGUFFile(path)


@pytest.mark.parametrize("alignment, good", [(32, True), (64, True), (0, False), (1, False), (33, False)])
def test_alignment(tmp_path, alignment, good):
    tensors = {"model.norm.weight": torch.arange(96.0), "model.embed_tokens.weight": torch.ones(4, 96)}
    path = tmp_path / "a.gguf"
    if good:
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_custom_alignment(alignment)
        for name, tensor in tensors.items():
            writer.add_tensor(name, tensor.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        file = GGUFFile(path)
        assert all(torch.equal(file.tensor(name), tensor) for name, tensor in tensors.items())
    else:
        helpers_models.save_gguf(path, "smollm2", tensors, metadata={"general.alignment": 32})
        at = path.read_bytes().index(b"general.alignment") + len("general.alignment") + 4
        with pytest.raises(ModelError, match=r"power of two"):
            GGUFFile(_patched(path, tmp_path, at, struct.pack("<I", alignment)))


def test_fuzzed_headers(tmp_path, small):
    """600 mutated headers: each is refused with ModelError, or it is read within the file's bounds."""
    whole, header = small.read_bytes(), header_bytes(small)
    rng = random.Random(1)
    path = tmp_path / "fuzz.gguf"
    refused = 0
    for round_ in range(600):
        data = bytearray(whole)
        for _ in range(rng.choice([1, 1, 2, 5])):
            at = rng.randrange(header)
            match rng.randrange(5):
                case 0:
                    data[at] ^= 1 << rng.randrange(8)
                case 1:
                    data[at] = rng.choice([0, 1, 9, 127, 128, 255])
                case 2:
                    data[at : at + 8] = struct.pack("<Q", rng.choice(HUGE))
                case 3:
                    del data[at : at + rng.randrange(1, 9)]
                case 4:
                    data[at:at] = rng.randbytes(rng.randrange(1, 9))
        path.write_bytes(data)
        tracemalloc.start()
        try:
            file = GGUFFile(path)
        except ModelError as error:
            refused += 1
            assert "fuzz.gguf" in str(error)
        else:
            for info in file.tensors.values():
                assert info.offset > 0 and info.offset + info.nbytes <= len(data)
            with contextlib.suppress(ModelError):  # it may be another model now, but must not end in a traceback
                open_checkpoint(path).state_dict()
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 10 * len(whole) + 1_000_000, f"round {round_} took {peak} bytes"
    assert refused > 300


def test_mutations_of_what_nobody_reads_change_nothing(tmp_path, small):
    """The padding between header and data may hold anything."""
    whole, start = bytearray(small.read_bytes()), header_bytes(small)
    assert whole[start - 1] == 0
    clean = GGUFFile(small)
    whole[start - 1] = 255
    path = tmp_path / "padding.gguf"
    path.write_bytes(whole)
    file = GGUFFile(path)
    assert file.metadata == clean.metadata and file.tensors == clean.tensors
