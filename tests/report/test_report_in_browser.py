"""Reports in a real browser: their layout, their charts, and the live page of growing runs.

Nightly: a live page compares runs and follows one that is resumed; it follows 200 steps of a run
beside two others, with at most 1 % of a core (needs Chromium).
"""

import json
import os
import pathlib
import subprocess
import sys
import threading
import time

import pytest
from support import browser as browsers
from support.paced_run import metrics_of, write_run
from support.paths import ROOT

from distflow_jax.report.drawing import Drawing, Rect, Text, to_svg
from distflow_jax.report.json_lines import json_line
from distflow_jax.report.live.live_server import open_server
from distflow_jax.report.run_writer import RunWriter

pytestmark = pytest.mark.skipif(
    not browsers.CHROMIUM, reason="no Chromium: install the package `chromium`"
)

# Pairs of neighbours that overlap, and texts that are wider than their place.
MISPLACED = """(() => {
  const found = [], shown = (e) => e.offsetParent !== null && e.getClientRects().length;
  for (const box of document.querySelectorAll(
      "header, nav, .toolbar, .legend, .tiles, .charts, .row, .chips, main, figcaption, .card")) {
    const own = [...box.children].filter(shown).map((e) => [e, e.getBoundingClientRect()]);
    for (const [a, p] of own) for (const [b, q] of own) {
      if (a === b) break;
      if (Math.min(p.right, q.right) - Math.max(p.left, q.left) > 1 &&
          Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top) > 1)
        found.push(`${a.outerHTML.slice(0, 80)} over ${b.outerHTML.slice(0, 80)}`);
    }
  }
  for (const e of document.querySelectorAll("h1, h2, b, span, button, a, td, th, .tile, figure"))
    if (shown(e) && e.getBoundingClientRect().right > innerWidth + 1 && !e.closest(".wide, pre"))
      found.push(`beyond the edge: ${e.outerHTML.slice(0, 120)}`);
  return found;
})()"""
WIDTHS = "[document.documentElement.scrollWidth, innerWidth]"
# As when the reader comes back to the tab: the page fetches at once
LOOK = "document.dispatchEvent(new Event('visibilitychange'))"
MOST_STOLEN = 0.05  # of a virtual machine's cores, above which a process's CPU seconds vary tenfold
HOSTILE = "</script><script>document.title = 'stolen'</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with browsers.Browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run's folder with something in every section, and hostile text."""
    folder = tmp_path_factory.mktemp("runs") / "a-run-with-quite-a-long-name_lr=2e-6_seed=17"
    writer = RunWriter(folder)
    writer.config({"training": {"steps": 60}, "model": {"source": HOSTILE}, "dag": "x" * 90})
    nodes = [
        {"id": "rollout", "role": "ROLLOUT", "type": "MODEL_INFERENCE"},
        {"id": "actor_train", "role": "ACTOR", "type": "COMPUTE"},
    ]
    tree = json.dumps({"tasks": [{"node": node, "depth": 0} for node in nodes], "segments": []})
    shapes = [Rect(0, 0, 1900, 300, "#eeeeee"), Text(1500, 40, "the plan")]
    writer.plan("1. rollout " * 40, svg=to_svg(Drawing(1900, 300, shapes)), tree=tree)
    writer.event("start", {"step": 0, "host": HOSTILE, "command": "python " + "x" * 300})
    writer.event("ready", {"step": 0, "seconds": 0.1})
    for step in range(1, 61):
        odd = {"actor/grad_norm": float("nan")} if step == 7 else {}
        # of a few decades and hardly above 0 on a log scale
        odd["actor/kl_loss"] = {4: 0.010269, 5: 1.1187e-8, 9: 1e-320}.get(step, -0.5)
        writer.metrics(step, metrics_of(step, 2.0) | odd | {"reward/" + HOSTILE: step})
        writer.stragglers(step, {"rollout": {"seconds": [1, 2], "idle": [0.5, 0], "slowest": 1}})
        record = {"row": 1, "prompt": "long " * 60 + HOSTILE, "response_length": 7}
        texts = ("x" * 500, HOSTILE, "short")
        numbers = [{"score": i, "advantage": (i - 1) ** 2, "finished": i < 1} for i in range(3)]
        records = [record | {"response": t} | n for t, n in zip(texts, numbers, strict=True)]
        writer.samples(step, map(json_line, records))
    span = {"name": "rollout", "ph": "X", "ts": 1, "dur": 2e6, "tid": 1, "args": {"step": 60}}
    trace = [
        span | {"name": "wait_for_samples"},
        span | {"tid": 2, "args": {}},
        *(
            span
            | {"name": "actor_train", "ts": partial_batch * 5e5, "dur": 4e5}
            | {"args": {"step": 60, "partial_batch": partial_batch}}
            for partial_batch in (1, 2, 3)
        ),
    ]
    (folder / "trace.json").write_text("\n".join(map(json.dumps, trace)))
    writer.close()
    return folder


