"""Reward functions that work at first; workers load this file by its path."""

import pathlib
import time


def _number(calls):
    """The number of this call, over all workers."""
    with open(calls, "a") as file:
        file.write(".")
    return pathlib.Path(calls).stat().st_size


def hangs_once(data_source, solution_str, ground_truth, extra_info=None, *, calls, enough):
    """The first call after enough of them never returns."""
    if _number(calls) > enough:
        try:
            pathlib.Path(calls).with_suffix(".hung").touch(exist_ok=False)
        except FileExistsError:
            return 0.0
        time.sleep(3600)
    return float(len(solution_str) % 2)


def judges_training(data_source, solution_str, ground_truth, extra_info=None):
    """Every evaluation fails, as if its judge were down."""
    if data_source == "judged":
        raise ConnectionError("the judge is down")
    return float(len(solution_str) % 2)


def raises_later(data_source, solution_str, ground_truth, extra_info=None, *, calls, enough):
    """All calls after enough of them raise."""
    if _number(calls) > enough:
        raise KeyError("no such answer")
    return float(len(solution_str) % 2)
