"""Functions for notebooks: configs, plans, rewards, results, and how they show themselves."""

import gc
import pathlib
import weakref

import numpy as np
import pytest
import rich.console
from support.paths import ROOT

import distflow_jax as df
from distflow_jax import notebook, run
from distflow_jax.config.config_dict import to_config_dict
from distflow_jax.config.run_config import Config
from distflow_jax.images.data_uris import small_uri
from distflow_jax.planning.plan_run import settle
from distflow_jax.report import cells, progress
from distflow_jax.report.drawing import to_svg
from distflow_jax.report.json_lines import json_line
from distflow_jax.report.page import is_plain_svg
from distflow_jax.report.run_writer import RunWriter
from distflow_jax.report.terminal import Terminal
from distflow_jax.watchdog.controller import Watchdog
from distflow_jax.watchdog.exit_codes import EXIT_PREEMPTED

HOSTILE = "<script>alert('x')</script><img src=x onerror=alert(1)>\x1b[2J'\""


@pytest.mark.parametrize("name", df.__all__)
def test_public_functions_say_what_they_do(name):
    assert len(getattr(df, name).__doc__) > 80


def test_a_config_by_name_by_file_and_as_an_object(tmp_path):
    tiny = ROOT / "configs" / "tiny.py"
    by_name = df.load_config("tiny")
    assert df.load_config(tiny) == by_name == df.load_config(str(tiny))
    assert df.load_config(by_name.config).config == by_name.config
    assert df.load_config(to_config_dict(Config())).config == Config()


def test_overrides_are_set_and_chosen():
    config = df.load_config("tiny", {"training.steps": 7, "data.train": pathlib.Path("x.jsonl")})
    assert (config["training.steps"], config["data.train"]) == (7, "x.jsonl")
    assert config.chosen == {"training.steps", "data.train"}
    more = config.override({"reward.kwargs": {"pattern": "a"}, "training.optimizer.lr": 1})
    assert config["training.optimizer.lr"] == 1e-3  # untouched
    assert more["training.optimizer.lr"] == 1.0 and more["reward.kwargs"] == {"pattern": "a"}
    assert more.chosen > config.chosen
    assert "training.steps" in repr(more) and "training.steps" in more._repr_html_()


def test_what_is_chosen_wins_over_the_settings_of_the_graph():
    config = df.load_config("tiny", {"dag": "dapo"})
    assert settle(config.config, config.chosen)[0].algorithm.clip_high == 0.28
    default = Config().algorithm.clip_high
    config = config.override({"algorithm.clip_high": default})
    assert settle(config.config, config.chosen)[0].algorithm.clip_high == default


def named_in_this_module():
    pass


def test_a_function_stands_for_its_name():
    config = df.load_config("tiny", {"dag": named_in_this_module})
    assert config["dag"] == f"{__name__}:named_in_this_module"


def reward_of_a_cell(solution_str):
    return 1.0


reward_of_a_cell.__module__ = "__main__"

WRONG = {
    "a section that does not exist": ({"trainig.steps": 1}, "did you mean config.training.steps?"),
    "a key that does not exist": ({"training.step": 1}, "did you mean config.training.steps?"),
    "a section": ({"training": {}}, "training is a section of the config"),
    "a text": ({"training.steps": "5"}, "training.steps must be an integer, got '5'"),
    "a size": ({"training.steps": 0}, "training.steps must be at least 1, got 0"),
    "no text": ({5: 1}, "keys must be strings such as 'training.steps', got 5"),
    "a lambda": ({"dag": lambda: None}, "cannot be imported by name"),
    "a cell's reward": ({"reward.function": reward_of_a_cell}, "%%writefile rewards.py"),
}


@pytest.mark.parametrize("overrides, says", WRONG.values(), ids=WRONG)
def test_wrong_overrides_are_refused(overrides, says):
    with pytest.raises(ValueError) as caught:
        df.load_config("tiny", overrides)
    assert says in str(caught.value)


def test_wrong_configs_are_refused(tmp_path):
    with pytest.raises(ValueError, match="unknown config 'tinny' .did you mean 'tiny'"):
        df.load_config("tinny")
    with pytest.raises(FileNotFoundError, match="nothing.py does not exist"):
        df.load_config(tmp_path / "nothing.py")
    with pytest.raises(ValueError, match=r"unknown key config.training.stepz .did you mean"):
        df.load_config("tiny")["training.stepz"]


# -- the plan ---------------------------------------------------------------------------------


def test_a_plan_shows_itself():
    view = df.make_plan(df.load_config("tiny"), devices=4)
    html = view._repr_html_()
    svg = html[html.index("<svg") : html.index("</svg>") + len("</svg>")]
    assert is_plain_svg(svg) and "actor_train" in svg
    assert "fsdp 4 x tensor 1" in repr(view) and "prompts per step" in html
    assert is_plain_svg(to_svg(view.drawing))


def test_a_plan_that_cannot_be_is_refused():
    config = df.load_config("tiny", {"dag": "grppo"})
    with pytest.raises(ValueError, match="unknown graph 'grppo'"):
        df.make_plan(config)
    with pytest.raises(ValueError, match="devices must not be negative, got -1"):
        df.make_plan(df.load_config("tiny"), devices=-1)


