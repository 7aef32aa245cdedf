"""Notebooks run from top to bottom, and what a cell is given shows itself, whatever a run wrote.

Nightly: every notebook runs from top to bottom in any folder; an interrupted cell leaves a kernel
that still trains.
"""

import os
import re
import subprocess
import sys

import jupyter_client
import nbclient
import nbformat
import pytest
from support.paths import ROOT
from support.waiting import HANG, until

import distflow_jax as df

BOOKS = {path.stem: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
SMALL = {
    "model.source": "random:llama?hidden=32&layers=1&heads=4&kv_heads=2&mlp=64&vocab=300",
    "data.max_prompt_length": 96,
    "data.prompts_per_step": 4,
    "rollout.max_response_length": 8,
    "eval.dataset": "",
}

# what must hold at the end, in the notebook's own words
QUICKSTART = """
score = [row["critic/score/mean"] for row in run.metrics[1:]]
assert score[-1] > 0.7, score
accuracy = list(held_out_accuracy.values())  # a run that learns by heart finds none
assert accuracy[0] < 0.1 and accuracy[-1] >= 0.4, accuracy
assert not any(row["perf/compilations"] for row in run.metrics[2:])
# in the kernel that has trained: a finished run says so, a mistake is an exception
import contextlib, io
said = io.StringIO()
with contextlib.redirect_stdout(said):
    assert df.train(config, folder / "run").metrics == run.metrics
assert "is finished: step 240 of 240" in said.getvalue()
try:
    df.train(config.override({"data.train": "missing.jsonl"}), folder / "other")
    raise AssertionError("it trains on missing data")
except FileNotFoundError as error:
    assert "missing.jsonl" in str(error)
"""
CUSTOM_DAG = """
weight = [row["brevity/weight"] for row in run.metrics]
assert len(weight) == 120 and all(0 < w <= 1 for w in weight)
assert weight[-1] > 1.2 * weight[0], weight  # shorter
assert run.metrics[-1]["critic/score/mean"] > run.metrics[0]["critic/score/mean"] + 0.3
"""
CUSTOM_REWARD = """
right = [[row["reward/right"] for row in found.metrics] for found in (first, second)]
assert all(shares[-1] > shares[0] + 0.2 for shares in right), right
"""
VISION = """
score = [row["critic/score/mean"] for row in run.metrics[1:]]
assert score[-1] > 0.75, score  # a run that does not look finds one in two
assert not any(row["perf/compilations"] for row in run.metrics[2:])
shown = run.samples("eval-140")
assert len(shown) == 64 and shown._repr_html_().count("<img") == 12
"""
HOLDS = {
    "quickstart": QUICKSTART,
    "custom_dag": CUSTOM_DAG,
    "custom_reward": CUSTOM_REWARD,
    "vision": VISION,
}


def environment():
    env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    path = os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH"))))
    return env | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}


# -- the notebooks ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", BOOKS)
def test_it_is_stored_with_its_output_and_without_traces_of_a_machine(name):
    """As scripts/docs/run_notebooks.py leaves it: every cell was run, in order."""
    text = BOOKS[name].read_text(encoding="utf-8")
    book = nbformat.reads(text, as_version=4)
    nbformat.validate(book)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert not any(o.output_type == "error" or o.get("name") == "stderr" for o in outputs)
    shown = [o.data["text/html"] for o in outputs if "text/html" in o.get("data", {})]
    assert sum("<svg" in html for html in shown) >= 3 and code[-1].outputs
    assert not re.search(r"/(task buffer|root|work|Users)/", text)


@pytest.mark.parametrize("name", BOOKS)
def test_it_installs_by_itself_and_opens_in_colab(name):
    cells = nbformat.read(BOOKS[name], as_version=4).cells
    head = " ".join(cells[0].source.split())
    install = next(cell.source for cell in cells if cell.cell_type == "code")
    address = re.search(r'^Homepage = "https://(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert install.endswith(f"%pip install -q git+https://{address[1]}")
    colab = f"research.google.com/{address[1]}".replace("github.com", "github")
    assert f"https://colab.{colab}/blob/main/notebooks/{name}.ipynb)" in head


@pytest.mark.slow
@pytest.mark.parametrize("name", BOOKS)
def test_it_runs_from_any_folder(name, tmp_path):
    book = nbformat.read(BOOKS[name], as_version=4)
    check = nbformat.v4.new_code_cell(HOLDS[name])
    book.cells.append(check)
    client = nbclient.NotebookClient(
        book, timeout=HANG, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute(env=environment() | {"TMPDIR": str(tmp_path)})
    shown = [
        output.data["text/html"]
        for cell in book.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if "text/html" in output.get("data", {})
    ]
    assert sum("<svg" in html for html in shown) >= 3
    assert any("<progress" in html for html in shown)
    assert not any("<script" in html for html in shown)


@pytest.mark.slow
def test_an_interrupted_cell_leaves_a_kernel_that_trains(tmp_path):
    manager, client = jupyter_client.manager.start_new_kernel(env=environment(), cwd=str(tmp_path))
    try:
        execute(
            client,
            "import distflow_jax as df\n"
            f"config = df.load_config('tiny', {SMALL | {'training.steps': 100_000}!r})",
        )
        # an error would make the kernel refuse what is sent meanwhile
        sent = client.execute("df.train(config, 'first')", stop_on_error=False)
        wait_for_step(tmp_path / "first", 2)
        manager.interrupt_kernel()
        assert reply(client, sent)["ename"] == "KeyboardInterrupt"
        said = execute(
            client,
            "import jax, gc, os, subprocess\n"
            "gc.collect()\n"
            "print('arrays', sum(a.size for a in jax.live_arrays()))\n"
            "children = subprocess.run(['ps', '--ppid', str(os.getpid()), '-o', 'args='],"
            " capture_output=True, text=True).stdout\n"
            "print([line for line in children.splitlines() if 'distflow' in line])\n"
            "last = df.load_run('first').metrics[-1]['step']\n"
            "run = df.train(config.override({'training.steps': 2}), 'second')\n"
            "print('steps', len(run.metrics), last >= 2)",
        )
        arrays = int(re.search(r"arrays (\d+)", said)[1])
        assert arrays < 10_000, said  # the model alone has more
        assert "[]\n" in said
        assert "steps 2 True" in said
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def execute(client, code):
    """Runs a cell, and returns what it printed."""
    sent = client.execute(code)
    answer = reply(client, sent)
    assert answer["status"] == "ok", answer
    printed = ""
    while True:
        message = client.get_iopub_msg(timeout=HANG)
        if message["parent_header"].get("msg_id") != sent:
            continue
        if message["msg_type"] == "stream" and message["content"]["name"] == "stdout":
            printed += message["content"]["text"]
        if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
            return printed


def reply(client, sent):
    while True:
        message = client.get_shell_msg(timeout=HANG)
        if message["parent_header"].get("msg_id") == sent:
            return message["content"]


def wait_for_step(folder, step):
    path = folder / "metrics.jsonl"
    until(
        lambda: path.exists() and path.read_text().count("\n") >= step,
        lambda: f"no step {step}",
        pause=0.2,
    )


# -- the config -------------------------------------------------------------------------------


def test_importing_the_package_costs_nothing():
    code = (
        "import sys, distflow_jax as df; assert 'load_config' in dir(df); "
        "assert not {'absl', 'jax', 'numpy', 'distflow_jax.notebook'} & set(sys.modules); "
        "df.load_config; assert 'jax' in sys.modules; "
        "import jax._src.xla_bridge as bridge; assert not bridge._backends"
    )
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        df.nothing  # noqa: B018
