"""The profiled steps are in the trace, with their spans; without steps nothing is written."""

import pytest
from jax.profiler import ProfileData

from distflow_jax.config.run_config import Config
from distflow_jax.config.upkeep_config import ObserveConfig, parse_steps
from distflow_jax.observe.profile import Profile
from distflow_jax.observe.spans import Spans


def test_steps():
    assert list(parse_steps("3:5")) == [3, 4, 5]
    assert list(parse_steps("3")) == [3]
    assert not parse_steps("")


@pytest.mark.parametrize("text", ["0", "5:3", "0:3", "3-5", "a", "3:", "1:2:3", "-1"])
def test_what_names_no_steps_is_said_in_one_line(text):
    with pytest.raises(ValueError, match=r"observe.profile_steps=.* names no steps") as error:
        ObserveConfig(profile_steps=text)
    assert "\n" not in str(error.value)
    assert Config().observe.profile_steps == ""


def test_the_trace_has_the_steps_and_the_spans_in_them(tmp_path):
    spans, profile = Spans(), Profile(tmp_path, range(2, 4))
    for number in range(1, 5):
        with profile.step(number), spans.span(f"node_of_{number}"):
            pass
        if profile.ends_with(number):
            assert number == 3
            profile.close()
    profile.close()  # a second time does nothing
    (path,) = tmp_path.rglob("*.xplane.pb")
    planes = ProfileData.from_file(str(path)).planes
    names = {event.name for plane in planes for line in plane.lines for event in line.events}
    assert {"node_of_2", "node_of_3"} <= names and "step" in names
    assert not {"node_of_1", "node_of_4"} & names


def test_without_steps_there_is_no_folder(tmp_path):
    profile = Profile(tmp_path / "profile", parse_steps(""))
    with profile.step(1):
        assert not profile.ends_with(1)
    profile.close()
    assert not (tmp_path / "profile").exists()
