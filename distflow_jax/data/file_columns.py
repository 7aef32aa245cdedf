"""Columns of a data file -> Example: verl's names, TRL's names, and plain question/answer rows.

| columns                     | prompt                     | ground truth                        |
|-----------------------------|----------------------------|-------------------------------------|
| prompt [, reward_model, ..] | as it is                   | reward_model.ground_truth, else     |
|                             |                            | ground_truth, answer or solution    |
| prompt, chosen, rejected    | as it is; beside two whole | as above                            |
|                             | conversations see below    |                                     |
| messages                    | all but the last turn, if  | as above, else that turn, which is  |
|                             | that is the assistant's    | `chosen` too                        |
| question, answer            | a user's chat message      | the answer; after its `####` if any |
| question, ground_truth ..   | a user's chat message      | as above                            |
| question, chosen [, rej..]  | a user's chat message      | as above                            |
| chosen, rejected            | their common beginning     | as above                            |
| conversations               | as messages (MM-Eureka,    | as above                            |
|                             | ShareGPT)                  |                                     |

Images of `images`, `image` or `image_urls`, and of parts of messages: pictures/image_columns.py.
Messages may be JSON text of them, and have ShareGPT's `from` and `value`: message_forms.py. `tools`
and `chat_template_kwargs` are variables of the chat template.
A `completion` beside a prompt, messages or a question is `chosen`. A row has one answer: a
completion beside `chosen`, or either of them beside another last turn of the assistant's, is an
error. A text `prompt` beside two whole conversations must be the content of a message of their
common beginning, which then is the prompt, with its roles.

`data.columns` reads columns of other names as these (column_choice.py). All other columns go to
`extra_info`, where reward functions find them, as None where a row has null.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from distflow_jax.data.column_choice import TRAINING, ColumnsKey, chosen_columns
from distflow_jax.data.example import Conversation, Example, Message, instruction
from distflow_jax.data.message_forms import (
    VARIABLES,
    answer_of,
    is_conversation,
    last_turn,
    split_pair,
    template_variables,
)
from distflow_jax.data.pictures.image_columns import (
    CONVERSATIONS,
    IMAGE_COLUMNS,
    check_answers,
    place_images,
    take_images,
)
from distflow_jax.data.pictures.image_paths import ImageFolders
from distflow_jax.data.row_checks import (
    bad_value,
    checked_prompt,
    checked_text,
    column_hint,
    shown,
)

PROMPT_COLUMNS = ("prompt", "messages", "question", "chosen", "rejected")
GROUND_TRUTH_COLUMNS = ("ground_truth", "answer", "solution")
# They have a field of their own in Example and are not repeated in extra_info.
CLAIMED_COLUMNS = {
    "prompt",
    "messages",
    "chosen",
    "rejected",
    "completion",
    "data_source",
    "ability",
    "reward_model",
    "ground_truth",
    "extra_info",
    *IMAGE_COLUMNS,
}
HERE = ImageFolders(Path("."))
NUMBER_WITH_COMMAS = re.compile(r"-?\$?[0-9]{1,3}(,[0-9]{3})+(\.[0-9]+)?")


def example_from_row(
    row: Any,
    place: str,
    *,
    data_source: str,
    system_prompt: str = "",
    prompt_suffix: str = "",
    columns: Mapping[str, str] = MappingProxyType({}),
    columns_key: ColumnsKey = TRAINING,
    folders: ImageFolders = HERE,
) -> Example:
    """Converts and checks one row.

    Args:
      row: column name -> value; null columns count as absent.
      place: file and row number, the start of every error message.
      data_source: value for rows without that column.
      system_prompt, prompt_suffix: added to question/answer rows; an error for other rows, whose
        prompts are complete.
      columns: {name that this module knows: name in the file}, `data.columns`.
      columns_key: the config key of `columns`, for error messages.
      folders: where the row's images may lie.

    Raises:
      ValueError: the row does not fit the schema.
    """
    if not isinstance(row, dict):
        raise ValueError(f"{place}: expected an object with columns, got {shown(row)}")
    row = chosen_columns(row, columns, place, columns_key)
    nulls = dict.fromkeys(column for column, value in row.items() if value is None)
    row = {column: value for column, value in row.items() if value is not None}
    _check_prompts(row, place, columns, columns_key.changes)
    row, image_column = take_images(row, place)
    check_answers(row, place)
    if "rejected" in row and "chosen" not in row:
        hint = column_hint(["chosen"], row, columns_key.changes)
        raise bad_value(place, "chosen", f"missing, although there is a 'rejected'; {hint}")
    asked = "question" in row and not {"prompt", "messages"} & set(row)
    if (system_prompt or prompt_suffix) and not asked:
        raise ValueError(
            f"{place}: data.system_prompt and data.prompt_suffix apply to question/answer rows "
            "and tasks; these prompts are complete, so leave both empty"
        )
    prompt, chosen, rejected, fallback_truth = _prompt_and_answers(row, place, columns_key.changes)
    if asked:
        prompt = instruction(prompt, system_prompt=system_prompt, prompt_suffix=prompt_suffix)
    answer_column = "completion" if "completion" in row else "chosen"
    for column, value in ((answer_column, chosen), ("rejected", rejected)):
        if value is not None and value != "":  # an empty answer is an end token
            checked_prompt(value, place, column)
    asked_in_pair, rejected = last_turn(prompt, rejected, place, "rejected")
    prompt, chosen = last_turn(prompt, chosen, place, answer_column)
    if rejected is not None and prompt != asked_in_pair:
        raise bad_value(place, "rejected", "has other messages before its answer than 'chosen'")
    prompt, images = place_images(prompt, image_column, folders, place)
    if variables := template_variables(row, place):
        if isinstance(prompt, str):
            problem = "is for the chat template, and this prompt is text: leave it out"
            raise bad_value(place, next(c for c in VARIABLES if row.get(c)), problem)
        prompt = Conversation(prompt)
        prompt.variables = variables

    return Example(
        prompt=prompt,
        data_source=checked_text(row.get("data_source", data_source), place, "data_source"),
        ground_truth=_ground_truth(row, place, fallback_truth),
        extra_info=_extra_info(nulls | row, place),
        ability=checked_text(row["ability"], place, "ability") if row.get("ability") else "",
        chosen=chosen,
        rejected=rejected,
        images=images,
    )


def _check_prompts(row: dict[str, Any], place: str, columns: Mapping[str, str], key: str) -> None:
    """Raises ValueError for a second prompt, and for a part of it that would not be read."""
    prompts = [name for name in ("prompt", "messages", CONVERSATIONS) if row.get(name)]
    if len(prompts) > 1 and not {"chosen", "completion"} & set(row):
        choice = " or ".join(f"{key}={{{name!r}: {name!r}}}" for name in prompts)
        problem = f"is a prompt, and so is {prompts[0]!r}; {choice} reads one of them"
        raise bad_value(place, prompts[1], problem)
    if prompts in ([], [CONVERSATIONS]):
        # of ShareGPT and OpenOrca, and of Alpaca
        parts = ["system", "system_prompt"] + ["input"] * ("instruction" in columns.values())
        for part in [part for part in parts if isinstance(row.get(part), str) and row[part]]:
            problem = "a part of the prompt that would not be read: write it into messages of a"
            raise bad_value(place, part, f"{problem} column 'prompt', or rename the column")


def _prompt_and_answers(row: dict[str, Any], place: str, key: str) -> tuple[Any, Any, Any, Any]:
    """(prompt or question, chosen, rejected, ground truth without a column of its own).

    Adds the final answer of a question/answer row to it as `ground_truth`. `key` is the config key
    that changes the choice of columns.
    """
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if chosen is not None and "completion" in row:
        raise bad_value(
            place,
            "completion",
            f"is an answer, and so is 'chosen'; {key}={{'completion': 'completion'}} or "
            f"{key}={{'chosen': 'chosen'}} reads one of them",
        )
    given = row.get("completion", chosen)
    if "prompt" in row:
        prompt = checked_prompt(row["prompt"], place, "prompt", parts=True)
        if isinstance(prompt, str) and is_conversation(chosen) and is_conversation(rejected):
            return *_split_pair_of_prompt(prompt, chosen, rejected, place), None
        return prompt, given, rejected, None
    if "messages" in row:
        prompt, last = _split_messages(row["messages"], place)
        if last is not None and given not in (None, last):
            other = "completion" if "completion" in row else "chosen"
            problem = f"ends with the assistant's answer, and {other!r} is another: leave one out"
            raise bad_value(place, "messages", problem)
        truth = last[0].get("content") if isinstance(last, list) else last
        return prompt, given if last is None else last, rejected, truth
    if "question" in row:
        question = checked_text(row["question"], place, "question")
        if "answer" in row:
            row.setdefault("ground_truth", final_answer(row["answer"], place))
        elif given is None and not {"reward_model", *GROUND_TRUTH_COLUMNS} & set(row):
            others = [column for column in row if column != "question"]
            hint = column_hint(["answer"], others, key)
            raise bad_value(place, "answer", f"missing, although there is a question; {hint}")
        return question, given, rejected, None
    if rejected is not None:
        return *split_pair(chosen, rejected, place), None
    raise ValueError(
        f"{place}: none of the columns 'prompt', 'messages' and 'question' has a value, nor have "
        f"'chosen' and 'rejected'; {column_hint(PROMPT_COLUMNS, row, key)}"
    )


def _split_pair_of_prompt(
    prompt: str, chosen: Any, rejected: Any, place: str
) -> tuple[list[Message], str, str]:
    """`split_pair` of conversations that begin with the prompt, which lacks its role as text."""
    beginning, *answers = split_pair(chosen, rejected, place)
    if prompt.strip() not in [message.get("content", "").strip() for message in beginning]:
        raise bad_value(
            place,
            "prompt",
            f"{shown(prompt)} is in no message with which 'chosen' and 'rejected' begin, and "
            "would not be read: add it to them as a message, or leave it out",
        )
    return beginning, *answers


def final_answer(answer: Any, place: str) -> str:
    """The final answer after GSM8K's `####`, `#### 1,234` -> "1234"; other answers unchanged."""
    if (
        isinstance(answer, int | float)
        and not isinstance(answer, bool)
        and -math.inf < answer < math.inf
    ):
        return str(answer)  # NaN is a null of pandas
    answer = checked_text(answer, place, "answer")
    final = answer.rsplit("####", 1)[-1].strip()
    if not final:
        raise bad_value(place, "answer", "nothing follows its '####'")
    if "####" in answer and NUMBER_WITH_COMMAS.fullmatch(final):
        final = final.replace(",", "")
    return final


