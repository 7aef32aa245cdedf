"""The measures of the house see through what would get round them."""

import pytest
from support import house_measures
from support.paths import ROOT

PACKAGE = ROOT / "distflow_jax"


@pytest.fixture(scope="module")
def sources():
    return {str(p.relative_to(PACKAGE)): p.read_text() for p in PACKAGE.rglob("*.py")}


def moved(sources, old, new):
    return {new if path == old else path: text for path, text in sources.items()}


@pytest.mark.parametrize(
    "old, new",
    [
        ("runtime/samplers/make_source.py", "runtime/ahead.py"),
        ("planning/plan_run.py", "planning/agreement_of_settings.py"),
    ],
)
def test_a_module_under_another_name_has_the_same_conditions(sources, old, new):
    before = house_measures.mode_conditions(sources)
    after = house_measures.mode_conditions(moved(sources, old, new))
    assert after[new] == before[old] > house_measures.mode_conditions({}).get(old, 3)
    assert sum(after.values()) >= sum(before.values()) - 3


@pytest.mark.parametrize(
    "test",
    [
        "config.stream.max_staleness",
        "not config.stream.ahead and ready",
        "self._stream is None",
        "self._stream",
        "isinstance(source, Stream)",
        "ready or isinstance(source, (Stream, int))",
        "plan.region is not None",
        "settings.rollout.environment == ''",
    ],
)
@pytest.mark.parametrize(
    "form",
    [
        "if {}:\n            return 1",
        "while {}:\n            return 1",
        "return 1 if {} else 2",
        "return [x for x in y if {}]",
        "return ready and {}",
        "match {}:\n            case True:\n                return 1",
    ],
)
def test_conditions_are_seen_in_every_form(form, test):
    use = f"class A:\n    _stream: Stream | None\n    def f(self, config, plan):\n        {form}"
    sources = {
        "stream/section.py": "class StreamConfig:\n    max_staleness: int = 0\n    ahead: bool\n",
        "stream/one.py": "class Stream:\n    pass\n",
        "anywhere.py": use.format(test),
    }
    assert house_measures.mode_conditions(sources) == {"anywhere.py": 1}


def test_other_conditions_count_nothing():
    text = "def f(x: int | None, stream):\n    if x is None or stream.other:\n        return 1\n"
    sources = {
        "stream/section.py": "class StreamConfig:\n    max_staleness: int = 0\n",
        "a.py": text,
    }
    assert house_measures.mode_conditions(sources) == {}


def test_a_class_that_moves_beside_its_user_stays_its_collaborator():
    other, use = "class A:\n    pass\n", "class C:\n    def f(self):\n        return A()\n"
    apart = {"a.py": other, "c.py": "from distflow_jax.a import A\n" + use}
    assert house_measures.collaborators(apart)["c.py:C"] == 1
    assert house_measures.collaborators({"c.py": other + use})["c.py:C"] == 1


def test_collaborators_are_imports_and_what_a_constructor_takes():
    text = (
        "from distflow_jax.other import A, B, unused\n"
        "class C:\n"
        "    def __init__(self, a: A, size: int, then: Callable[[], None], other):\n"
        "        self.b = B(size)\n"
    )
    assert house_measures.collaborators({"x.py": text}) == {"x.py:C": 4}


def test_calls_that_unpack_what_stands_there_are_counted():
    text = "f(*(1, 2), 3)\nf(*[1])\nf(*rest)\ng = (*(1, 2), 3)\n"
    assert house_measures.packed_calls({"x.py": text}) == 2