# -- rewards ----------------------------------------------------------------------------------


def test_a_reward_is_tried_as_a_run_would_call_it(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def mine(solution_str, ground_truth):\n"
        "    return {'score': 1 / len(solution_str), 'right': solution_str == ground_truth}\n"
    )
    config = df.load_config(
        "tiny", {"reward.function": f"{tmp_path / 'mine.py'}:mine", "reward.kwargs": {}}
    )
    rows = df.try_reward(
        config, [{"response": "42", "ground_truth": "42"}, {"response": HOSTILE}, {"response": ""}]
    )
    assert [row["score"] for row in rows] == [0.5, pytest.approx(1 / len(HOSTILE)), 0.0]
    assert [row.get("right") for row in rows] == [1.0, 0.0, None]
    assert [bool(row["error"]) for row in rows] == [False, False, True]
    assert "ZeroDivisionError" in rows[2]["error"] and "mine.py, line 2" in rows[2]["error"]
    assert_harmless(rows)


def test_a_prompt_of_messages_is_what_functions_of_conversations_get(tmp_path):
    (tmp_path / "theirs.py").write_text(
        "def theirs(prompt, completion, answer):\n"
        "    return len(prompt) + (completion[-1]['content'] == answer)\n"
    )
    config = df.load_config(
        "tiny", {"reward.function": f"{tmp_path / 'theirs.py'}:theirs", "reward.kwargs": {}}
    )
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6 * 7?"}]
    (row,) = df.try_reward(config, [{"response": "42", "ground_truth": "42", "prompt": asked}])
    assert (row["score"], row["prompt"]) == (3.0, asked)


@pytest.mark.parametrize(
    "example, says",
    [
        ({"answer": "4"}, "example 0: unknown key 'answer'"),
        ({"ground_truth": "4"}, "example 0: 'response' must be a string, got None"),
    ],
)
def test_wrong_examples_are_refused(example, says):
    with pytest.raises(ValueError, match=says):
        df.try_reward(df.load_config("tiny"), [example])


# -- results ----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    return write_run(tmp_path / "a run", 5)


def write_run(folder, steps):
    """A folder as a run leaves it, of a model that writes what it likes."""
    writer = RunWriter(folder)
    writer.config({"training": {"steps": steps}, "dag": HOSTILE})
    writer.plan("plan")
    writer.metrics(0, {"val-core/x/reward/mean@1": 0.25})
    for step in range(1, steps + 1):
        lengths = {f"response_length/{k}": float(step) for k in ("mean", "max", "min")}
        writer.metrics(step, {"critic/score/mean": step / 10, HOSTILE: 1.0, **lengths})
        record = {"prompt": HOSTILE, "response": HOSTILE, "ground_truth": 7, "score": 0.5}
        writer.samples(step, [json_line(record)] * 20)
    scored = {"prompt": "p", "responses": ["a", HOSTILE], "scores": [0.0, 1.0], "ground_truth": ""}
    writer.samples("eval-5", [json_line(scored)])
    writer.close()
    return folder


def assert_harmless(shown):
    html, text = shown._repr_html_(), repr(shown)
    assert "<script" not in html and "<img" not in html
    assert not {c for c in text if not c.isprintable()} - {"\n"}


def test_results_show_themselves(folder):
    results = df.load_run(folder)
    assert "done: 5 steps" in repr(results) and "done: 5 steps" in results._repr_html_()
    assert results._repr_html_().count("<svg") == 3  # the reward, the lengths, the evaluation
    assert_harmless(results)
    assert [row["step"] for row in results.metrics] == [0, 1, 2, 3, 4, 5]
    assert results.metrics[3]["critic/score/mean"] == 0.3


def test_curves_of_one_metric_and_of_mean_max_and_min(folder):
    charts = df.load_run(folder).curves("critic/score/mean", "response_length", HOSTILE)
    assert [[line.name for line in lines] for _, lines in charts.charts[:2]] == [
        ["mean"],
        ["mean", "max", "min"],
    ]
    assert "critic/score/mean: 0.1 in step 1, 0.5 in step 5" in repr(charts)
    assert_harmless(charts)
    with pytest.raises(ValueError, match="no metric 'critic/scor/mean' .did you mean 'critic/sco"):
        df.load_run(folder).curves("critic/scor/mean")


def test_samples_of_a_step_and_of_an_evaluation(folder):
    results = df.load_run(folder)
    last, first, scored = results.samples(), results.samples(step=1), results.samples("eval-5")
    assert "step 5 (12 of 20 rows)" in repr(last) and len(last) == 20 and len(first[:3]) == 3
    assert first[0]["response"] == HOSTILE
    assert [(row["response"], row["score"]) for row in scored] == [("a", 0.0), (HOSTILE, 1.0)]
    for table in (last, first, scored):
        assert_harmless(table)
    with pytest.raises(ValueError, match="no samples of '9'; the last ones: 1, 2, 3, 4, 5, eval-5"):
        results.samples(9)


