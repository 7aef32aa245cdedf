"""Data sets of the Hugging Face hub, `hf:ORG/NAME[@REVISION][:[SUBSET/]SPLIT]`."""

import fnmatch
import re
from pathlib import Path, PurePosixPath

import huggingface_hub

SPEC = re.compile(
    r"hf:(?P<repo>[^@:]+)(@(?P<revision>[^:]+))?(:((?P<subset>.+)/)?(?P<split>[^/]+))?"
)


def download(spec: str) -> tuple[str, list[Path]]:
    """(repository, paths of one split's Parquet files in the cache); the default split is "train".

    Only the files of that split are downloaded; without a network the cached files are used.
    HF_TOKEN gives access to gated data sets.

    Raises:
      ValueError: a malformed name, or no such repository or revision.
      FileNotFoundError: no Parquet files of that split, or neither cache nor hub is available.
    """
    match = SPEC.fullmatch(spec)
    if not match:
        raise ValueError(f"{spec!r} is not of the form hf:ORG/NAME[@REVISION][:[SUBSET/]SPLIT]")
    repo, revision, subset = match["repo"], match["revision"], match["subset"]
    split = match["split"] or "train"
    try:
        folder = huggingface_hub.snapshot_download(
            repo,
            repo_type="dataset",
            revision=revision,
            allow_patterns=split_patterns(subset, split),
        )
    except (huggingface_hub.errors.HfHubHTTPError, huggingface_hub.errors.HFValidationError) as e:
        raise ValueError(f"cannot open {spec!r}: {str(e).splitlines()[0]}") from e
    except huggingface_hub.errors.LocalEntryNotFoundError as e:
        raise FileNotFoundError(
            f"cannot open {spec!r}: it is not in the cache and the hub is not reachable "
            f"({str(e).splitlines()[0]})"
        ) from e
    files = [p.relative_to(folder).as_posix() for p in Path(folder).rglob("*.parquet")]
    return repo, [Path(folder) / file for file in split_files(files, subset, split, spec)]


def split_patterns(subset: str | None, split: str) -> list[str]:
    """Patterns of a split's files: `train-00000-of-00001.parquet`, `train/0000.parquet`.

    `*` matches slashes too, as on the hub.
    """
    prefixes = [f"{subset}/", f"*/{subset}/"] if subset else ["", "*/"]
    endings = [f"{split}-*.parquet", f"{split}.parquet", f"{split}/*.parquet"]
    return [prefix + ending for prefix in prefixes for ending in endings]


def split_files(files: list[str], subset: str | None, split: str, spec: str) -> list[str]:
    """The files of one split, sorted. Raises if there are none, or if several subsets have it.

    >>> split_files(["main/train-0.parquet", "main/test-0.parquet"], None, "train", "hf:a/b")
    ['main/train-0.parquet']
    """
    patterns = split_patterns(subset, split)
    chosen = sorted(f for f in files if any(fnmatch.fnmatchcase(f, p) for p in patterns))
    if not chosen:
        found = sorted({str(PurePosixPath(f).parent) for f in files})
        raise FileNotFoundError(
            f"{spec!r} has no Parquet files of split {split!r}"
            + (f" in subset {subset!r}" if subset else "")
            + (f"; its cached Parquet files lie in {', '.join(found)}" if found else "")
            + ". Many data sets in other formats have some at revision refs/convert/parquet"
        )
    subsets = sorted({_subset_of(f, split) for f in chosen})
    if len(subsets) > 1:
        raise ValueError(
            f"{spec!r} has several subsets with a split {split!r}: {', '.join(subsets)}; "
            f"name one, as in {':'.join(spec.split(':')[:2])}:{subsets[0]}/{split}"
        )
    return chosen


def _subset_of(file: str, split: str) -> str:
    parent = PurePosixPath(file).parent
    return str(parent.parent if parent.name == split else parent)
