"""Problems of the optional package reasoning_gym, `reasoning_gym:NAME?option=value&...`."""

import hashlib
import importlib
import importlib.metadata
import json
from types import ModuleType
from typing import Any

from distflow_jax.data.example import Example, instruction
from distflow_jax.data.spec import parse_spec
from distflow_jax.did_you_mean import several


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
            near = several(task, known, 3, 0.4) or sorted(known)
            raise ValueError(
                f"reasoning_gym has no data set {task!r}; did you mean {', '.join(near)}?"
            )
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