def test_pictures_stand_beside_the_first_response_to_their_prompt(tmp_path):
    """Only data URIs of pictures are shown, whatever a file holds."""
    uri = small_uri(np.full((4, 6, 3), 200, np.uint8))
    writer = RunWriter(tmp_path)
    writer.config({})
    shown = {"prompt": "p", "responses": ["a", "b"], "scores": [0.0, 1.0], "images": [uri] * 2}
    hostile = ["https://a.b/c.png", "data:image/svg+xml;base64,QQ==", f"{uri}' onerror='x", 3]
    records = [shown, {"prompt": "q", "responses": ["c"], "images": hostile}]
    writer.samples("eval-5", map(json_line, records))
    writer.close()
    table = df.load_run(tmp_path).samples("eval-5")
    html = table._repr_html_()
    assert html.count("<img") == html.count(f"<img src='{uri}' alt='picture'>") == 2
    assert "onerror" not in html
    assert [str(row.get("pictures", "")) for row in table] == ["2 pictures", "", ""]
    assert "2 pictures" in repr(table) and uri not in repr(table)


def test_the_report_is_shown_in_a_frame_of_its_own(folder):
    page = df.load_run(folder).report()
    assert page._repr_html_().startswith("<iframe sandbox='allow-scripts' srcdoc='&lt;!doctype")
    assert_harmless(page)


def test_runs_are_compared(folder, tmp_path):
    runs = {HOSTILE: df.load_run(folder), "b": df.load_run(write_run(tmp_path / "b", 3))}
    charts = df.compare(runs, "critic/score/mean", "response_length/max")
    (_, lines), _ = charts.charts
    assert [line.name for line in lines] == [HOSTILE, "b"]
    assert len({line.color for line in lines}) == 2
    assert [len(line.points) for line in lines] == [5, 3]
    assert_harmless(charts)
    with pytest.raises(ValueError, match="compare takes 1 to 8 runs, got 9"):
        df.compare({str(i): df.load_run(folder) for i in range(9)})
    with pytest.raises(ValueError, match="run 'b' has no metric 'nothing'"):
        df.compare({"b": df.load_run(tmp_path / "b")}, "nothing")


def test_a_folder_without_a_run_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="/home/me/runs' has no config.json; give the workdir"):
        monkeypatch.setenv("HOME", "/home/me")
        df.load_run("~/runs")
    with pytest.raises(ValueError, match="has no config.json; give the workdir"):
        df.load_run(tmp_path)


# -- training ---------------------------------------------------------------------------------


def test_no_watchdog_looks_after_a_kernel(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(Watchdog, "start", lambda *_, **__: started.append(1))
    config = df.load_config("tiny", {"data.train": str(tmp_path / "missing.jsonl")})
    with pytest.raises(FileNotFoundError, match="missing.jsonl"):
        df.train(config, tmp_path / "run")
    assert not started


def test_a_stop_by_sigterm_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "train_here", lambda *_, **__: EXIT_PREEMPTED)
    with pytest.raises(RuntimeError, match="stopped by a signal; call train with workdir"):
        df.train(df.load_config("tiny"), tmp_path)


def test_an_interrupt_keeps_nothing_of_the_run(tmp_path, monkeypatch):
    """The kept error names no frame of the run, nor one that the run's own functions enclose."""
    models = []

    class Model:
        pass

    def interrupted(*_, **__):
        model = Model()
        models.append(weakref.ref(model))
        try:
            raise ValueError(f"amid of this: {model}")
        except ValueError:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(notebook.run_lib, "train_here", interrupted)
    with pytest.raises(KeyboardInterrupt) as kept:
        df.train(df.load_config("tiny"), tmp_path)
    gc.collect()
    assert kept.value is not None and models[0]() is None


class Output:
    """Stands in for the output of a cell."""

    shown: list = []

    def show(self, html, text):
        self.shown.append((html, text))


def test_progress_in_a_cell_is_one_output_with_the_reward(monkeypatch, capsys):
    monkeypatch.setattr(cells, "LiveOutput", Output)
    monkeypatch.setattr(Output, "shown", [])
    terminal = Terminal(console=rich.console.Console(force_jupyter=True))
    line = progress.RunProgress(3, terminal=terminal)
    for step in (1, 2, 3):
        line.update(step, {"critic/score/mean": step / 10})
    line.close()
    html, text = Output.shown[-1]
    assert text.startswith("step 3/3  reward 0.300")
    assert "<progress value='3' max='3'" in html and "<svg" in html
    terminal.print("done")
    assert capsys.readouterr().out == "done\n"


def test_what_a_run_says_first_is_folded_up_in_a_cell(monkeypatch, capsys):
    monkeypatch.setattr(cells, "LiveOutput", Output)
    monkeypatch.setattr(Output, "shown", [])
    console = rich.console.Console(force_jupyter=True)
    rows = [("row", 256, "tokens")]
    progress.introduce_in_cell("a <run>", rows, "1 rollout", Terminal(console=console))
    ((html, text),) = Output.shown
    assert html.startswith("<details") and "a &lt;run&gt;" in html and "1 rollout" in html
    assert text == "a <run>" and not capsys.readouterr().out
