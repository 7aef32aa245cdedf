"""Data sets by their name in the config: files, generated tasks, and those of the hub."""

from collections.abc import Mapping
from types import MappingProxyType

from distflow_jax.data import files, generated_tasks, hub
from distflow_jax.data.column_choice import TRAINING, ColumnsKey
from distflow_jax.data.example import Dataset
from distflow_jax.data.pictures.image_paths import check_root
from distflow_jax.data.row_share import RowShare
from distflow_jax.did_you_mean import suggestion

SCHEMES = ("hf", "task")


def open_dataset(
    spec: str,
    *,
    system_prompt: str = "",
    prompt_suffix: str = "",
    columns: Mapping[str, str] = MappingProxyType({}),
    columns_key: ColumnsKey = TRAINING,
    image_root: str = "",
    share: RowShare | None = None,
    truth_for: str = "",
) -> Dataset:
    """Opens and checks a whole data set.

    Args:
      spec: a `.jsonl`, `.json` (lines or one array), `.csv`, `.parquet`, `.arrow` or `.feather`
        file; a folder or glob pattern of such files; `hf:ORG/NAME[@REVISION][:[SUBSET/]SPLIT]`;
        `task:NAME?option=value&...`.
      system_prompt: system message before every question of question/answer rows and tasks.
      prompt_suffix: text after every such question, e.g. " Answer with just the number."
      columns: {column that this package reads: its name in the file}, see column_choice.py.
      columns_key: the config key of `columns`, for error messages.
      image_root: folder of the images of files, `data.image_root`; "": beside the data file.
      share: the rows of files that this process checks; with several processes, all must call.
      truth_for: the reward function that compares with each row's ground truth; "": none does.

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
    if is_generated(spec):
        return generated_tasks.open_task(spec, **wording)
    if colon and kind == "hf":
        repo, paths = hub.download(spec)
        opened = files.FileDataset(paths, spec, data_source=repo, **choice, **wording)
    else:
        near = suggestion(kind, SCHEMES, lambda near: f"{near}:{spec[len(kind) + 1 :]}")
        if near and colon:
            raise ValueError(f"unknown kind of data set {spec!r}; {near}")
        opened = files.FileDataset(files.find_files(spec), spec, **choice, **wording)
    opened = files.check_rows(opened, share)
    if truth_for and (missing := opened.without_truth):
        raise ValueError(
            f"{opened.place(missing[0])}: the ground truth is missing or empty, and "
            f"reward.function={truth_for!r} compares with it ({len(missing)} of "
            f"{len(opened)} rows have none): fill it in, leave the rows out, or name its column "
            "in data.columns"
        )
    return opened


def is_generated(spec: str) -> bool:
    """Whether a data set is computed rather than read from files."""
    return spec.startswith("task:")
