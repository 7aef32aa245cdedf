"""One row of a data set as the rest of the program sees it, and what a data set must offer."""

import dataclasses
from typing import Any, Protocol

Message = dict[str, str]  # {"role": "user", "content": "What is 2 + 3?"}


@dataclasses.dataclass(frozen=True)
class Example:
    """One question with what is needed to score its answers.

    `prompt` is plain text, or chat messages that the tokenizer's chat template turns into text.
    `ground_truth` is what the reward function compares with; its type is the reward function's
    business. `extra_info` holds every column without a meaning of its own. `chosen` and `rejected`
    are the two answers of a preference pair; a demonstration (TRL's `messages`, `completion`) has
    `chosen` alone.
    """

    prompt: str | list[Message]
    data_source: str
    ground_truth: Any = None
    extra_info: dict[str, Any] = dataclasses.field(default_factory=dict)
    ability: str = ""
    chosen: str | list[Message] | None = None
    rejected: str | list[Message] | None = None


class Dataset(Protocol):
    """Random access to examples. Reading a row twice gives equal examples, from any thread.

    `fingerprint` is told by the content: it changes when any row changes, and does not when a file
    is moved. `name` is what messages call the data.
    """

    name: str
    fingerprint: str

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Example: ...


def instruction(text: str, *, system_prompt: str = "", prompt_suffix: str = "") -> list[Message]:
    """Chat messages that ask `text`, after the system prompt if there is one."""
    messages = [{"role": "user", "content": text + prompt_suffix}]
    if system_prompt:
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages
