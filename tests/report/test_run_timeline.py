"""Timeline and provenance: what a run records about its starts, and what the report says of it."""

import json
import shlex
import subprocess
import sys
import time
import types

import pytest

from distflow_jax.report import run_writer
from distflow_jax.report.page import provenance_table
from distflow_jax.report.provenance import command, commit, provenance
from distflow_jax.report.read_run import read_run
from distflow_jax.report.run_writer import RunWriter
from distflow_jax.report.sections.run_timeline import attempts_of, run_timeline

BEGIN = 1_700_000_000.0


def test_starts_steps_and_stops_of_a_resumed_run(tmp_path):
    first = RunWriter(tmp_path)
    first.event("start", {"step": 0, "host": "one"}, at=BEGIN)
    first.event("ready", {"step": 0, "seconds": 20.0}, at=BEGIN + 30)
    first.event("evaluation", {"step": 0, "seconds": 5.0}, at=BEGIN + 60)
    first.event("checkpoint", {"step": 4, "seconds": 1.0}, at=BEGIN + 100)
    first.event("stop", {"step": 4, "reason": "stopped by a signal"}, at=BEGIN + 130)
    first.close()
    second = RunWriter(tmp_path, resume_step=4)
    second.event("start", {"step": 4, "host": "two"}, at=BEGIN + 3730)
    second.event("ready", {"step": 4, "seconds": 2.0}, at=BEGIN + 3740)
    second.event("step", {"step": 9}, at=BEGIN + 3800)
    second.close()
    events = read_run(tmp_path).events
    before, after = attempts_of(events)
    assert (before.end - before.begin, after.end - after.begin) == (130, 70)
    html = run_timeline(events)
    for word in ("2023-11-14 22:13, step 1", "2023-11-14 23:15, step 5", "2m10s, to step 4"):
        assert word in html
    for title in ("compile: 20.0 s", "steps 1 to 4: 1m40s", "evaluation of step 0: 5.0 s"):
        assert title in html
    assert "steps 5 to 9: 1m00s" in html and "1m10s, to step 9" in html
    assert "resumed 1h00m after the end of the start before (stopped by a signal)" in html
    table = provenance_table(events)
    assert table.index("two") < table.index("1 earlier starts") < table.index("one")


def test_a_killed_run_has_no_stop():
    events = [
        {"time": BEGIN, "event": "start", "step": 0},
        {"time": BEGIN + 9, "event": "step", "step": 3},
        {"time": BEGIN + 20, "event": "start", "step": 2},
    ]
    assert "(no stop was recorded)" in run_timeline(events)


@pytest.mark.parametrize(
    "events",
    [
        [],
        [{"event": "step", "time": 1.0}],
        [{"event": "start"}],
        [{"event": "start", "time": "soon"}],
        [{"event": "start", "time": float("nan")}],
    ],
)
def test_without_a_start_there_is_no_timeline(events):
    assert run_timeline(events) == "" and provenance_table(events) == ""


def test_spoilt_events_stay_text():
    hostile = "<script>alert(1)</script>"
    facts = {"step": hostile, "seconds": "x", "host": hostile, "versions": {hostile: hostile}}
    kinds = ("start", "ready", "evaluation", "checkpoint", "stop")
    events = [
        {"event": k, "time": BEGIN + i, "reason": hostile, **facts} for i, k in enumerate(kinds)
    ]
    for html in (run_timeline(events), provenance_table(events)):
        assert "<script" not in html
        assert "start" in html or "date" in html


def test_a_line_that_a_kill_cut_off_takes_no_event_with_it(tmp_path):
    for step in (0, 3):
        writer = RunWriter(tmp_path, resume_step=step or None)
        writer.event("start", {"step": step})
        writer.event("ready", {"step": step})
        writer.close()
        with (tmp_path / "events.jsonl").open("a") as file:
            file.write('{"time": 1.0, "ev')
    assert [a.events[0]["step"] for a in attempts_of(read_run(tmp_path).events)] == [0, 3]


def test_steps_are_recorded_at_most_every_half_minute(tmp_path, monkeypatch):
    """Here each takes a second."""
    now = [0.0]
    clock = types.SimpleNamespace(time=time.time, monotonic=lambda: now[0])
    monkeypatch.setattr(run_writer, "time", clock)
    writer = RunWriter(tmp_path)
    for step in range(1, 50):
        now[0] = step
        writer.metrics(step, {"a/b": 1.0})
    writer.close()
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 31]


def test_provenance_names_host_versions_and_command(tmp_path):
    found = provenance(tmp_path)
    assert found["processes"] == 1 and found["devices"].startswith("8 x ")
    assert found["versions"]["python"] == sys.version.split()[0]
    assert found["versions"]["jax"] and found["host"] and found["command"]
    assert found["folder"] == str(tmp_path)
    json.dumps(found)


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        ("--config.observe.token=hf_abc", "--config.observe.token=..."),
        ("--api_key=abc", "--api_key=..."),
        ("--password=a b", "--password=..."),
        ("--config.training.row_tokens=512", "--config.training.row_tokens=512"),
        ("--workdir=a b", "'--workdir=a b'"),
    ],
)
def test_secrets_are_left_out_of_the_command(argument, shown):
    assert command(["python", argument]) == f"python {shown}"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--api_key", "sk-1"],
        ["--config.environment.auth_token", "sk-1"],
        ["--config.reward.kwargs={'api_key': 'sk-1', 'n': 3}"],
        ["--config.reward.kwargs={'api_key': 'it\\'s, sk-1'}"],
        ['--config.reward.kwargs={"my_password" : "sk-1"}'],
        ["--config.reward.kwargs={'token': ['sk-0', 'sk-1']}"],
        ["--config.reward.kwargs=dict(secret=sk-1)"],
        ["--config.model.source=https://user:sk-1@host/x"],
        ["--config.model.source=https://user:p@sk-1@host/x"],
        ["--config.data.train=https://host/x?a=1&token=sk-1"],
        ["env", "WANDB_API_KEY=sk-1", "python"],
    ],
)
def test_secrets_are_left_out_however_they_are_written(arguments):
    shown = command(["python", *arguments, "--workdir=runs/first"])
    assert "sk-" not in shown and "..." in shown and shown.endswith(" --workdir=runs/first")


def test_what_is_no_secret_stays_in_the_command():
    arguments = ["--tokens", "5", "--config.data.max_tokens=9", "--config.kwargs={'n_tokens': 3}"]
    assert shlex.split(command(arguments)) == arguments


def test_the_commit_is_that_of_tracked_code(tmp_path):
    def git(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", tmp_path, *identity, *arguments], check=True)

    git("init", "--quiet")
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    assert commit(package) == ""  # installed inside another project's checkout
    git("add", ".")
    git("commit", "--quiet", "--message=a")
    clean = commit(package)
    assert len(clean) == 40
    (package / "__init__.py").write_text("x = 1\n")
    assert commit(package) == f"{clean}-dirty"
    assert commit(tmp_path / "nowhere") == ""
