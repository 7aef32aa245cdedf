"""Columns of a data file -> Example: verl's names, TRL's names, and plain question/answer rows.

| columns                     | prompt                     | ground truth                        |
|-----------------------------|----------------------------|-------------------------------------|
| prompt [, reward_model, ..] | as it is                   | reward_model.ground_truth, else     |
|                             |                            | ground_truth, answer or solution    |
| prompt, completion          | as it is                   | as above; completion is `chosen`    |
| prompt, chosen, rejected    | as it is                   | as above                            |
| messages                    | all but the last turn, if  | as above, else that turn, which is  |
|                             | that is the assistant's    | `chosen` too                        |
| question, answer            | a user's chat message      | the answer; after its `####` if any |

All other columns go to `extra_info`, where reward functions find them.
"""

import re
from typing import Any

from distflow_jax.data.example import Example, Message, instruction

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
    "images",
}
NUMBER_WITH_COMMAS = re.compile(r"-?\$?[0-9]{1,3}(,[0-9]{3})+(\.[0-9]+)?")


def example_from_row(
    row: Any,
    place: str,
    *,
    data_source: str,
    system_prompt: str = "",
    prompt_suffix: str = "",
) -> Example:
    """Converts and checks one row.

    Args:
      row: column name -> value; null columns count as absent.
      place: file and row number, the start of every error message.
      data_source: value for rows without that column.
      system_prompt, prompt_suffix: added to question/answer rows; an error for other rows, whose
        prompts are complete.

    Raises:
      ValueError: the row does not fit the schema.
    """
    if not isinstance(row, dict):
        raise ValueError(f"{place}: expected an object with columns, got {_shown(row)}")
    row = {column: value for column, value in row.items() if value is not None}
    if row.get("images"):
        raise _bad(place, "images", "image prompts are not supported by the text models")

    chosen, rejected = row.get("chosen"), row.get("rejected")
    fallback_truth, written_out = None, True
    if "prompt" in row:
        prompt = _prompt(row["prompt"], place, "prompt")
        chosen = row.get("completion", chosen)
    elif "messages" in row:
        prompt, chosen = _split_messages(row["messages"], place)
        if chosen is not None:
            fallback_truth = chosen
    elif "question" in row:
        question = _text(row["question"], place, "question")
        if "answer" not in row:
            raise _bad(place, "answer", "missing, although there is a question")
        prompt = instruction(question, system_prompt=system_prompt, prompt_suffix=prompt_suffix)
        row.setdefault("ground_truth", final_answer(row["answer"], place))
        written_out = False
    else:
        raise ValueError(
            f"{place}: none of the columns 'prompt', 'messages' and 'question' has a value; "
            f"found {', '.join(map(repr, row)) or 'no columns'}"
        )
    if written_out and (system_prompt or prompt_suffix):
        raise ValueError(
            f"{place}: data.system_prompt and data.prompt_suffix apply to question/answer rows "
            "and tasks; these prompts are complete, so leave both empty"
        )
    if "rejected" in row and "chosen" not in row:
        raise _bad(place, "chosen", "missing, although there is a 'rejected'")
    for column, value in (("chosen", chosen), ("rejected", rejected)):
        if value is not None:
            _prompt(value, place, column)

    return Example(
        prompt=prompt,
        data_source=_text(row.get("data_source", data_source), place, "data_source"),
        ground_truth=_ground_truth(row, place, fallback_truth),
        extra_info=_extra_info(row, place),
        ability=_text(row["ability"], place, "ability") if row.get("ability") else "",
        chosen=chosen,
        rejected=rejected,
    )


def final_answer(answer: Any, place: str) -> str:
    """The final answer after GSM8K's `####`, `#### 1,234` -> "1234"; other answers unchanged."""
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        return str(answer)
    answer = _text(answer, place, "answer")
    final = answer.rsplit("####", 1)[-1].strip()
    if not final:
        raise _bad(place, "answer", "nothing follows its '####'")
    if "####" in answer and NUMBER_WITH_COMMAS.fullmatch(final):
        final = final.replace(",", "")
    return final


def _ground_truth(row: dict[str, Any], place: str, fallback: Any) -> Any:
    reward_model = row.get("reward_model")
    if reward_model is not None:
        if not isinstance(reward_model, dict):
            raise _bad(
                place,
                "reward_model",
                f"expected an object with 'ground_truth', got {_shown(reward_model)}",
            )
        if reward_model.get("ground_truth") is not None:
            return reward_model["ground_truth"]
        if reward_model.get("style", "rule") == "rule":
            raise _bad(place, "reward_model", "has no 'ground_truth'")
    for column in GROUND_TRUTH_COLUMNS:
        if column in row:
            return row[column]
    return fallback


def _extra_info(row: dict[str, Any], place: str) -> dict[str, Any]:
    info = row.get("extra_info", {})
    if not isinstance(info, dict):
        raise _bad(place, "extra_info", f"expected an object, got {_shown(info)}")
    return {column: row[column] for column in row if column not in CLAIMED_COLUMNS} | info


def _split_messages(messages: Any, place: str) -> tuple[list[Message], str | None]:
    """(messages before the last assistant turn, that turn's text or None) of a conversation."""
    _prompt(messages, place, "messages")
    if isinstance(messages, str):
        raise _bad(place, "messages", "expected a list of messages, got text")
    if messages[-1]["role"] != "assistant":
        return messages, None
    if len(messages) == 1:
        raise _bad(place, "messages", "an assistant's turn with no question before it")
    return messages[:-1], messages[-1]["content"]


def _prompt(value: Any, place: str, column: str) -> str | list[Message]:
    if isinstance(value, str):
        return _text(value, place, column)
    if not isinstance(value, list):
        raise _bad(place, column, f"expected text or a list of messages, got {_shown(value)}")
    if not value:
        raise _bad(place, column, "an empty list of messages")
    for i, message in enumerate(value):
        if not isinstance(message, dict):
            raise _bad(place, column, f"message {i} is {_shown(message)}, not an object")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise _bad(
                    place, column, f"message {i} needs text in {key!r}, got {_shown(message)}"
                )
    return value


def _text(value: Any, place: str, column: str) -> str:
    if not isinstance(value, str) or not value:
        raise _bad(place, column, f"expected text, got {_shown(value)}")
    return value


def _bad(place: str, column: str, problem: str) -> ValueError:
    return ValueError(f"{place}, column {column!r}: {problem}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
