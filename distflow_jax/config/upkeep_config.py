"""Settings of a run beside its steps: data's way, checkpoints, output, the watchdog."""

import dataclasses
import re
from collections.abc import Sequence

from distflow_jax.did_you_mean import hint
from distflow_jax.parsing.checked_fields import above, at_least, between
from distflow_jax.parsing.setting_checks import Section, setting

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
_STEPS = re.compile(r"(\d+)(?::(\d+))?")


@dataclasses.dataclass(frozen=True)
class CoordinatorConfig(Section, name="coordinator"):
    """How data move between stages."""

    double_buffer: bool = True  # read and tokenize the next step's prompts while devices are busy
    # score responses while others are still being sampled; this does not change the scores
    overlap_rewards: bool = True
    # minimum share by which the load of the busiest data rank (rows, then tokens) must fall for
    # rows to be moved
    balance_threshold: float = setting(0.03, between(0, 1, "[)"))


@dataclasses.dataclass(frozen=True)
class CheckpointConfig(Section, name="checkpoint"):
    """When checkpoints are written, and how many are kept."""

    # steps between checkpoints; the last step and SIGTERM also write one
    every: int = setting(10, at_least(1))
    # number of complete checkpoints to keep; with 2 or more, a run survives a damaged one
    keep: int = setting(2, at_least(1))


@dataclasses.dataclass(frozen=True)
class ObserveConfig(Section, name="observe"):
    """Output of a run in addition to metrics.jsonl."""

    # make the run's files readable by their owner only (0700, 0600), because prompts and responses
    # may be private; False: use the shell's umask
    private: bool = True
    samples_every: int = setting(1, at_least(0))  # steps between files samples/STEP.jsonl; 0: none
    trace: bool = True  # write spans to trace.json (Chrome, Perfetto)
    # steps between updates of report.html; 0: only at the end
    report_every: int = setting(0, at_least(0))
    # steps to profile, in profile/ for xprof: "3:5", both included; "": none
    profile_steps: str = ""
    # write the order of each process's program launches to launches/PROCESS.txt; the first
    # difference between these files shows where a job hangs
    launches: bool = False
    # additional destinations of metrics, config, samples, plan and report: tensorboard, wandb,
    # mlflow, trackio, my_module:MyTracker or file.py:MyTracker (docs/trackers.md)
    trackers: tuple[str, ...] = ("tensorboard",)
    # project or experiment in trackers; "": $WANDB_PROJECT, $MLFLOW_EXPERIMENT_NAME or
    # $TRACKIO_PROJECT, else distflow_jax
    tracker_project: str = ""
    # maximum time that a run waits for its trackers at its end; 5 s after an error or SIGTERM
    tracker_seconds: float = setting(60.0, above(0))

    def __post_init__(self):
        super().__post_init__()
        parse_steps(self.profile_steps)
        check_tracker_names(self.trackers)

    @property
    def profiled(self) -> range:
        """The steps of `profile_steps`."""
        return parse_steps(self.profile_steps)


@dataclasses.dataclass(frozen=True)
class HealthConfig(Section, name="health"):
    """The watchdog of each process, and when a process counts as dead or stuck."""

    enabled: bool = True  # start a watchdog process for each controller
    # seconds between two heartbeats of a controller
    heartbeat_seconds: float = setting(1.0, above(0))
    # seconds without a heartbeat after which a process counts as stopped, or its host as lost; at
    # least 3 heartbeats, and longer than the longest pause of a busy host
    dead_seconds: float = setting(30.0, above(0))
    # seconds in which no process begins or ends a phase, after which the job counts as stuck. Must
    # exceed the longest compilation, rollout, update or evaluation, because each is one phase
    stuck_seconds: float = setting(1800.0, above(0))

    def __post_init__(self):
        super().__post_init__()
        if self.dead_seconds < 3 * self.heartbeat_seconds:
            raise ValueError(
                f"health.dead_seconds={self.dead_seconds:g} must be at least 3 heartbeats: use "
                f"{3 * self.heartbeat_seconds:g} or more, or lower health.heartbeat_seconds="
                f"{self.heartbeat_seconds:g}"
            )
        if self.stuck_seconds <= self.dead_seconds:
            raise ValueError(
                f"health.stuck_seconds={self.stuck_seconds:g} must be more than "
                f"health.dead_seconds={self.dead_seconds:g}"
            )


def parse_steps(text: str) -> range:
    """Parses "3:5" (steps 3, 4 and 5), "3" or "" (no step). Raises ValueError."""
    if not text:
        return range(0)
    found = _STEPS.fullmatch(text)
    first, last = (int(n or found[1]) for n in found.groups()) if found else (0, 0)
    if not 0 < first <= last:
        raise ValueError(
            f"observe.profile_steps={text!r} names no steps: write FIRST:LAST, counted from 1 and "
            "both included, such as 3:5, or a single step, such as 3"
        )
    return range(first, last + 1)


def check_tracker_names(specs: Sequence[str]) -> None:
    """Raises ValueError for a tracker that is not known, with the nearest name, or named twice."""
    for spec in specs:
        if ":" not in spec and spec not in TRACKERS:
            raise ValueError(
                f"unknown observe.trackers {spec!r}; {hint(spec, TRACKERS)}; one of your own "
                "is named my_module:MyTracker or path/to/file.py:MyTracker"
            )
    if len(set(specs)) < len(specs):
        raise ValueError(f"observe.trackers {tuple(specs)!r} names a tracker twice")
