"""Runs from a notebook: configs, plans, training and its results, as objects that a cell shows.

    import distflow_jax as df

    config = df.load_config("tiny", {"training.steps": 10, "dag": "grpo"})
    df.make_plan(config)                              # the picture
    run = df.train(config, "/tmp/first")              # progress in the cell
    run.curves("critic/score/mean", "response_length/mean")
    run.samples(step=5)
    df.compare({"a": run, "b": df.load_run("/tmp/second")}, "critic/score/mean")

All functions are for one process and run in the cell's thread. User errors raise ValueError or
FileNotFoundError; nothing exits, and no state is kept between calls.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import distflow_jax.run as run_lib
from distflow_jax.config.config_dict import config_table, from_config_dict
from distflow_jax.config.graph_settings import value_at, with_values
from distflow_jax.config.run_config import Config
from distflow_jax.config.shipped import config_file, open_config
from distflow_jax.config.unknown_keys import key_hint
from distflow_jax.dag.plan import Plan
from distflow_jax.did_you_mean import hint
from distflow_jax.parsing.paths import named_path
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.plan_run import plan_run
from distflow_jax.report.cells import (
    LINES,
    Charts,
    Page,
    Pictures,
    Table,
    details,
    plain,
    preformatted,
    size_table,
)
from distflow_jax.report.chart_choice import TOGETHER, charts_of, main_charts
from distflow_jax.report.charts import COLORS, PALE, Series
from distflow_jax.report.drawing import Drawing, to_svg
from distflow_jax.report.headline import status, tiles
from distflow_jax.report.page import page
from distflow_jax.report.page_style import escaped
from distflow_jax.report.plan_picture.picture import draw
from distflow_jax.report.read_run import RunFolder, read_run, read_samples
from distflow_jax.report.sections.sample_cards import pictures_of, responses_of
from distflow_jax.rewards.pool import RewardPool
from distflow_jax.rewards.records import RewardRequest
from distflow_jax.watchdog.exit_codes import EXIT_PREEMPTED

_HERE = "__main__"  # the module of functions that cells define
_EXAMPLE_KEYS = ("response", "ground_truth", "prompt", "data_source", "extra_info")


# -- configs ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """A run's configuration, and the keys that the user set.

    `config` holds the values. The keys in `chosen` have precedence over the graph's settings, as
    those of the command line have. A cell shows the values that differ from the defaults.
    """

    name: str
    config: Config
    chosen: frozenset[str] = frozenset()

    def override(self, values: Mapping[str, Any]) -> "RunConfig":
        """Returns the config with other values at some keys, {"training.steps": 5}.

        A function stands for its name: {"dag": my_graph} is "my_module:my_graph". A path stands
        for its text.

        Raises:
          ValueError: an unknown key (the message names the nearest), a section, or a value of
            another type.
        """
        for key in values:
            if not isinstance(key, str):
                raise ValueError(f"keys must be strings such as 'training.steps', got {key!r}")
        named = {key: _plain_value(key, value) for key, value in values.items()}
        config = with_values(self.config, named)
        return dataclasses.replace(self, config=config, chosen=self.chosen | named.keys())

    def __getitem__(self, key: str) -> Any:
        """The value at a key: config["training.steps"]."""
        try:
            return value_at(self.config, key)
        except (AttributeError, KeyError, TypeError):
            keys = config_table(self.config)
            near = key_hint(key, keys) or hint(key, keys)
            raise ValueError(f"unknown key config.{key} ({near})") from None

    def _changed(self) -> Table:
        table, default = config_table(self.config), config_table(Config())
        rows = [
            {"key": key, "value": json.loads(value), "default": json.loads(default.get(key, '""'))}
            for key, value in sorted(table.items())
            if value != default.get(key)
        ]
        title = f"config {self.name}: {len(rows)} values that differ from the defaults"
        return Table(rows, ("key", "value", "default"), title, shown=len(rows))

    def _repr_html_(self) -> str:
        return self._changed()._repr_html_()

    def __repr__(self) -> str:
        return repr(self._changed())


def load_config(
    source: str | os.PathLike | Config | Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
) -> RunConfig:
    """Loads a config by its name, from a file or an object, with other values at some keys.

    Args:
      source: "tiny", a shipped config, or the path of a .py file with a `get_config`, both with its
        argument after a colon; a Config, or its ConfigDict.
      overrides: {"training.steps": 10, ...}, see RunConfig.override.

    Raises:
      FileNotFoundError, ValueError: no such config (the message names the nearest), one that cannot
        be loaded, or overrides that do not fit it.
    """
    name = "from a cell"
    if isinstance(source, str | os.PathLike):
        name = pathlib.Path(config_file(source).partition(":")[0]).stem
        source = open_config(source)
    config = source if isinstance(source, Config) else from_config_dict(Config, source)
    return RunConfig(name, config).override(overrides or {})


def _plain_value(key: str, value: Any) -> Any:
    """The value in the form that a config holds: functions and paths become strings."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if not callable(value):
        return value
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "<")
    if module is None or "<" in name:
        raise ValueError(f"{key}: {value!r} cannot be imported by name; define it with def")
    if key == "reward.function" and module == _HERE:
        raise ValueError(
            f"reward.function: {name} is defined in a cell, which worker processes cannot import; "
            f"write it to a file with %%writefile rewards.py and name 'rewards.py:{name}'"
        )
    return f"{module}:{name}"


