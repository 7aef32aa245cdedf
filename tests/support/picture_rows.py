"""Data files whose questions have pictures, and questions that only mention one."""

import json

import numpy as np
import PIL.Image

PROSE = "What does <image> mean? Answer with a number."


def write_rows(folder, *, pictures: int, prose: int = 0) -> str:
    """Writes a data file and its pictures to a new folder; returns the file's path.

    `pictures`: questions with a picture, each of another size, 24 to 64 pixels a side; `prose`:
    questions behind them that have `<image>` in their text, and no image.
    """
    rng = np.random.default_rng(0)
    (folder / "pictures").mkdir(parents=True)
    rows = []
    for number in range(pictures):
        name = f"pictures/{number}.png"
        pixels = rng.integers(0, 256, (*rng.integers(24, 65, 2), 3), np.uint8)
        PIL.Image.fromarray(pixels).save(folder / name)
        question = f"<image>Question {number}: how many shapes? Answer with a number."
        rows.append({"question": question, "answer": str(number % 4 + 1), "images": [name]})
    rows += [{"question": PROSE, "answer": "1"}] * prose
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