def _ground_truth(row: dict[str, Any], place: str, fallback: Any) -> Any:
    reward_model = row.get("reward_model")
    if reward_model is not None:
        if not isinstance(reward_model, dict):
            problem = f"expected an object with 'ground_truth', got {shown(reward_model)}"
            raise bad_value(place, "reward_model", problem)
        if reward_model.get("ground_truth") is not None:
            return reward_model["ground_truth"]
        if reward_model.get("style", "rule") == "rule":
            raise bad_value(place, "reward_model", "has no 'ground_truth'")
    for column in GROUND_TRUTH_COLUMNS:
        if column in row:
            return row[column]
    return fallback


def _extra_info(row: dict[str, Any], place: str) -> dict[str, Any]:
    info = {} if row.get("extra_info") is None else row["extra_info"]
    if not isinstance(info, dict):
        raise bad_value(place, "extra_info", f"expected an object, got {shown(info)}")
    return {column: row[column] for column in row if column not in CLAIMED_COLUMNS} | info


def _split_messages(messages: Any, place: str) -> tuple[list[Message], str | list[Message] | None]:
    """(messages before the last assistant turn, that turn or None) of a conversation."""
    checked_prompt(messages, place, "messages", parts=True)
    if isinstance(messages, str):
        raise bad_value(place, "messages", "expected a list of messages, got text")
    if messages[-1]["role"] != "assistant":
        return messages, None
    if len(messages) == 1:
        raise bad_value(place, "messages", "an assistant's turn with no question before it")
    if isinstance(messages[-1].get("content"), list):
        problem = "ends with an assistant's turn that has an image: a policy writes text alone"
        raise bad_value(place, "messages", problem)
    return messages[:-1], answer_of(messages[-1])
