"""Terminal output of a run: lines that fit, announced waits, messages of one style."""

import gc
import io
import json
import logging
import re
import sys
import sysconfig
import time
import warnings
import weakref

import pytest
import rich.console
from support.waiting import HANG, until

from distflow_jax.report import log_lines, terminal
from distflow_jax.report.read_run import read_run
from distflow_jax.report.run_end import print_commands, print_end
from distflow_jax.report.terminal import ResponseCount, Terminal, cut, shortened

STAMP = r"\d\d-\d\d \d\d:\d\d:\d\d "


def opened(width=80, encoding="utf-8", **options):
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="")
    return Terminal(console=rich.console.Console(file=file, width=width, **options))


def lines(found):
    found.console.file.flush()
    file = found.console.file
    text = file.buffer.getvalue().decode(file.encoding)
    return [line for line in text.splitlines() if line]


def test_a_log_file_has_whole_rows():
    found = opened(60)
    found.row("model", ", float32", name="random:llama?" + "hidden=128&" * 20)
    found.row("algorithm", "rollout > " * 30)
    model, algorithm = lines(found)
    assert model.endswith("random:llama?" + "hidden=128&" * 20 + ", float32")
    assert algorithm.endswith("rollout > " * 30)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_rows_of_a_terminal_fit_and_keep_their_ends(width):
    found = opened(width, force_terminal=True)
    found.row("model", ", 135 M parameters, float32", name="random:llama?" + "hidden=128&" * 20)
    found.row("algorithm", "grpo, 3 steps: " + "rollout > " * 30)
    found.row("memory", "1.0 MiB")
    model, algorithm, memory = lines(found)
    assert all(len(line) <= width for line in (model, algorithm, memory))
    assert "model     random:l" in model
    assert width == 60 or model.endswith("128&, 135 M parameters, float32")
    assert memory.endswith("memory    1.0 MiB")


def test_text_that_is_copied_is_whole():
    found = opened()
    found.whole("report", "/a" * 100)
    found.whole("next", "a \\", "  b")
    report, *rest = lines(found)
    assert report.endswith("report    " + "/a" * 100)
    assert [re.sub(STAMP, "", line) for line in rest] == ["next      a \\", "            b"]


def test_a_narrow_encoding_gets_other_characters():
    found = opened(encoding="ascii")
    found.row("accuracy", "0.5 \u00b1 0.1 [red]")
    found.row("model", ", \u4e2d", name=shortened("x" * 200, 20))
    accuracy, model = lines(found)
    assert accuracy.endswith("0.5 +- 0.1 [red]") and model.endswith("x, ?") and "x...x" in model


def test_texts_are_shortened_to_their_width():
    text = "abcdefghij"
    for width in range(2, 12):
        for short in (shortened(text, width), cut(text, width)):
            assert len(short) == min(width, 10)
            assert (short == text) == (width >= 10)
        assert shortened(text, width)[0] == "a" and cut(text, width)[0] == "a"
        assert width < 3 or shortened(text, width)[-1] == "j"


def test_a_log_file_is_told_of_long_waits_only(monkeypatch):
    monkeypatch.setattr(terminal, "LONG_WAIT", 0.05)
    found = opened()
    with found.activity("compile_programs"):
        until(lambda: lines(found))
    with found.activity("rollout"):  # a node of every step
        time.sleep(0.2)
    monkeypatch.setattr(terminal, "LONG_WAIT", HANG)
    with found.activity("testing"):
        pass
    first, second = lines(found)
    assert re.fullmatch(f"{STAMP}compiling the programs of the plan ...", first)
    assert re.fullmatch(f"{STAMP}compiling the programs of the plan: done in \\d+s", second)


def test_what_is_closed_keeps_nothing_of_its_run():
    """Its thread would keep the models, and the programs of each earlier run of a process."""
    found, of_run = opened(), ResponseCount(2)
    there = weakref.ref(of_run)
    found.details["rollout"] = of_run.__str__
    with found.activity("rollout"):
        pass
    found.close()
    del found, of_run
    gc.collect()
    assert there() is None


