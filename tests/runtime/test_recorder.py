"""A recorder tells trackers whether the run made its steps."""

import types

import pytest

from distflow_jax.config.upkeep_config import ObserveConfig
from distflow_jax.coordinator.rounds import DATA_ENDED, PREEMPTED
from distflow_jax.report.terminal import Terminal
from distflow_jax.runtime.recorder import DONE, Recorder

OWN = """
class Ends:
    def __init__(self, run):
        self._folder = run.folder

    def metrics(self, step, values):
        pass

    def file(self, path):
        pass

    def close(self, failed):
        (self._folder / "failed.txt").write_text(str(failed))
"""


@pytest.mark.parametrize(
    ("reason", "failed"), [(DONE, 0), (DATA_ENDED, 0), (PREEMPTED, 1), (ZeroDivisionError, 1)]
)
def test_a_run_that_does_not_make_its_steps_fails_in_its_trackers(tmp_path, reason, failed):
    (tmp_path / "ends.py").write_text(OWN)
    observe = ObserveConfig(trackers=(f"{tmp_path / 'ends.py'}:Ends",))
    prepared = types.SimpleNamespace(config=types.SimpleNamespace(observe=observe))
    state = types.SimpleNamespace(step=0)
    recorder = Recorder(prepared, state, None, tmp_path, Terminal())
    recorder._writer.plan("1. rollout")
    if reason is ZeroDivisionError:
        with pytest.raises(ZeroDivisionError), recorder:
            raise ZeroDivisionError
    else:
        with recorder:
            recorder.stop_reason = reason
    assert (tmp_path / "failed.txt").read_text() == str(bool(failed))
    word = "failed with ZeroDivisionError" if reason is ZeroDivisionError else reason
    assert f'"reason": "{word}"' in (tmp_path / "events.jsonl").read_text()
