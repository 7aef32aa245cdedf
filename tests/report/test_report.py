"""A report shows what a run left, whatever state that is in, and runs nothing that a run wrote."""

import base64
import hashlib
import html.parser
import json
import math
import re
import sys
import xml.etree.ElementTree as ET

import pytest

from distflow_jax.observe.phases import Phases
from distflow_jax.observe.spans import Spans
from distflow_jax.report.charts import Series, downsample, format_value, line_chart, ticks
from distflow_jax.report.drawing import Text, to_svg
from distflow_jax.report.headline import status, tiles
from distflow_jax.report.json_lines import json_line
from distflow_jax.report.page import compare_page, differences, is_plain_svg, report
from distflow_jax.report.read_run import read_run
from distflow_jax.report.run_writer import RunWriter
from distflow_jax.report.sections.worker_table import worker_table

HOSTILE = "</td><script>alert('1')</script><img src=x onerror=alert(2)>\"'& \ud800\0\u2028"
VOID = {"meta", "input", "img", "br", "wbr", "link"}


class Page(html.parser.HTMLParser):
    """Checks that tags nest; collects them, their attributes, and the text outside scripts."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts = [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        assert len({name for name, _ in attributes}) == len(attributes), attributes
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script" and data.lstrip().startswith("{"):
            self.data = json.loads(data)
        if self.open and self.open[-1] not in ("script", "style"):
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(self.texts)

    def attributes(self, name):
        return [found[name] for _, found in self.tags if name in found]

    @property
    def run(self):
        """The numbers of the charts of the first run."""
        return self.data["runs"][0]

    def points(self, name):
        """{step: value} of a metric; None for a value that is not finite."""
        grid, values, _ = self.run["metrics"][name]
        return dict(zip(self.run["grids"][grid], values, strict=True))


def checked(folder):
    """The page of a folder, after what must hold of every page."""
    text = report(folder)
    text.encode("utf-8")
    page = Page(text)
    ids = page.attributes("id")
    assert len(ids) == len(set(ids))
    kinds = [found.get("type") for tag, found in page.tags if tag == "script"]
    assert kinds == ["application/json", None]
    links = [found for tag, found in page.tags if tag == "a" and "hidden" not in found]
    assert {found["href"] for found in links} <= {f"#{name}" for name in ids}
    assert not page.attributes("src")
    assert not [name for _, found in page.tags for name in found if name.startswith("on")]
    assert not re.search(r"@import|url\(", text)
    assert_only_its_own_script_runs(text)
    for svg in re.findall(r"<svg .*?</svg>", text, re.DOTALL):
        ET.fromstring(svg)
    return page


def assert_only_its_own_script_runs(text):
    """The policy names script and style of the page by their digests, and no other source."""
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    for name, content in (("script-src", script), ("style-src-elem", style)):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert rules[name] == f"'sha256-{digest}'"


def write_run(folder, steps=6, *, first=1, resume_step=None):
    """Writes the files of a run of so many steps, with the writers of a real run."""
    spans = Spans(folder / "trace.json")
    phases = Phases(spans, Quiet(), lambda: 0.0)
    writer = RunWriter(folder, resume_step=resume_step)
    writer.config({"training": {"steps": steps}, "model": {"source": "random:llama"}})
    nodes = [("rollout", "ROLLOUT", 0), ("values", "CRITIC", 1), ("old", "ACTOR", 1)]
    tasks = [{"node": {"id": name, "role": role}, "depth": depth} for name, role, depth in nodes]
    tree = {"tasks": tasks, "segments": [["values", "old"]]}
    writer.plan("1. rollout", svg=to_svg(line_chart([])[0]), tree=json.dumps(tree))
    for step in range(first, steps + 1):
        phases.step = step
        with phases.span("rollout"), spans.span("reshard"):
            pass
        with phases.span("values.old"):  # one program
            pass
        metrics = {f"critic/score/{word}": step / 7 for word in ("mean", "max", "min")}
        writer.metrics(step, metrics | {"timing_s/step": 1.0, "x/kurtosis": 3.5})
        writer.stragglers(step, {"rollout": {"seconds": [1, 2], "idle": [0.5, 0], "slowest": 1}})
        record = {"prompt": f"p{step}", "response": "r", "score": step / 3}
        writer.samples(step, [json_line(record)])
        spans.take()
    record = {"prompt": "q", "responses": ["a1", "a2"], "scores": [0, 1]}
    writer.samples(f"eval-{steps}", [json_line(record)])
    spans.close()
    writer.close()


class Quiet:
    def progress(self, step, phase):
        pass


def test_a_run_leaves_a_report_of_all_it_wrote(tmp_path):
    write_run(tmp_path)
    page = checked(tmp_path)
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == report(tmp_path)
    for word in ("done: 6 steps", "random:llama", "Step 6", "1. rollout", "2. values.old", "p6"):
        assert word in page.text
    assert "note" not in " ".join(page.attributes("class")).split()
    titles = [chart["title"] for chart in page.run["charts"]]
    assert titles == ["critic/score", "timing_s/step", "x/kurtosis"]
    words = [word for word, _ in page.run["charts"][0]["lines"]]
    assert words == ["mean", "max", "min"]
    expected = {step: step / 7 for step in range(1, 7)}
    assert page.points("critic/score/mean") == pytest.approx(expected, rel=1e-4)
    assert all(word in page.text for word in ("a1", "a2", "step 1", "evaluation at step 6"))


def test_an_empty_folder_has_a_report(tmp_path):
    assert "no step yet" in checked(tmp_path).text
    assert "no step yet" in checked(tmp_path / "nowhere").text


def test_a_run_that_has_not_begun_has_a_report(tmp_path):
    RunWriter(tmp_path).close()
    assert "no step yet" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "metrics.jsonl", "events.jsonl", "trace.json", "stragglers.jsonl"),
        *("plan.json", "plan.svg", "plan.txt"),
    ],
)
@pytest.mark.parametrize("content", [None, "", '{"a": ', "[1, 2]\n", "\x00\xff<svg onload=x>", "7"])
def test_any_file_may_be_missing_or_spoilt(tmp_path, name, content):
    write_run(tmp_path, 2)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content.encode("latin-1"))
    assert tmp_path.name in checked(tmp_path).text


def test_a_torn_line_costs_that_line(tmp_path):
    write_run(tmp_path, 3)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "critic/score/me')
    page = checked(tmp_path)
    assert "metrics.jsonl: 1 lines cannot be read" in page.text
    assert list(page.points("critic/score/mean")) == [1, 2, 3]


def test_hostile_samples_stay_text(tmp_path):
    writer = RunWriter(tmp_path)
    writer.config({"model": {"source": HOSTILE}, HOSTILE: [HOSTILE]})
    writer.plan(HOSTILE.replace("\ud800", ""), svg="<svg xmlns='x' onload='alert(3)'></svg>")
    writer.metrics(1, {"reward/" + HOSTILE: 1.0, "val-core/" + HOSTILE: 0.5})
    writer.stragglers(1, {HOSTILE: {"seconds": [1, 2], "idle": [0, 0.5], "slowest": 0}})
    record = {key: HOSTILE for key in ("prompt", "response", "ground_truth", "score")}
    lines = json.dumps(record) + "\n" + json.dumps({"prompt": [{"role": HOSTILE}]}) + "\n"
    writer.close()
    (tmp_path / "samples" / "1.jsonl").write_text(lines)
    (tmp_path / "trace.json").write_text(
        json.dumps({"name": HOSTILE, "ph": "X", "ts": 1, "dur": 2, "args": {"step": 1}})
    )
    page = checked(tmp_path)
    assert page.text.count("<script>alert('1')</script>") >= 8
    assert "img" not in {tag for tag, _ in page.tags}


def test_what_is_not_finite_is_shown_and_breaks_nothing(tmp_path):
    writer = RunWriter(tmp_path)
    for step, value in enumerate([math.nan, 1.0, math.inf, -math.inf, 2.0, 1e308, -1e308], 1):
        names = ("actor/grad_norm", "critic/score/mean", "timing_s/step", "perf/throughput")
        writer.metrics(step, dict.fromkeys(names, value) | {"actor/all_nan": math.nan})
    writer.close()
    page = checked(tmp_path)
    assert "metrics not finite" in page.text
    grid, values, odd = page.run["metrics"]["actor/grad_norm"]
    assert odd == [[1, "NaN"], [3, "Infinity"], [4, "-Infinity"]]
    assert [value is None for value in values] == [True, False, True, True, False, False, False]
    places = re.findall(r" style='([^']*)'", report(tmp_path))
    assert not re.search("nan|inf", " ".join(places))


def test_the_largest_float_does_not_round_to_infinity(tmp_path):
    writer, most = RunWriter(tmp_path), sys.float_info.max
    for step in (1, 2):
        writer.metrics(step, {"actor/grad_norm": most, "timing_s/step": most})
    writer.close()
    data = checked(tmp_path).run
    assert data["metrics"]["actor/grad_norm"][1] == [most, most]
    assert data["axes"]["seconds"] == [[1], [pytest.approx(most)]]  # two are more than most


@pytest.mark.parametrize("name", ["config.json", "plan.json", "events.jsonl", "trace.json"])
@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 990 + "1" + "}" * 990])
def test_deeply_nested_files_are_left_out(tmp_path, name, text):
    (tmp_path / name).write_text(f"{text}\n")
    read_run(tmp_path)


def test_files_of_samples_with_other_digits_are_left_out(tmp_path):
    (tmp_path / "samples").mkdir()
    for name in ("1", "\N{SUPERSCRIPT TWO}"):
        (tmp_path / "samples" / f"{name}.jsonl").write_text('{"prompt": "a"}\n')
    assert list(read_run(tmp_path).samples) == ["1"]


def test_secrets_of_the_config_are_not_shown(tmp_path):
    for folder, key in (("one", "sk-1"), ("two", "sk-2")):
        writer = RunWriter(tmp_path / folder)
        environment = {"auth_token": key, "urls": [f"https://me:{key}@host/x"]}
        writer.config(
            {
                "model": {"source": f"https://me:{key}@host/model"},
                "reward": {"kwargs": {"api_key": key, "text": f"{{'password': '{key}'}}"}},
                "environment": environment,
                "training": {"row_tokens": 512},
            }
        )
        writer.close()
    runs = {name: read_run(tmp_path / name) for name in ("one", "two")}
    for text in (report(tmp_path / "one"), compare_page(runs)):
        assert "sk-" not in text and "row_tokens" in text
    differing = differences({name: run.config for name, run in runs.items()})
    assert "reward.<wbr>kwargs.<wbr>api_key" in differing


def test_ten_thousand_steps_make_a_page_of_bounded_size(tmp_path):
    names = [f"g{i % 9}/m{i}" for i in range(25)]
    lines = [
        json.dumps({"step": s} | {name: math.sin(s * 0.1) * s for name in names})
        for s in range(1, 10_001)
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    text = "many words " * 30_000
    (tmp_path / "samples").mkdir()
    for step in (1, 5_000, 10_000):
        record = json.dumps({"prompt": text, "response": text, "score": 1.0}) + "\n"
        (tmp_path / "samples" / f"{step}.jsonl").write_text(record * 40)
    size = len(report(tmp_path).encode())
    assert 100_000 < size < 3_000_000


def test_of_a_very_long_run_some_steps_are_read_and_all_validations(tmp_path):
    rows = [{"step": s, "timing_s/step": 2.0} for s in range(1, 50_001)]
    rows[4320]["val-core/a"] = 0.25
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = read_run(tmp_path)
    assert run.notes == ["metrics.jsonl: of 50000 lines one in 3 is read"]
    assert {4321, 50_000} < set(run.rows) and len(run.rows) < 20_000
    assert "27h46m" in checked(tmp_path).text


def test_many_metrics_make_a_page_of_bounded_size(tmp_path):
    row = {f"reward/word{i}": 0.123456789 for i in range(3000)}
    lines = [json.dumps({"step": step} | row) for step in range(1, 101)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    text = report(tmp_path)
    assert Page(text).run["more"] == 2700
    assert len(text) < 3_000_000


def test_a_resumed_run_shows_the_last_time_that_a_step_was_made(tmp_path):
    write_run(tmp_path, 4)
    before = read_run(tmp_path).steps
    assert list(before) == [1, 4]
    write_run(tmp_path, 4, first=4, resume_step=3)
    after = read_run(tmp_path).steps
    assert list(after) == [1, 4]
    assert [span.name for span in after[4]] == ["rollout", "reshard", "values.old"]
    assert after[4] != before[4] and after[1] == before[1]


def test_spans_belong_to_the_step_in_whose_time_they_lie(tmp_path):
    def event(name, start, end, thread=1, **args):
        return {"name": name, "ph": "X", "ts": start, "dur": end - start, "tid": thread} | args

    events = [
        {"name": "thread_name", "ph": "M", "tid": 2, "args": {"name": "reader"}},
        event("a", 10e6, 11e6, args={"step": 3}),
        event("read", 10.5e6, 11.5e6, thread=2),
        event("b", 11e6, 12e6, args={"step": 3}),
        event("late", 13e6, 14e6, thread=2),
    ]
    (tmp_path / "trace.json").write_text("[\n" + "".join(json.dumps(e) + ",\n" for e in events))
    (spans,) = read_run(tmp_path).steps.values()
    found = [(s.name, s.thread, s.start, s.end) for s in spans]
    assert found == [("a", "", 0.0, 1.0), ("read", "reader", 0.5, 1.5), ("b", "", 1.0, 2.0)]


def test_waits_are_shown_beside_the_threads(tmp_path):
    def event(kind, name, time, **rest):
        return {"name": name, "ph": kind, "ts": int(time * 1e6), "tid": 1} | rest

    events = [
        event("X", "a", 10, dur=2_000_000, args={"step": 1}),
        event("b", "score", 10.5, id="x.1", cat="waiting", args={}),
        event("b", "score", 10.75, id="x.2", cat="waiting", args={}),
        event("e", "score", 11.5, id="x.1", cat="waiting"),  # the other one never ends
    ]
    (tmp_path / "trace.json").write_text("[\n" + "".join(json.dumps(e) + ",\n" for e in events))
    (spans,) = read_run(tmp_path).steps.values()
    found = [(s.name, s.thread, s.start, s.end) for s in spans]
    assert found == [("a", "", 0.0, 2.0), ("score", "waiting", 0.5, 1.5)]


def test_a_report_that_fails_does_not_fail_the_run(tmp_path, caplog):
    (tmp_path / "report.html").mkdir()
    writer = RunWriter(tmp_path, report_every=1)
    writer.metrics(1, {"a/b": 1.0})
    writer.close()
    assert "report.html could not be written" in caplog.text


def test_the_report_is_made_while_the_run_goes_on(tmp_path):
    writer = RunWriter(tmp_path, report_every=2)
    writer.metrics(1, {"a/b": 1.0})
    assert not (tmp_path / "report.html").exists()
    writer.metrics(2, {"a/b": 1.0})
    assert "step 2" in (tmp_path / "report.html").read_text()
    writer.close()


@pytest.mark.parametrize(
    "inside",
    [
        "<script/>",
        "<rect onclick='x'/>",
        "<a href='x'/>",
        "<rect fill='url(#a)'/>",
        "<image/>",
        "<rect id='find'/>",
        "<style>*{}</style>",
        "<rect style='fill:red'/>",
        "<rect",
        "<!-- -->",
    ],
)
def test_only_a_plain_drawing_is_taken_into_the_page(inside):
    around = "<svg xmlns='http://www.w3.org/2000/svg'>{}</svg>"
    assert is_plain_svg(around.format("<rect/>"))
    assert not is_plain_svg(around.format(inside))


@pytest.mark.parametrize("most", [40, 300])
def test_downsampling_keeps_extremes_order_and_the_end(most):
    points = [(step, math.sin(step / 50)) for step in range(5000)]
    points[1234], points[2345], points[3456] = (1234, 9.0), (2345, -9.0), (3456, math.nan)
    kept = downsample(points, most)
    assert len(kept) <= 1.5 * most + 1
    assert [step for step, _ in kept] == sorted({step for step, _ in kept})
    assert {points[1234], points[2345], points[3456], points[-1]} <= set(kept)
    assert downsample(points[:most], most) == points[:most]


@pytest.mark.parametrize("low, high", [(0, 1), (-3, 1e-9), (1e-9, 2e-9), (1e6, 1e6 + 1), (3, 3)])
def test_ticks_are_round_and_within(low, high):
    found = ticks(low, high, 4)
    assert 1 <= len(found) <= 6
    slack = 1e-6 * (high - low)
    assert all(low - slack <= tick <= high + slack for tick in found)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.00012, "0.00012"),
        (0.0000123, "1.23e-5"),
        (0.25, "0.25"),
        (1234.5, "1234"),
        (12345.6, "12,346"),
        (1_250_000, "1.25M"),
        (-3e9, "-3G"),
        (1e300, "1e300"),
        (math.nan, "nan"),
    ],
)
def test_format_value(value, text):
    assert format_value(value) == text


def test_the_first_step_of_each_start_may_compile(tmp_path):
    writer = RunWriter(tmp_path)
    for begun in (0, 3):
        writer.event("start", {"step": begun})
        for step in range(begun + 1, begun + 4):
            compiled = 24.0 if step == begun + 1 else float(step == 6)
            writer.metrics(step, {"perf/compilations": compiled})
    writer.close()
    (tile,) = [tile for tile in tiles(read_run(tmp_path)) if tile.bad]
    assert (tile.name, tile.value) == ("compilations after a start's first step", "1")


def test_workers_are_shown_with_what_each_sampled(tmp_path):
    (tmp_path / "groups").mkdir()
    lines = [
        {"uid": [[0, 0], [0, 1], [1, 0]], "age": [0, 1, 0], "workers": {"<a>": [0], "b": [1]}},
        {"uid": [[2, 0], [2, 1]], "age": [1, 1], "workers": {"<a>": [2]}},
        {"uid": [], "age": [], "workers": []},
    ]
    text = "".join(json.dumps({"step": step} | line) + "\n" for step, line in enumerate(lines, 1))
    (tmp_path / "groups" / "0.jsonl").write_text(text)
    assert "<h2>Workers</h2>" not in report(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"stream": {"workers": True}}))
    rows = re.findall(r"<tr>(<td>.*?)</tr>", worker_table(read_run(tmp_path).groups))
    assert [re.findall("<td>(.*?)</td>", row) for row in rows] == [
        ["&lt;a&gt;", "1", "2", "66.7%", "0.75"],
        ["b", "1", "1", "33.3%", "0.00"],
    ]
    assert "<h2>Workers</h2>" in report(tmp_path)


def test_a_stopped_run_is_marked_until_it_goes_on(tmp_path):
    writer = RunWriter(tmp_path)
    writer.config({"training": {"steps": 20}})
    writer.event("start", {"step": 0})
    writer.metrics(3, {"loss": 1.0})
    writer.event("stop", {"step": 3, "reason": "stopped by a signal", "unfinished": True})
    writer.close()
    assert status(read_run(tmp_path)) == ("stopped", "stopped by a signal: step 3 of 20")
    assert "class='status stopped'>stopped by a signal" in (tmp_path / "report.html").read_text()
    writer.event("start", {"step": 3})
    assert status(read_run(tmp_path)) == ("open", "step 3 of 20")
    writer.event("stop", {"step": 3, "reason": "the data ended", "unfinished": False})
    assert status(read_run(tmp_path)) == ("open", "step 3 of 20")


def test_a_chart_of_one_value_has_an_axis_around_it():
    for value, (low, high) in {0.0: (-0.04, 1.0), 0.5: (0.25, 0.75), -2.0: (-3.0, -1.0)}.items():
        _, scale = line_chart([Series("a", [(8, value)])])
        assert (scale.first, scale.last, scale.low, scale.high) == (8, 8, low, high)


def test_a_chart_stays_within_its_frame():
    points = [(step, (-1.0) ** step * 10.0**step) for step in range(0, 300)]
    drawing, _ = line_chart([Series("a", points)])
    boxes = [shape.box() for shape in drawing.shapes if isinstance(shape, Text)]
    assert all(0 <= b[0] and b[2] <= drawing.width and b[3] <= drawing.height for b in boxes)
    assert to_svg(drawing).startswith("<svg ")
