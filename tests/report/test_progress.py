"""The progress line: which numbers it shows, that it fits, and the time that is left."""

import io
import itertools
import re

import pytest
import rich.console

from distflow_jax.planning.step_schedule import StepSchedule
from distflow_jax.report.progress import (
    RunProgress,
    TimeLeft,
    evaluation_numbers,
    fitted,
    numbers,
    size_lines,
)
from distflow_jax.report.terminal import Terminal

SHARED = {"response_length/mean": 9.5, "perf/throughput": 812.3, "perf/time_per_step": 2.0}
SCORED = {"critic/score/mean": 0.25, "actor/loss": 0.5}
GRAPHS = {  # the metrics by which a graph's numbers are found -> what is shown of them
    "grpo": (SCORED, [("reward", "0.250")]),
    "ppo": (
        SCORED | {"critic/vf_loss": 0.125, "critic/loss": 0.1},
        [("reward", "0.250"), ("value loss", "0.125")],
    ),
    "online_dpo": (
        SCORED | {"rewards/accuracies": 0.75},
        [("reward", "0.250"), ("pair acc", "0.750")],
    ),
    "dpo": (
        {"actor/loss": 0.6931, "rewards/accuracies": 0.5, "rewards/margins": 0.0},
        [("loss", "0.693"), ("pair acc", "0.500")],
    ),
    "sft": ({"actor/loss": 5.5, "actor/nll": 5.5}, [("loss", "5.500")]),
    "reward_model": (
        {"reward_model/loss": 0.69, "reward_model/accuracy": 0.5},
        [("loss", "0.690"), ("accuracy", "0.500")],
    ),
    "two students": (
        {"actor/loss": 0.5, "student/loss": 0.25},
        [("actor loss", "0.500"), ("student loss", "0.250")],
    ),
}
EVALUATIONS = {  # metrics of evaluations -> what is shown of them
    "one": (
        {"val-core/gsm8k/reward/mean@4": 0.5, "val-core/gsm8k/reward/best@4/mean": 1.0},
        [("evaluation", "0.500")],
    ),
    "two": (
        {"val-core/a/b/reward/mean@1": 0.5, "val-core/c/reward/mean@1": 1.0},
        [("evaluation a/b", "0.500"), ("evaluation c", "1.000")],
    ),
}


def console(**options):
    return rich.console.Console(file=io.StringIO(), width=80, **options)


def output(terminal):
    return terminal.console.file.getvalue()


@pytest.mark.parametrize("graph", GRAPHS)
def test_the_numbers_are_those_of_the_graph(graph):
    metrics, expected = GRAPHS[graph]
    assert numbers(metrics | SHARED) == [*expected, ("length", "9.5"), ("tokens/s", "812")]


@pytest.mark.parametrize("number", EVALUATIONS)
def test_an_evaluation_is_shown_with_its_source_where_there_are_several(number):
    metrics, expected = EVALUATIONS[number]
    assert evaluation_numbers(metrics | SCORED) == expected


def test_slots_beside_environments_are_shown():
    shown = numbers(SCORED | SHARED | {"perf/slots_busy_share": 0.934})
    assert shown[-1] == ("slots busy", "93%")


@pytest.mark.parametrize(("graph", "width"), list(itertools.product(GRAPHS, (60, 80))))
def test_a_line_fits_and_keeps_what_matters(graph, width):
    metrics, expected = GRAPHS[graph]
    words = [*numbers(metrics | SHARED), ("left", "12h34m")]
    text = fitted("step 12345/12345", words, width)
    assert len(text) <= width and "step 12345/12345" in text
    if "students" not in graph:
        assert " ".join(expected[0]) in text and "left 12h34m" in text


def test_plain_lines_where_there_is_no_terminal():
    terminal = Terminal(console=console())
    progress = RunProgress(20, terminal=terminal)
    progress.evaluation({"val-core/gsm8k/reward/mean@1": 0.125})
    progress.update(1, SCORED | SHARED)
    progress.update(2, SCORED | SHARED)
    progress.observe(2, SCORED | SHARED | {"val-core/gsm8k/reward/mean@1": 0.5})
    progress.close()
    before, first, second, after = output(terminal).splitlines()
    stamp = r"\d\d-\d\d \d\d:\d\d:\d\d "
    assert re.fullmatch(f"{stamp}before step 1  evaluation 0.125", before)
    assert re.fullmatch(f"{stamp}step 1/20  reward 0.250  length 9.5  tokens/s 812", first)
    assert re.fullmatch(f"{stamp}step 2/20  reward 0.250  .*  left 36s", second)
    assert re.fullmatch(f"{stamp}after step 2  evaluation 0.500", after)


def test_a_terminal_shows_one_line():
    terminal = Terminal(console=console(force_terminal=True))
    progress = RunProgress(20, terminal=terminal, done_steps=4)
    progress.update(5, SCORED | SHARED)
    progress.observe(5, SCORED | SHARED | {"val-core/gsm8k/reward/mean@1": 0.125})
    progress.update(6, SCORED | SHARED)
    terminal.print("[eval] accuracy 0.5")
    progress.close()
    terminal.close()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output(terminal))
    assert "step 5/20" in text and "reward 0.250" in text and "[eval] accuracy 0.5" in text
    # the last state stays, with the last evaluation
    assert (
        text.splitlines()[-1].startswith("step 6/20")
        and "evaluation 0.125" in text.splitlines()[-1]
    )


def test_other_processes_are_silent():
    terminal = Terminal(enabled=False, console=console())
    progress = RunProgress(20, terminal=terminal)
    progress.evaluation({"val-core/gsm8k/reward/mean@1": 0.125})
    progress.update(1, SCORED | SHARED)
    with terminal.activity("build"):
        terminal.print("hello")
    progress.close()
    terminal.close()
    assert output(terminal) == ""


def test_the_time_left_counts_evaluations_and_checkpoints():
    every = {"testing": 4, "save_checkpoint": 5}
    schedule = StepSchedule(20, every["testing"], True, every["save_checkpoint"], 0)
    left = TimeLeft(20, schedule.coming)
    assert left.after(0) is None
    left.observe_step({"perf/time_per_step": 100.0})  # compiles
    left.observe_rest({"timing_s/testing": 7.0})
    assert left.after(1) is None
    for step in range(2, 11):
        extra = {"timing_s/testing": 7.0} if step % 4 == 0 else {}
        if step == 6:  # a checkpoint is saved after its step's metrics
            extra["timing_s/save_checkpoint"] = 3.0
        left.observe_step({"perf/time_per_step": 2.0})
        left.observe_rest(extra)
    # after step 10: 10 steps; evaluations at 12, 16, 20; checkpoints at 10 (now), 15, 20
    assert left.after(10) == pytest.approx(10 * 2 + 3 * 7 + 3 * 3)
    assert left.after(20) == pytest.approx(3)  # its own checkpoint


def test_sizes_are_a_table_of_names_and_values_as_they_are():
    rows = [("rows", 1234567, "packed"), ("mesh", "fsdp 4 [x] tensor 2", ""), ("fused", True, "")]
    text = size_lines(rows)
    for part in ("1,234,567", "packed", "fsdp 4 [x] tensor 2", "True"):
        assert part in text
