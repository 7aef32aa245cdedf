"""Data sets by their name in the config: files, generated tasks, of the hub, of reasoning_gym.

`reasoning_gym:NAME?option=value&...` is opened here; hub.py finds the files of `hf:`.
"""

import hashlib
import importlib
import importlib.metadata
import json
from collections.abc import Mapping
from types import MappingProxyType, ModuleType
from typing import Any

from distflow_jax.data import files, generated_tasks, hub
from distflow_jax.data.column_choice import TRAINING, ColumnsKey
from distflow_jax.data.example import Dataset, Example, instruction
from distflow_jax.data.generated_tasks import parse_spec
from distflow_jax.data.pictures.image_paths import check_root
from distflow_jax.data.row_share import RowShare
from distflow_jax.did_you_mean import hint, suggestion

SCHEMES = ("hf", "task", "reasoning_gym")


GENERATED = ("task", "reasoning_gym")


def open_dataset(
    spec: str,
    *,
    system_prompt: str = "",
    prompt_suffix: str = "",
    columns: Mapping[str, str] = MappingProxyType({}),
    columns_key: ColumnsKey = TRAINING,
    image_root: str = "",
    share: RowShare | None = None,
) -> Dataset:
    """Opens and checks a whole data set.

    Args:
      spec: a `.jsonl`, `.json` (lines or one array), `.csv`, `.parquet`, `.arrow` or `.feather`
        file; a folder or glob pattern of such files; `hf:ORG/NAME[@REVISION][:[SUBSET/]SPLIT]`;
        `task:NAME?option=value&...`; `reasoning_gym:NAME?...`.
      system_prompt: system message before every question of question/answer rows and tasks.
      prompt_suffix: text after every such question, e.g. " Answer with just the number."
      columns: {column that this package reads: its name in the file}, see column_choice.py.
      columns_key: the config key of `columns`, for error messages.
      image_root: folder of the images of files, `data.image_root`; "": beside the data file.
      share: the rows of files that this process checks; with several processes, all must call.

    Raises:
      FileNotFoundError: there is no such file, data set or folder of images.
      ValueError: a row does not fit the schema (the message names file, row and column), or an
        option is wrong.
    """
    wording = {"system_prompt": system_prompt, "prompt_suffix": prompt_suffix}
    choice = {"columns": columns, "columns_key": columns_key, "image_root": image_root}
    check_root(image_root)  # of a task too, which reads no images: the folder is a mistake there
    kind, colon, _ = spec.partition(":")
    if not spec:
        raise ValueError("no data set is named; give a file, hf:DATASET or task:NAME")
    if columns and is_generated(spec):
        raise ValueError(
            f"{columns_key.gives} names columns of files, and {spec!r} has none: leave it empty"
        )
    if colon and kind == "task":
        return generated_tasks.open_task(spec, **wording)
    if colon and kind == "reasoning_gym":
        return ReasoningGym(spec, **wording)
    if colon and kind == "hf":
        repo, paths = hub.download(spec)
        opened = files.FileDataset(paths, spec, data_source=repo, **choice, **wording)
    else:
        near = suggestion(kind, SCHEMES, lambda near: f"{near}:{spec[len(kind) + 1 :]}")
        if near and colon:
            raise ValueError(f"unknown kind of data set {spec!r}; {near}")
        opened = files.FileDataset(files.find_files(spec), spec, **choice, **wording)
    return files.check_rows(opened, share)


def check_truths(dataset: Dataset, reward: str) -> None:
    """Raises ValueError for rows without the ground truth that a reward function compares with."""
    if missing := getattr(dataset, "without_truth", []):
        raise ValueError(
            f"{dataset.place(missing[0])}: the ground truth is missing or empty, and "
            f"reward.function={reward!r} compares with it ({len(missing)} of "
            f"{len(dataset)} rows have none): fill it in, leave the rows out, or name its column "
            "in data.columns"
        )


def is_generated(spec: str) -> bool:
    """Whether a data set is computed rather than read from files."""
    kind, colon, _ = spec.partition(":")
    return bool(colon) and kind in GENERATED


class ReasoningGym:
    """One of reasoning_gym's procedural data sets; score it with the reward `reasoning_gym`.

    Options go to the generator (`size`, `seed` and its own). `extra_info["entry"]` holds the whole
    entry, since scoring needs its metadata.
    """

    first_image_row = None

    def __init__(self, spec: str, *, system_prompt: str = "", prompt_suffix: str = ""):
        package = _package(spec)
        task, texts = parse_spec(spec)
        known = importlib.import_module("reasoning_gym.factory").DATASETS
        if task not in known:
            raise ValueError(f"reasoning_gym has no data set {task!r}; {hint(task, known)}")
        options = {"size": 10_000, "seed": 0} | {k: _value(text) for k, text in texts.items()}
        try:
            self._entries = package.create_dataset(task, **options)
        except (TypeError, AssertionError) as error:  # raised for unknown and bad options
            raise ValueError(f"{spec!r}: reasoning_gym refuses these options: {error}") from error
        self.name = f"reasoning_gym:{task}"
        self._task = task
        self._wording = {"system_prompt": system_prompt, "prompt_suffix": prompt_suffix}
        version = importlib.metadata.version("reasoning_gym")  # its code determines the rows
        self.made_by = f"reasoning_gym=={version}"
        content = json.dumps([task, options, version, self._wording], sort_keys=True)
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()[:32]

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, row: int) -> Example:
        entry = self._entries[row]
        return Example(
            prompt=instruction(entry["question"], **self._wording),
            data_source=self._task,
            ground_truth=entry["answer"],
            extra_info={"index": row, "entry": entry},
            ability="reasoning",
        )

    def place(self, row: int) -> str:
        """Name and number of a row."""
        return f"{self.name}, row {row + 1}"


def _package(spec: str) -> ModuleType:
    try:
        return importlib.import_module("reasoning_gym")
    except ModuleNotFoundError as error:
        if error.name != "reasoning_gym":
            raise
        raise ValueError(
            f"{spec!r} needs an optional package: pip install reasoning_gym"
        ) from error


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
