"""Data sets of the Hugging Face hub: which of a repository's files are a split, and their download.

A repository lists its subsets and splits in its card (`configs` of README.md), or names files after
splits: `data/train-00000-of-00002.parquet`, `main/test.jsonl`, `default/train/0000.parquet`.
"""

import fnmatch
import glob
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import huggingface_hub
import yaml
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from distflow_jax.data.row_checks import listed
from distflow_jax.did_you_mean import suggestion
from distflow_jax.parsing.json_text import read_text
from distflow_jax.parsing.yaml_text import MOST_BYTES, load_yaml

SPEC = re.compile(
    r"hf:(?P<repo>[^@:]+)(@(?P<revision>[^:]+))?(:((?P<subset>.+)/)?(?P<split>[^/]+))?"
)
# a name of the hub without its `hf:`, with all that may follow
WITHOUT_SCHEME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[^:]+)?(:.+)?")
ENDINGS = (".parquet", ".arrow", ".jsonl", ".json", ".csv")  # the first that a split has is read
_CARD = "README.md"
_NO_DATA = {"config.json", "dataset_dict.json", "dataset_info.json", "dataset_infos.json"} | {
    "state.json"
}
_REFUSED = (RepositoryNotFoundError, RevisionNotFoundError, GatedRepoError, HFValidationError)
# HfHubHTTPError extends the errors of the HTTP library of its version, as a refused connection is
_UNREACHABLE = (*HfHubHTTPError.__bases__, OSError)
_HEADER = re.compile(r"\s*---[ \t]*\r?\n(.*?)\n---", re.DOTALL)  # of a card: YAML
_SHARD = re.compile(r"(.+)-\d+-of-\d+")
_WORD = re.compile(
    r"(?:^|[-._ ])(train|training|test|testing|validation|valid|val|dev|eval|evaluation)"
    r"(?=[-._ \d]|$)"
)


class Split(NamedTuple):
    """A split of a subset ("": the files lie at the top) and its files, paths in the repository."""

    subset: str
    name: str
    files: Sequence[str]

    def __str__(self) -> str:
        return f"{self.subset}/{self.name}" if self.subset else self.name


def download(spec: str) -> tuple[str, list[Path]]:
    """(repository, paths of one split's files in the cache); the default split is "train".

    Only the files of that split are downloaded; without a network the cached files are used.
    HF_TOKEN gives access to gated data sets.

    Raises:
      ValueError: a malformed name, or no such repository or revision.
      FileNotFoundError: no files of that split, or neither cache nor hub is available.
    """
    match = SPEC.fullmatch(spec)
    if not match:
        raise ValueError(f"{spec!r} is not of the form hf:ORG/NAME[@REVISION][:[SUBSET/]SPLIT]")
    repo = match["repo"]
    at = {"repo_type": "dataset", "revision": match["revision"]}
    try:
        files, cached = _listing(repo, at)
        where = " (in the cache; the hub is not reachable)" if cached else ""
        configs = _configs(_fetched(repo, [_CARD], cached, at) / _CARD) if _CARD in files else []
        chosen = choose(
            files, configs, match["subset"], match["split"] or "train", f"{spec!r}{where}"
        )
        folder = _fetched(repo, chosen, cached, at)
    except LocalEntryNotFoundError as error:
        raise FileNotFoundError(
            f"cannot open {spec!r}: it is not in the cache and the hub is not reachable "
            f"({str(error).splitlines()[0]})"
        ) from error
    except (HfHubHTTPError, HFValidationError) as error:
        raise ValueError(f"cannot open {spec!r}: {str(error).splitlines()[0]}") from error
    return repo, [folder / file for file in chosen]


def _listing(repo: str, at: Mapping[str, Any]) -> tuple[list[str], Path | None]:
    """(all files of a repository, None); without a network (files in the cache, their folder)."""
    try:
        return huggingface_hub.HfApi().list_repo_files(repo, **at), None
    except _REFUSED:
        raise
    except _UNREACHABLE:
        kept = {"local_files_only": True, "allow_patterns": []}
        folder = Path(huggingface_hub.snapshot_download(repo, **kept, **at))
    return [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()], folder


def _fetched(repo: str, files: Iterable[str], cached: Path | None, at: Mapping[str, Any]) -> Path:
    """The folder that has these files of a repository, which are downloaded unless `cached`."""
    if cached:
        return cached
    patterns = [glob.escape(file) for file in files]
    return Path(huggingface_hub.snapshot_download(repo, allow_patterns=patterns, **at))


def _configs(card: Path) -> list[Any]:
    """The subsets that a repository's card lists; none in a card that cannot be read."""
    try:
        header = _HEADER.match(read_text(card, MOST_BYTES, "card"))
        found = load_yaml(header[1]) if header else None
    except (ValueError, yaml.YAMLError):
        return []
    configs = found.get("configs") if isinstance(found, dict) else None
    return configs if isinstance(configs, list) else []


