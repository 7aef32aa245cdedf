"""Data sets by their name in the config."""

from collections.abc import Mapping
from types import MappingProxyType

from distflow_jax.data import files, generated_tasks, huggingface, reasoning_gym_tasks
from distflow_jax.data.column_choice import TRAINING, ColumnsKey
from distflow_jax.data.example import Dataset
from distflow_jax.data.pictures.image_paths import check_root
from distflow_jax.did_you_mean import nearest

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
) -> Dataset:
    """Opens and checks a whole data set.

    Args:
      spec: a `.jsonl`, `.json` (lines or one array), `.parquet`, `.arrow` or `.feather` file; a
        folder or glob pattern of such files; `hf:ORG/NAME[@REVISION][:[SUBSET/]SPLIT]`;
        `task:NAME?option=value&...`; `reasoning_gym:NAME?...`.
      system_prompt: system message before every question of question/answer rows and tasks.
      prompt_suffix: text after every such question, e.g. " Answer with just the number."
      columns: {column that this package reads: its name in the file}, see column_choice.py.
      columns_key: the config key of `columns`, for error messages.
      image_root: folder of the images of files, `data.image_root`; "": beside the data file.

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
        return reasoning_gym_tasks.ReasoningGym(spec, **wording)
    if colon and kind == "hf":
        repo, paths = huggingface.download(spec)
        return files.FileDataset(paths, spec, data_source=repo, **choice, **wording)
    near = nearest(kind, SCHEMES)
    if near and colon:
        raise ValueError(f"unknown kind of data set {spec!r}; did you mean {near}:?")
    return files.FileDataset(files.find_files(spec), spec, **choice, **wording)


def is_generated(spec: str) -> bool:
    """Whether a data set is computed rather than read from files."""
    kind, colon, _ = spec.partition(":")
    return bool(colon) and kind in GENERATED