def opened(browser, folder, **options):
    return browser.open((folder / "report.html").as_uri(), **options)


def assert_calm(page):
    """No problem, no horizontal scroll, nothing over anything else."""
    assert not page.problems()
    wide, room = page.run(WIDTHS)
    assert wide <= room
    assert page.run(MISPLACED) == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_the_page_fits_its_window_offline(browser, folder, width, dark):
    page = opened(browser, folder, width=width, dark=dark)
    assert_calm(page)
    assert page.requests() == [(folder / "report.html").as_uri()]
    assert "run-with-quite" in page.run("document.title")  # no script of the run's text ran
    for section in ("timeline", "times", "plan", "samples", "processes", "provenance", "config"):
        assert page.run(f"Boolean(document.getElementById('{section}-0'))"), section
    page.run("document.querySelectorAll('details').forEach((part) => (part.open = true))")
    assert_calm(page)
    colors = page.run("[getComputedStyle(document.body).color, settings.axis]")
    red = int(colors[0].split("(")[1].split(",")[0])
    assert (red > 128) == dark
    picture = page.run("document.querySelector('.picture svg').getBoundingClientRect().width")
    assert picture <= width


def test_partial_batches_alternate_in_the_lane_of_the_training(browser, folder):
    page = opened(browser, folder)
    found = page.run(
        "[...document.querySelectorAll('#times-0 .row')]"
        ".filter((row) => row.querySelector('.label').textContent === 'training')"
        ".flatMap((row) => [...row.querySelectorAll('.track i')])"
        ".map((bar) => [bar.title, getComputedStyle(bar).opacity])"
    )
    assert [opacity for _, opacity in found] == ["1", "0.6", "1"]
    assert found[1][0].startswith("partial batch 2 of 3, actor_train: ")


def test_a_single_evaluation_has_the_axes_of_the_run(browser, tmp_path):
    writer = RunWriter(tmp_path)
    for step in range(9):
        writer.metrics(step, {"val-core/x/reward/mean@1": 0.0} if step == 8 else {"loss": step})
    writer.close()
    page = opened(browser, tmp_path)
    chart = "charts.find(({ spec }) => spec.title.startsWith('val-core')).plot"
    page.wait_for(f"{chart} !== null")
    for axis, (low, high) in {"x": (0, 8), "y": (-0.06, 1)}.items():
        scale = f"{chart}.scales.{axis}"
        assert page.run(f"[{scale}.min, {scale}.max]") == [pytest.approx(low), high]