def choose(
    files: Iterable[str], configs: Sequence[Any], subset: str | None, split: str, what: str
) -> list[str]:
    """The files of one split, sorted, all of one format. Raises FileNotFoundError if there are
    none, ValueError if several subsets have it.

    `configs`: of the card. `what` is the data set in messages.

    >>> choose(["main/train-0.parquet", "main/test-0.parquet"], [], None, "train", "hf:a/b")
    ['main/train-0.parquet']
    """
    names = [file for file in files if PurePosixPath(file).name not in _NO_DATA]
    data = sorted(file for file in names if file.endswith(ENDINGS))
    listed_splits, named = list(_of_card(configs, data)), _of_names(data)
    for splits in (listed_splits, named):
        found = [
            one
            for one in splits
            if one.name == split and (subset is None or f"/{one.subset}".endswith(f"/{subset}"))
        ]
        if len(found) > 1:
            subsets = sorted(one.subset for one in found)
            raise ValueError(
                f"{what} has several subsets with a split {split!r}: {', '.join(subsets)}; "
                f"name one: :{subsets[0]}/{split} at the end"
            )
        if found:
            ending = next(e for e in ENDINGS if any(f.endswith(e) for f in found[0].files))
            return [file for file in found[0].files if file.endswith(ending)]
    raise _no_split(what, subset, split, listed_splits or named, names)


def _no_split(
    what: str, subset: str | None, split: str, splits: Sequence[Split], files: Collection[str]
) -> FileNotFoundError:
    """The error for a split that is not there, with those that are."""
    wanted = f"split {split!r}" + (f" in subset {subset!r}" if subset else "")
    if not splits:
        others = sorted({PurePosixPath(file).suffix for file in files} - {"", ".md"})
        return FileNotFoundError(
            f"{what} has no files of {wanted}, nor any other that is read "
            f"({', '.join(ENDINGS)}); found {listed(others)}. Many data sets in other formats have "
            "Parquet files at revision refs/convert/parquet"
        )
    names = sorted({str(one) for one in splits})
    near = suggestion(f"{subset}/{split}" if subset else split, names, ":{} at the end".format)
    hint = f"; {near}" if near else ""
    return FileNotFoundError(f"{what} has no {wanted}; it has {listed(names)}{hint}")


def _of_card(configs: Sequence[Any], files: Sequence[str]) -> Iterator[Split]:
    """The splits that a card lists, as far as files of theirs can be read."""
    for config in configs:
        if not isinstance(config, dict):
            continue
        subset, data = str(config.get("config_name", "default")), config.get("data_files")
        if data is None and isinstance(folder := config.get("data_dir"), str):
            inside = [file for file in files if _matches(folder, file)]
            yield from (one._replace(subset=subset) for one in _of_names(inside))
            continue
        if isinstance(data, list) and all(isinstance(x, dict) for x in data):
            paths = {str(x.get("split")): x.get("path") for x in data}
        else:
            paths = data if isinstance(data, dict) else {"train": data}
        for name, patterns in paths.items():
            patterns = patterns if isinstance(patterns, list) else [patterns]
            found = [f for f in files if any(_matches(p, f) for p in patterns)]
            if found:
                yield Split(subset, str(name), found)


def _of_names(files: Sequence[str]) -> list[Split]:
    """The splits that names of files and folders tell; files without any are those of "train"."""
    found: dict[tuple[str, str], list[str]] = {}
    told = {file: _split_in_name(PurePosixPath(file)) for file in files}
    if files and not any(told.values()):
        return [Split("", "train", files)]
    for file, names in told.items():
        path = PurePosixPath(file)
        found.setdefault(names or (_folder(path.parent), path.stem), []).append(file)
    return [Split(subset, name, inside) for (subset, name), inside in found.items()]


def _split_in_name(path: PurePosixPath) -> tuple[str, str] | None:
    """(subset, split) of a file, None for a name without a split."""
    shard = _SHARD.fullmatch(path.stem)
    base = shard[1] if shard else path.stem
    if shard and base not in ("data", "part"):
        return _folder(path.parent), base
    if word := _WORD.search(base):
        return _folder(path.parent), word[1]
    if path.parent.name and (shard or base.isdecimal() or _WORD.fullmatch(path.parent.name)):
        return _folder(path.parent.parent), path.parent.name
    return None


def _folder(path: PurePosixPath) -> str:
    return "" if path == PurePosixPath(".") else str(path)


def _matches(pattern: Any, file: str) -> bool:
    """Whether a file's path matches a pattern of a card: `main/train-*`, `**/*.json`, a folder."""
    parts, names = PurePosixPath(str(pattern)).parts, PurePosixPath(file).parts
    return _match_parts(parts, names) or _match_parts((*parts, "**"), names)


def _match_parts(parts: Sequence[str], names: Sequence[str]) -> bool:
    if not parts:
        return not names
    if parts[0] == "**":
        return any(_match_parts(parts[1:], names[i:]) for i in range(len(names) + 1))
    return (
        bool(names)
        and fnmatch.fnmatchcase(names[0], parts[0])
        and _match_parts(parts[1:], names[1:])
    )
