"""The rows of a data set whose prompts and answers are short enough."""

import dataclasses
import sys

import numpy as np

from distflow_jax.data.tokens.encoded_rows import EncodedRows

OVERLONG = ("error", "drop", "truncate_left")

Found = tuple[np.ndarray, dict[str, int]]  # rows int64 [N], and how many were left out, by reason


@dataclasses.dataclass(frozen=True)
class RowLimits:
    """Tokens that a row may have, and what becomes of others."""

    prompt: int
    answer: int
    overlong: str  # one of OVERLONG


def rows_in_limit(encoded: EncodedRows, most: RowLimits) -> Found:
    """The rows that a run issues, and how many it leaves out for their prompt, images or answer.

    Over the whole data set, before it is divided: processes that dropped rows from their own shares
    would run out of prompts at different steps, and wait for each other forever. Raises ValueError
    for an overlong row where none may be, and if no row is left.
    """
    dataset = encoded.dataset
    rows = np.arange(len(dataset), dtype=np.int64)
    if most.overlong == "truncate_left":
        return _rows_cut_left(encoded, rows, most)
    lengths = [encoded.lengths(row, most.prompt) for row in map(int, rows)]
    table = np.array(lengths, np.int64).reshape(-1, 3)
    prompts, images, answers = table.T
    limits = (
        ("prompt", prompts, "data.max_prompt_length", most.prompt),
        ("answer", answers, "rollout.max_response_length", most.answer),
    )
    for what, lengths, name, limit in limits[: 2 if encoded.num_answers else 1]:
        overlong = lengths > limit
        if most.overlong == "error" and overlong.any():
            row = int(overlong.argmax())
            of_images, fix = "", ""
            if what == "prompt" and images[row]:
                of_images = f", {images[row]} of them for its images"
                fix = ", lower data.image_tokens"
            raise ValueError(
                f"{dataset.place(row)}: the {what} has {lengths[row]} tokens{of_images}, more "
                f"than {name} {limit} ({overlong.sum()} of {len(dataset)} rows do, the longest "
                f"{lengths.max()}); raise that{fix}, or set data.overlong to drop or "
                "truncate_left"
            )
        if overlong.all():
            raise ValueError(
                f"{dataset.name}: all {len(dataset)} {what}s have more tokens than {name} "
                f"{limit}, the shortest {lengths.min()}"
            )
    by_text = prompts - images > most.prompt
    by_images = ~by_text & (prompts > most.prompt)
    by_answer = ~by_text & ~by_images & (answers > most.answer) & bool(encoded.num_answers)
    reasons = {"prompt": by_text, "images": by_images, "answer": by_answer}
    keep = ~(by_text | by_images | by_answer)
    if not keep.any():
        raise ValueError(f"{dataset.name}: no row has a prompt and answers within the limits")
    return rows[keep], {why: int(which.sum()) for why, which in reasons.items() if which.any()}


def _rows_cut_left(encoded: EncodedRows, rows: np.ndarray, most: RowLimits) -> Found:
    """The rows of which something is left. A cut leaves out images whole."""
    dataset = encoded.dataset
    empty = np.zeros(len(rows), bool)
    for row in map(int, rows):
        try:
            encoded.lengths(row, sys.maxsize)
        except StopIteration:  # rows that a program puts while the run trains
            break
        if dataset.first_image_row is not None and dataset[row].images:
            empty[row] = not len(encoded.place(row).last(most.prompt)[0].tokens)
    if empty.all():
        raise ValueError(
            f"{dataset.name}: the images of all {len(rows)} prompts have more tokens than "
            f"data.max_prompt_length {most.prompt}, and stand last: raise that, or lower "
            "data.image_tokens"
        )
    return rows[~empty], {"images": int(empty.sum())} if empty.any() else {}
