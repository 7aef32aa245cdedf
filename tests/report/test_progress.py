import io

import rich.console

from distflow_jax.report.progress import Progress, format_seconds, table


def console(**options):
    return rich.console.Console(file=io.StringIO(), width=100, **options)


METRICS = {"critic/score/mean": 0.25, "response_length/mean": 9.5, "perf/throughput": 812.3}


def test_plain_lines_where_there_is_no_terminal():
    out = console()
    progress = Progress(20, console=out)
    progress.update(1, METRICS)
    progress.update(2, METRICS)
    progress.close()
    first, second = out.file.getvalue().splitlines()
    assert first == "step 1/20  reward 0.250  length 9.5  tokens/s 812"
    assert second.startswith(first.replace("1/20", "2/20") + "  left ")


def test_a_terminal_shows_one_line():
    out = console(force_terminal=True)
    progress = Progress(20, done_steps=4, console=out)
    progress.update(5, METRICS)
    progress.print("[eval] accuracy 0.5")
    progress.close()
    text = out.file.getvalue()
    assert "step 5/20" in text and "reward 0.250" in text and "[eval] accuracy 0.5" in text


def test_other_processes_are_silent():
    out = console()
    progress = Progress(20, enabled=False, console=out)
    progress.update(1, METRICS)
    progress.print("hello")
    progress.close()
    assert out.file.getvalue() == ""


def test_table_shows_names_and_values_as_they_are():
    out = console()
    rows = [("rows", 1234567, "packed"), ("mesh", "fsdp 4 [x] tensor 2", ""), ("fused", True, "")]
    table("sizes", rows, console=out)
    text = out.file.getvalue()
    for part in ("sizes", "1,234,567", "packed", "fsdp 4 [x] tensor 2", "True"):
        assert part in text


def test_seconds():
    assert [format_seconds(s) for s in (0.2, 7, 59.7, 67, 3599.6, 3667, 90000)] == [
        "0s",
        "7s",
        "1m00s",
        "1m07s",
        "1h00m",
        "1h01m",
        "25h00m",
    ]
