"""Reward functions as a user might write them, good and bad; workers load this file by its path."""

import asyncio
import os
import pathlib
import subprocess
import threading
import time


def verl_style(data_source, solution_str, ground_truth, extra_info=None):
    score = float(solution_str == ground_truth)
    return {"score": score, "length": len(solution_str), "note": "kept out of the numbers"}


def digits(solution_str):
    return sum(c.isdigit() for c in solution_str) / max(1, len(solution_str))


def by_length(solution_str, response_length, scale=1.0, **_):
    return response_length * scale


def trl_style(prompts, completions, weight, **columns):
    assert len(prompts) == len(completions) == len(columns["ground_truth"])
    return [
        float(c == t) * w
        for c, t, w in zip(completions, columns["ground_truth"], weight, strict=True)
    ]


def trl_batch_size(completions, **_):
    return [float(len(completions))] * len(completions)


def trl_acts(completions, **_):
    return [row(data_source="", solution_str=c, ground_truth="") for c in completions]


async def patient(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "exit":
        os._exit(7)
    await asyncio.sleep(3600 if solution_str == "hang" else 0.2)
    return float(solution_str)


async def meets(solution_str, folder, count):
    """Returns once `count` of them are at work together; "gate" once there is the file "open"."""
    folder = pathlib.Path(folder)
    (folder / (solution_str if solution_str == "gate" else f"at.{solution_str}")).touch()
    if solution_str == "gate":
        while not (folder / "open").exists():
            await asyncio.sleep(0.01)
        return -1.0
    while len(list(folder.glob("at.*"))) < count:
        await asyncio.sleep(0.05)
    return float(solution_str)


def _end_with(file):
    """Ends this process once there is a file."""
    while not file.exists():
        time.sleep(0.01)
    os._exit(7)


def row(data_source, solution_str, ground_truth, extra_info=None):
    """Does what the response says; otherwise the response is the score."""
    if solution_str == "hang":
        time.sleep(3600)
    if solution_str == "exit":
        os._exit(7)
    if solution_str == "sys.exit":
        raise SystemExit(3)
    if solution_str == "raise":
        raise KeyError("no such answer")
    if solution_str == "text":
        return "good"
    if solution_str == "nan":
        return float("nan")
    if solution_str == "crash":
        os.kill(os.getpid(), 11)
    if solution_str == "pid":
        return os.getpid()
    if solution_str.startswith("leave "):
        _, death, pids = solution_str.split()
        child = subprocess.Popen(["sleep", "600"])
        with open(pids, "w") as file:
            file.write(f"{os.getpid()} {child.pid}")
        if death == "exit":
            os._exit(7)
        threading.Thread(target=_end_with, args=(pathlib.Path(f"{pids}.end"),)).start()
        return 0
    if solution_str.startswith("spawn "):
        child = subprocess.Popen(["sleep", "600"])
        with open(solution_str.removeprefix("spawn "), "w") as file:
            file.write(f"{os.getpid()} {child.pid}")
        time.sleep(3600)
    return float(solution_str)


def loaded_jax(data_source, solution_str, ground_truth, extra_info=None):
    import sys

    return float("jax" in sys.modules)


def nonsense(x, y):
    return x + y


NOT_A_FUNCTION = 3