# -- the plan ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PlanView:
    """A run's plan. A cell shows its picture, with table and sizes folded below."""

    plan: Plan
    sizes: Table

    @property
    def drawing(self) -> Drawing:
        """The picture, for to_svg."""
        return draw(self.plan)

    def _repr_html_(self) -> str:
        picture = to_svg(self.drawing, f"plan {self.plan.name}")
        return (
            f"<div style='overflow-x:auto'>{picture}</div>"
            + details("as a table", preformatted(self.plan.describe()))
            + details("sizes", self.sizes._repr_html_())
        )

    def __repr__(self) -> str:
        return self.plan.describe()


def make_plan(config: RunConfig, *, devices: int = 0) -> PlanView:
    """Plans a run: order, layouts, sizes. Trains nothing; opens the model, but no data.

    `devices` is the number of devices of one host to plan for; 0: those of this machine.
    Raises ValueError or FileNotFoundError, as training would.
    """
    if devices < 0:
        raise ValueError(f"devices must not be negative, got {devices}")
    machine = Machine.current()
    if devices:
        machine = dataclasses.replace(machine, processes=1, devices=devices, local_devices=devices)
    planned = plan_run(config.config, machine, config.chosen)
    return PlanView(planned.plan, size_table(planned.table()))


# -- rewards ----------------------------------------------------------------------------------


def try_reward(config: RunConfig, examples: Iterable[Mapping[str, Any]]) -> Table:
    """Scores examples with the config's reward function, called as a run would call it.

    Args:
      config: its section `reward` names the function, its kwargs and its deadline.
      examples: {"response": text} each, with `ground_truth`, `prompt` (text or messages),
        `data_source`, `extra_info` as the function needs them.

    Returns:
      A row per example: `score`, `error` ("" without one), the function's other numbers, and the
      example. The length penalty of reward.overlong_buffer is not in the score.

    Raises:
      ValueError, FileNotFoundError: an example with other keys, or a function that cannot be
        loaded.
    """
    examples = [dict(example) for example in examples]
    requests = [_request(number, example) for number, example in enumerate(examples)]
    with RewardPool(config.config.reward, config.config.sandbox) as pool:
        results = pool.score(requests)
    rows = [
        {"score": result.score, **result.logged, "error": result.error or "", **example}
        for result, example in zip(results, examples, strict=True)
    ]
    logged = dict.fromkeys(name for result in results for name in result.logged)
    errors = ["error"] if any(result.error for result in results) else []
    keys = [key for key in _EXAMPLE_KEYS if any(key in example for example in examples)]
    title = f"reward {config['reward.function']}"
    return Table(rows, ["score", *logged, *errors, *keys], title, shown=len(rows))


def _request(number: int, example: Mapping[str, Any]) -> RewardRequest:
    for key in example:
        if key not in _EXAMPLE_KEYS:
            raise ValueError(f"example {number}: unknown key {key!r} ({hint(key, _EXAMPLE_KEYS)})")
    if not isinstance(example.get("response"), str):
        raise ValueError(
            f"example {number}: 'response' must be a string, got {example.get('response')!r}"
        )
    prompt = example.get("prompt", "")
    return RewardRequest(
        data_source=example.get("data_source", ""),
        solution=example["response"],
        ground_truth=example.get("ground_truth"),
        extra_info=dict(example.get("extra_info") or {}),
        prompt=prompt if isinstance(prompt, str) else "",
        messages=None if isinstance(prompt, str) else prompt,
    )


# -- runs -------------------------------------------------------------------------------------


def train(config: RunConfig, workdir: str | os.PathLike) -> "Results":
    """Trains a run, or resumes it, and shows its progress; returns its results.

    `workdir` is the run's folder: an unfinished run in it is resumed, a finished one is loaded
    without training. An interrupted kernel loses the steps since the last checkpoint.

    Raises:
      ValueError, FileNotFoundError: a user error, found before any computation on devices.
      RuntimeError: the process got SIGTERM; a checkpoint was saved.
    """
    try:
        code = run_lib.train_here(config.config, workdir, chosen=config.chosen)
    except KeyboardInterrupt as error:
        # notebooks keep the last traceback: its frames, and what their functions enclose, would
        # keep the model on the device
        error.__context__ = None
        raise error.with_traceback(None) from None
    if code == EXIT_PREEMPTED:
        raise RuntimeError(
            f"stopped by a signal; call train with workdir {str(workdir)!r} again to resume"
        )
    return load_run(workdir)