def test_charts_are_drawn_zoomed_smoothed_and_explained(browser, folder):
    page = opened(browser, folder)
    page.wait_for("charts[0].plot !== null")
    assert page.run("charts[0].spec.title") == "critic/score"
    assert page.run("charts[0].plot.data[0]") == list(range(1, 61))
    assert page.run("document.querySelectorAll('.term').length") > 5
    # drag over the middle third of the first chart
    box = page.run(
        "(({left, top, width}) => [left, top, width])(charts[0].plot.over.getBoundingClientRect())"
    )
    left, top, width = box
    page.mouse("mouseMoved", left + width * 2 / 3, top + 50)
    page.wait_for("charts[0].tip.textContent.includes('step 40')")
    page.mouse("mouseMoved", left + width / 3, top + 50)
    page.mouse("mousePressed", left + width / 3, top + 50)
    page.mouse("mouseMoved", left + width * 2 / 3, top + 50)
    page.mouse("mouseReleased", left + width * 2 / 3, top + 50)
    low, high = page.run("[charts[1].plot.scales.x.min, charts[1].plot.scales.x.max]")
    assert (low, high) == (pytest.approx(20.7, abs=1), pytest.approx(40.3, abs=1))
    page.run("document.getElementById('unzoom').click()")
    assert page.run("charts[1].plot.scales.x.min") == 1
    # smoothing lies between the values, and a log scale has no value below 0
    page.run(
        "(document.getElementById('smooth').value = 0.9, "
        "document.getElementById('smooth').dispatchEvent(new Event('input')))"
    )
    raw, smooth = page.run(
        "charts.find((c) => c.spec.title === 'actor/pg_loss').plot.data.slice(1)"
    )
    assert smooth[0] == raw[0] and min(raw) < smooth[-1] < max(raw) and smooth[-1] > raw[-1]
    page.run("document.getElementById('log').click()")
    assert page.run("charts[0].plot.scales.y.distr") == 3
    small = "charts.find((c) => c.spec.title === 'actor/kl_loss')"
    page.wait_for(f"{small}.plot.scales.y.distr === 3")
    assert page.run(f"[{small}.plot.status, {small}.latest.textContent]") == [1, "-0.5"]
    low, high = page.run(f"[{small}.plot.scales.y.min, {small}.plot.scales.y.max]")
    assert 0 < low < 1.1187e-8 and 0.010269 < high < 0.02
    for low, high in ((1.1, 1.45), (0.2, 0.7), (0.8, 60), (9.7e-9, 0.0118), (1e-150, 1e150)):
        found = page.run(f"logTicks({low}, {high})")
        assert 3 <= len(found) <= 8 and low <= found[0] < found[-1] <= high
    assert all(
        v is None or v > 0 for column in page.run("charts[0].plot.data.slice(1)") for v in column
    )
    page.run(
        "(document.getElementById('axis').value = 'tokens', "
        "document.getElementById('axis').dispatchEvent(new Event('change')))"
    )
    assert page.run("charts[0].plot.data[0][59]") == 60 * 4096
    # explanations, the search, and a value that is not finite
    page.run("charts[0].figure.querySelector('.term').focus()")
    assert "score of a response" in page.run("document.getElementById('help').textContent")
    page.run(
        "(document.getElementById('find').value = 'GRAD', "
        "document.getElementById('find').dispatchEvent(new Event('input')))"
    )
    shown = page.run("charts.filter((c) => c.figure.offsetParent).map((c) => c.spec.title)")
    assert shown == ["actor/grad_norm"]
    assert (
        page.run("charts.find((c) => c.spec.title === 'actor/grad_norm').shown[0].odd[0][1]")
        == "NaN"
    )
    assert_calm(page)


def choose(page, query, value):
    """Chooses an entry of a list of the page."""
    page.run(
        f"(document.querySelector('{query}').value = '{value}', document.querySelector('{query}')"
        ".dispatchEvent(new Event('change', {bubbles: true})))"
    )


def test_samples_are_sorted_and_filtered_and_the_colours_follow_the_reader(browser, folder):
    page = opened(browser, folder)
    for order, places in (("advantage", [2, 0, 1]), ("ending", [0, 2, 1]), ("score", [2, 1, 0])):
        choose(page, ".order", order)
        shown = "[...document.querySelector('.responses').children].map((r) => +r.dataset.score)"
        assert page.run(shown) == places, order
    page.run(
        "(document.querySelector('.grep').value = 'nowhere', "
        "document.querySelector('.grep').dispatchEvent(new Event('input', {bubbles: true})))"
    )
    assert page.run("[...document.querySelectorAll('.card')].every((card) => card.hidden)")
    before = page.run("charts[0].colors.lines[0]")
    page.run("document.getElementById('theme').click()")
    assert page.run("charts[0].colors.lines[0]") != before
    assert_calm(page)


