"""No program passes its cases but by giving what they expect: forgeries score 0, honest twins 1."""

import pytest
from support.forgeries import FORGERIES, TRUTHS

from distflow_jax.config.sandbox_config import SandboxConfig
from distflow_jax.rewards.code_reward import code
from distflow_jax.rewards.records import ProgramLimits
from distflow_jax.sandbox import sandbox

LIMITS = ProgramLimits(SandboxConfig(seconds=3.0, cpu_seconds=2.0))
CASES = [pytest.param(f, form, id=f"{f.name}, {form}") for f in FORGERIES for form in f.forms]


@pytest.fixture(scope="module", autouse=True)
def closed():
    yield
    sandbox._SHARED.pop(LIMITS.sandbox).close()


def scored(program, truth):
    return code("", f"```python\n{program}```", truth, limits=LIMITS)["score"]


def test_there_are_enough():
    assert len(FORGERIES) >= 30 and len({forgery.name for forgery in FORGERIES}) == len(FORGERIES)


@pytest.mark.parametrize(("forgery", "form"), CASES)
def test_a_forgery_scores_0_and_its_twin_1(forgery, form):
    assert scored(forgery.honest, TRUTHS[form]) == 1.0
    assert scored(forgery.cheats, TRUTHS[form]) == 0.0