def test_no_silence_is_long(monkeypatch):
    monkeypatch.setattr(terminal, "SILENCE", 0.05)
    monkeypatch.setattr(terminal, "LEAST_TOLD", 0.01)
    found = opened()
    with found.activity("rollout"):
        until(lambda: lines(found))
    found.details["rollout"], found.doing = lambda: "34 of 64 responses", "step 3/20"
    before = len(lines(found))
    with found.activity("rollout"):
        until(lambda: len(lines(found)) > before)
    first, second = lines(found)[0], lines(found)[before]
    assert re.fullmatch(f"{STAMP}rollout: \\d+s so far", first)
    last = "34 of 64 responses, the last one took \\d+s"
    assert re.fullmatch(f"{STAMP}step 3/20, rollout: \\d+s so far, {last}", second)


def test_a_wait_that_fails_says_no_more(monkeypatch):
    monkeypatch.setattr(terminal, "LONG_WAIT", 0.05)
    found = opened()
    with pytest.raises(ValueError), found.activity("compile_programs"):
        until(lambda: lines(found))
        raise ValueError
    assert len(lines(found)) == 1


def test_a_terminal_shows_the_innermost_wait_and_leaves_nothing():
    found = opened(force_terminal=True)
    with found.activity("compile_programs"), found.activity("rollout"):
        assert found._region().plain.startswith("rollout ")
    assert found._region().plain == ""
    found.close()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", "".join(lines(found)))
    assert "compiling the programs of the plan 0s" in text


# -- log messages ---------------------------------------------------------------------------------


@pytest.fixture
def logged(capsys):
    """Reads standard error while all messages are lines; the tests' logging comes back."""
    root, own = logging.getLogger(), logging.getLogger(log_lines.OWN)
    before = list(root.handlers), root.level, own.level, warnings.formatwarning
    root.setLevel(logging.INFO)
    logging.captureWarnings(False)  # an import may have captured them, before pytest did
    log_lines.use_lines()
    yield lambda: capsys.readouterr().err
    logging.captureWarnings(False)
    root.handlers[:], level, own_level, warnings.formatwarning = before
    root.setLevel(level)
    own.setLevel(own_level)


def test_messages_are_lines_of_one_style(logged):
    log = logging.getLogger("distflow_jax")
    log.info("job: %s", "alone")
    log.warning("3 overlong prompts were dropped")
    logging.getLogger("absl").error("cannot save")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("two\nlines", UserWarning, stacklevel=1)
    info, own, other, python = logged().splitlines()
    assert re.fullmatch(f"{STAMP}job: alone", info)
    assert re.fullmatch(f"{STAMP}warning: 3 overlong prompts were dropped", own)
    assert re.fullmatch(f"{STAMP}error: cannot save", other)
    assert re.fullmatch(rf"{STAMP}warning: two lines \(UserWarning, .*, line \d+\)", python)


def test_an_error_keeps_its_traceback(logged):
    try:
        raise RuntimeError("why")
    except RuntimeError:
        logging.getLogger("distflow_jax").warning("not written", exc_info=True)
    text = logged()
    assert "warning: not written\nTraceback" in text and text.endswith("RuntimeError: why\n")


def test_what_installed_packages_say_of_themselves_is_left_out(logged):
    def said(level, path):
        record = logging.LogRecord("jax._src.xla_bridge", level, path, 1, "hello", (), None)
        logging.getLogger("jax._src.xla_bridge").handle(record)
        return logged()

    installed = sysconfig.get_path("purelib") + "/jax/_src/xla_bridge.py"
    assert said(logging.INFO, installed) == ""
    assert said(logging.WARNING, installed).endswith("warning: hello\n")
    assert said(logging.INFO, "/task buffer/me/rewards.py").endswith(" hello\n")