def load_run(workdir: str | os.PathLike) -> "Results":
    """Loads the results of a finished, running or killed run from its folder.

    Raises ValueError for a folder without a run.
    """
    folder = named_path("workdir", workdir)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{str(folder)!r} has no config.json; give the workdir of a run")
    return Results(folder, read_run(folder))


@dataclasses.dataclass(frozen=True)
class Results:
    """A run's results at the time when its folder was read. A cell shows the main curves.

    `contents` are all files that were read (report/read_run.py).
    """

    folder: pathlib.Path
    contents: RunFolder

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """{"step": 1, "critic/score/mean": 0.2, ...} per step.

        docs/reference/metrics.md explains the names.

        Step 0 has the evaluation of the untrained weights, if there is one.
        """
        return [{"step": step, **row} for step, row in self.contents.rows.items()]

    def curves(self, *names: str) -> Charts:
        """A chart per name: a metric, or the common start of the names of its mean, max and min.

        Without names, the main metrics. Raises ValueError for an unknown metric.
        """
        charts = charts_of(self.contents.rows)
        names = names or tuple(main_charts(self.contents))
        return Charts([(name, _lines(self.contents, name, charts)) for name in names])

    def samples(self, step: int | str | None = None) -> Table:
        """Responses with their scores, a row each: of a step, of "eval-20", or of the last step.

        The pictures of a prompt stand beside its first response. Raises ValueError, with the
        existing names, if there are none of this step.
        """
        if step is None:
            steps = (p.stem for p in (self.folder / "samples").glob("*.jsonl"))
            step = max(
                (int(stem) for stem in steps if stem.isascii() and stem.isdigit()), default=0
            )
        records = read_samples(self.folder, str(step))
        columns: tuple[str, ...] = ("score", "prompt", "response", "ground_truth")
        rows: list[dict[str, Any]] = []
        for record in records:
            found = [
                record | {"response": card.text, "score": card.score}
                for card in responses_of(record)
            ]
            pictures = pictures_of(record)
            if pictures and found:
                columns = ("pictures", *columns[-4:])
                found[0]["pictures"] = Pictures(pictures)
            rows += found
        title = f"samples of step {step}" if str(step).isdigit() else f"samples of {step}"
        return Table(rows, columns, title)

    def report(self) -> Page:
        """The run's report: curves, times, plan, samples and config on one page."""
        return Page(page(self.contents), f"report of {self.folder}: see its report.html")

    def _repr_html_(self) -> str:
        facts = "".join(
            f"<span style='margin-right:18px'><b>{escaped(tile.value)}</b> {escaped(tile.name)} "
            f"{escaped(tile.more)}</span>"
            for tile in tiles(self.contents)
        )
        head = f"<p><b>{escaped(self.folder)}</b>: {escaped(status(self.contents)[1])}</p>"
        return f"{head}<p>{facts}</p>{self.curves()._repr_html_()}"

    def __repr__(self) -> str:
        lines = [f"{self.folder}: {status(self.contents)[1]}"]
        lines += [f"  {t.name}: {t.value} {t.more}".rstrip() for t in tiles(self.contents)]
        return "\n".join(plain(line) for line in lines)


def compare(runs: Mapping[str, Results], *names: str) -> Charts:
    """A chart per metric, with a line per run of `runs`, {label: results}.

    Without names, a chart of the reward. Raises ValueError for a metric that one of the runs does
    not have, and for more runs than there are colours.
    """
    if not 0 < len(runs) <= len(LINES):
        raise ValueError(f"compare takes 1 to {len(LINES)} runs, got {len(runs)}")
    charts = []
    for name in names or ("critic/score/mean",):
        lines = [
            dataclasses.replace(_line(results.contents, name), name=label, color=color)
            for (label, results), color in zip(runs.items(), LINES, strict=False)
        ]
        charts.append((name, lines))
    return Charts(charts)


def _lines(run: RunFolder, name: str, charts: Mapping[str, Sequence[str]]) -> list[Series]:
    """The line of a metric, or the lines of its mean, max and min."""
    words = {metric.rpartition("/")[2]: metric for metric in charts.get(name, ())}
    if name in words.values() or not words:
        return [_line(run, name)]
    colors = dict(zip(TOGETHER, (COLORS[0], *PALE), strict=True))
    return [
        dataclasses.replace(_line(run, words[word]), name=word, color=color)
        for word, color in colors.items()
        if word in words
    ]


def _line(run: RunFolder, name: str) -> Series:
    points = [(step, row[name]) for step, row in run.rows.items() if name in row]
    if not points:
        known = {metric for row in run.rows.values() for metric in row}
        raise ValueError(f"run {run.name!r} has no metric {name!r} ({hint(name, known)})")
    return Series(name.rpartition("/")[2], points)