@pytest.fixture
def serve():
    """Serves the runs of folders from a thread, and returns the page's address."""
    servers = []

    def start(*folders):
        server = open_server(folders, 0)
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        servers.append(server)
        return server.url

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.slow
def test_a_live_page_compares_runs_and_follows_one_that_is_resumed(browser, serve, tmp_path):
    for number, name in enumerate(("one", "two", "three")):
        write_run(tmp_path / name, 12, 0, phase=number, total=40)
    page = browser.open(serve(tmp_path))
    page.wait_for("charts.length && charts[0].plot")
    page.wait_for("document.getElementById('config-0')")
    page.run("window.still_here = true")
    assert page.run("runs.map((run) => run.name)") == ["one", "three", "two"]
    assert page.run("charts[0].lines().map((line) => line.name)") == ["one", "three", "two"]
    page.wait_for("document.getElementById('differences').textContent")
    differing = page.run("document.getElementById('differences').textContent")
    assert "Settings that differ" in differing and "seed" in differing
    assert_calm(page)
    page.run("document.querySelectorAll('.key')[1].click()")
    assert page.run("charts[0].lines().map((line) => line.name)") == ["one", "two"]
    chosen = "document.querySelector('.file').selectedOptions[0].text"
    before = page.run("document.querySelector('.file').innerHTML")
    choose(page, ".file", page.run("document.querySelector('.file').options[2].value"))
    step = page.run(chosen)
    writer = RunWriter(tmp_path / "one", resume_step=12)
    writer.metrics(13, metrics_of(13, 1.0) | {"val-core/new/reward/mean@1": 0.5})
    page.run(LOOK)
    page.wait_for("runs[0].last === 13 && runs[0].charts.has('val-core/new/reward/mean@1')")
    page.wait_for("document.getElementById('status').textContent === 'step 13 of 40'")
    for late in (11, 12):  # evaluations that end after later steps
        writer.late_metrics(late, {"val-core/new/reward/mean@1": 0.25})
        page.run(LOOK)
        page.wait_for(f"runs[0].metrics.get('val-core/new/reward/mean@1').x.includes({late})")
    assert page.run("runs[0].metrics.get('val-core/new/reward/mean@1').x") == [11, 12, 13]
    assert page.run("runs[0].last") == 13
    writer.samples(13, [json_line({"row": 1, "prompt": "p", "response": "r", "score": 1})])
    page.run("refreshSections()")
    assert page.run("document.querySelector('.file').innerHTML") != before
    assert page.run(chosen) == step != "step 13"  # the reader keeps the step that is being read
    shown = page.run("document.querySelector('.samples:not([hidden])').dataset.file")
    assert shown == page.run("document.querySelector('.file').value")
    writer.close()
    writer = RunWriter(tmp_path / "one", resume_step=5)  # drops steps 6 to 13
    writer.metrics(6, metrics_of(6, 1.0, phase=0.5))
    page.run(LOOK)
    page.wait_for("runs[0].last === 6")
    assert page.run("runs[0].metrics.get('actor/pg_loss').x") == [1, 2, 3, 4, 5, 6]
    assert page.run("runs[1].last") == 12 and page.run("window.still_here")
    writer.close()
    assert_calm(page)


def test_live_sections_follow_every_file_of_a_run_and_keep_what_is_read(browser, serve, tmp_path):
    def refresh(truth):
        page.run("sectionsAt = 0")
        page.run(LOOK)
        page.wait_for(truth)

    def write(*steps):
        for step in steps:
            prompt = {"row": 1, "prompt": "p", "response": f"r{step}", "score": 1.0}
            writer.samples(step, [json_line(prompt)])
            writer.metrics(step, {"a/b": 1.0})

    page = browser.open(serve(tmp_path))
    page.wait_for("document.getElementById('status').textContent === 'no step yet'")
    writer = RunWriter(tmp_path)
    writer.config({"training": {"steps": 9}})
    writer.event("start", {"step": 0})
    refresh("document.getElementById('config-0') && document.getElementById('timeline-0')")
    write(1, 2, 3)
    refresh("document.querySelector('select.file')?.value === '3'")
    write(4)
    refresh("document.querySelector('select.file').value === '4'")
    page.run(
        "(() => { const file = document.querySelector('select.file'); file.value = '2'; "
        "file.dispatchEvent(new Event('change', { bubbles: true })); "
        "document.querySelector('[data-key=\"2/0\"]').open = true; })()"
    )
    write(5)
    refresh("document.querySelector('select.file').options.length === 5")
    assert page.run("document.querySelector('select.file').value") == "2"
    assert page.run("[...document.querySelectorAll('.samples:not([hidden])')].length") == 1
    assert page.run("document.querySelector('.samples:not([hidden])').dataset.file") == "2"
    assert page.run("[...document.querySelectorAll('details[data-key][open]')].length") == 1
    assert page.run("document.querySelector('[data-key=\"2/0\"]').open")
    writer.event("stop", {"step": 5, "reason": "the last word"})  # after the last row
    refresh("document.getElementById('timeline-0').innerHTML.includes('the last word')")
    writer.close()
    assert_calm(page)