def test_other_processes_say_errors_only(logged):
    log_lines.only_errors()
    log = logging.getLogger("distflow_jax")
    log.info("a")
    log.warning("b")
    log.error("c")
    text = logged()
    assert text.endswith("error: c\n") and text.count("\n") == 1


def test_a_terminal_wraps_messages(logged, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    logging.getLogger("distflow_jax").warning("word " * 40)
    found = logged().splitlines()
    assert len(found) > 1 and max(map(len, found)) <= 80 and found[0].startswith("warning: word")


# -- the end --------------------------------------------------------------------------------------

EVAL = "val-core/gsm8k/reward/mean@1", "val-aux/gsm8k/reward/stderr@1", "val-aux/gsm8k/num_prompts"


def written(folder, rows, scores=(0.0, 1.0)):
    (folder / "samples").mkdir()
    text = "".join(json.dumps({"step": step} | row) + "\n" for step, row in enumerate(rows))
    (folder / "metrics.jsonl").write_text(text)
    record = json.dumps({"prompt": "a", "responses": ["b", "c"], "scores": list(scores)})
    (folder / "samples" / f"eval-{len(rows) - 1}.jsonl").write_text(record + "\n")
    (folder / "report.html").write_text("<html>")
    return folder


def ended(folder, width=80):
    found = opened(width, force_terminal=True)
    print_end(found, read_run(folder), folder)
    return [line.split(maxsplit=1) for line in lines(found)]


def evaluated(*values):
    return dict(zip(EVAL, values, strict=True))


def test_the_end_of_a_run_that_was_scored(tmp_path):
    rows = [evaluated(0.125, 0.03, 128)]
    rows += [{"critic/score/mean": i / 8, "actor/loss": 1.0} for i in (1, 2, 3)]
    rows[-1] |= evaluated(0.5, 0.044, 128)
    folder = written(tmp_path, rows)
    assert ended(folder) == [
        ["accuracy", "0.125 \u00b1 0.030 -> 0.500 \u00b1 0.044 (128 prompts of gsm8k)"],
        ["reward", "0.125 -> 0.375 (first and last steps)"],
        ["report", str(folder / "report.html")],
    ]


def test_an_evaluation_before_step_1_is_no_result(tmp_path):
    rows = [evaluated(0.0, 0.0, 32), {"critic/score/mean": 0.5}]
    folder = written(tmp_path, rows)
    (folder / "samples" / "eval-1.jsonl").rename(folder / "samples" / "eval-0.jsonl")
    assert ended(folder)[0] == [
        "accuracy",
        "0.000 \u00b1 0.000 before step 1; none since (32 prompts of gsm8k)",
    ]


def test_a_score_that_is_not_0_or_1_is_no_accuracy(tmp_path):
    rows = [evaluated(0.125, 0.03, 128), {"critic/score/mean": 0.5} | evaluated(0.5, 0.04, 128)]
    assert ended(written(tmp_path, rows, scores=(0.5, 1.0)))[0][0] == "score"


def test_the_end_of_preferences_and_demonstrations(tmp_path):
    pairs = [{"actor/loss": 0.5, "rewards/accuracies": 0.75}] * 2
    assert [row[0] for row in ended(written(tmp_path, [{}, *pairs]))] == ["loss", "pair", "report"]
    (tmp_path / "sft").mkdir()
    alone = ended(written(tmp_path / "sft", [{}, {"actor/loss": 0.5}]))
    assert alone[0] == ["loss", "0.500 -> 0.500 (first and last steps)"]


def test_a_run_without_a_step_has_no_end(tmp_path):
    assert ended(written(tmp_path, [])) == []


def test_commands_are_printed_as_a_shell_takes_them():
    found = opened(60, force_terminal=True)
    command = "python scripts/evaluate.py --config=configs/tiny.py --run=runs/first"
    print_commands(found, {"evaluate": command})
    text = "\n".join(lines(found)).removeprefix("evaluate  ")
    assert text.replace("\\\n", " ").split() == command.split() and "\\\n" in text