def test_rows_of_a_run_with_very_many_metrics_are_appended(browser, serve, tmp_path):
    writer = RunWriter(tmp_path)
    values = {f"g/m{i}": 1.0 for i in range(310)}
    writer.metrics(1, values)
    page = browser.open(serve(tmp_path))
    page.wait_for("charts.length && runs[0].more === 10")
    for step in (2, 3):
        writer.metrics(step, values)
        page.run(LOOK)
        page.wait_for(f"runs[0].last === {step}")
    assert sum("/data/" in url for url in page.requests()) == 1
    assert page.run("[...runs[0].metrics.values()].every(({ x }) => x.length === 3)")
    writer.close()


@pytest.mark.slow
def test_a_live_page_follows_200_steps_at_most_of_1_percent_of_a_core(tmp_path):
    """live/ and web/: a live page shows each of 200 steps of a growing run beside two others, with
    at most 1 % of a core: CPU seconds of the serving process and of the renderer process that has
    the page, over the wall seconds of the run. `-s` prints both, and the rest of the browser."""
    steps, pace = 200, 0.5
    for number, name in enumerate(("first", "second")):
        write_run(tmp_path / name, steps, 0, phase=1.0 + number)
    (tmp_path / "growing").mkdir()
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    command = [sys.executable, str(ROOT / "scripts" / "report.py"), "--serve=0"]
    folders = [str(tmp_path / name) for name in ("growing", "first", "second")]
    server = subprocess.Popen(
        [*command, *folders], cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE
    )
    with server, browsers.Browser(tmp_path / "profile") as browser:
        page = browser.open(server.stdout.readline().split()[3])
        page.wait_for("charts.length && charts[0].plot")
        page.run("window.still_here = true")
        writing = [sys.executable, "-m", "support.paced_run", folders[0], str(steps), str(pace)]
        writer = subprocess.Popen(writing, env=env)
        page.wait_for("runs[0].last >= 5")  # the charts are there, the programs warm
        began, before = time.monotonic(), spent(server, browser)
        assert writer.wait() == 0
        elapsed, after = time.monotonic() - began, spent(server, browser)
        page.wait_for(f"runs[0].last === {steps}")
        assert page.run("runs[0].metrics.get('actor/pg_loss').x") == list(range(1, steps + 1))
        assert page.run("charts[0].lines().map((line) => line.x.length)") == [steps] * 3
        assert page.run("window.still_here") and not page.problems()
        server.terminate()
    stolen = (after.pop("stolen") - before.pop("stolen")) / elapsed / os.cpu_count()
    share = {name: (after[name] - before[name]) / elapsed for name in after}
    print(f"shares of a core over {elapsed:.1f} s: {share}")
    if stolen > MOST_STOLEN:
        pytest.skip(f"the host took {stolen:.0%} of the cores; CPU seconds measure nothing then")
    assert share["server"] + share["page"] <= 0.01, share


def spent(server, browser):
    """CPU seconds so far of the server, of the process that has the page, and of the others of the
    browser, which serve all its tabs; and those that the host of a virtual machine took from it."""
    seconds = browser.cpu_seconds()
    renderers = [
        process
        for process in seconds
        if b"--type=renderer" in pathlib.Path(f"/proc/{process}/cmdline").read_bytes()
    ]
    page = sum(seconds[process] for process in renderers)
    machine = pathlib.Path("/proc/stat").read_text().split(maxsplit=9)
    return {
        "server": browsers.cpu_seconds(server.pid),
        "page": page,
        "rest of the browser": sum(seconds.values()) - page,
        "stolen": int(machine[8]) / os.sysconf("SC_CLK_TCK"),
    }
