"""JetStream is imported without seqio; without JetStream, stand-ins sample the same tokens.

A user's own seqio stays what it is.
"""

import dataclasses
import importlib.util
import inspect
import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from support import haste
from support.programs import finished
from support.tiny_model import TINY, mesh_of
from support.tiny_sampler import CONFIG, PARAMS, STOP_IDS, TOKENIZER
from support.waiting import HANG

from distflow_jax.rollout import engine_interface, engine_stand_ins
from distflow_jax.rollout.engine.engine import RolloutEngine

OWN = """
import seqio
from distflow_jax.rollout.engine_interface import Engine
assert seqio is sys.modules["seqio"] and seqio.MARK == "own"
import seqio.vocabularies, tiktoken
assert seqio.vocabularies.MARK == "own" and tiktoken.MARK == "own"
assert Engine.__module__ == "jetstream.engine.engine_api"
"""
NONE = """
from distflow_jax.rollout.engine_interface import Engine
from jetstream.engine import token_utils
assert not [name for name in sys.modules if name.split(".")[0] in ("seqio", "tiktoken")]
try:
    token_utils.SentencePieceVocabulary("model")
except RuntimeError as error:
    print(error)
"""


def run(code, folder):
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r}){code}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG)


@pytest.fixture
def packages(tmp_path):
    """Packages of the user's own, which JetStream could not use."""
    for name in ("seqio/__init__", "seqio/vocabularies", "tiktoken/__init__"):
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text('MARK = "own"\n')
    return tmp_path


def test_a_users_own_packages_are_neither_used_nor_replaced(packages):
    done = run(OWN, packages)
    assert done.returncode == 0, done.stderr


def test_nothing_stands_in_for_them_afterwards(tmp_path):
    done = run(NONE, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "import jetstream.engine.token_utils before distflow_jax" in done.stdout


def test_other_threads_can_look_for_them_meanwhile():
    with engine_interface._without_tokenizers():
        for name in ("seqio", "seqio.vocabularies", "tiktoken", "tiktoken.load"):
            assert importlib.util.find_spec(name).name == name


# -- without JetStream ----------------------------------------------------------------------------

PAIRS = [
    (getattr(engine_interface, x), getattr(engine_stand_ins, x)) for x in engine_interface.__all__
]
OWN_FORM = {"TokenizerParameters"}  # JetStream's is a protobuf message


def public(kind):
    """{name: parameters} of the methods of a class; None for a property."""
    members = {name: x for name, x in inspect.getmembers(kind) if not name.startswith("_")}
    return {
        name: [(p.name, p.kind, p.default) for p in inspect.signature(x).parameters.values()]
        if inspect.isfunction(x)
        else None
        for name, x in members.items()
    }


@pytest.mark.parametrize("theirs, ours", PAIRS, ids=engine_interface.__all__)
def test_a_stand_in_has_the_fields_and_methods_of_jetstreams(theirs, ours):
    assert theirs.__module__.startswith("jetstream.") and not issubclass(ours, theirs)
    if theirs.__name__ in OWN_FORM:
        fields = {field.name for field in dataclasses.fields(ours)}
        assert fields == set(theirs.DESCRIPTOR.fields_by_name)
        given = {"path": "a", "extra_ids": 2}
        assert all(
            getattr(kind(**given), x) == y for kind in (theirs, ours) for x, y in given.items()
        )
        assert all((kind().path, kind().extra_ids) == ("", 0) for kind in (theirs, ours))
        return
    assert public(ours) == public(theirs)
    missing = getattr(ours, "__abstractmethods__", set()) - {"build_tokenizer"}  # not SentencePiece
    assert missing == getattr(theirs, "__abstractmethods__", set())
    if dataclasses.is_dataclass(theirs):
        described = [
            [(x.name, dict(x.metadata), x.default) for x in dataclasses.fields(kind)]
            for kind in (theirs, ours)
        ]
        assert described[0] == described[1]


def test_results_of_a_slot_are_those_of_jetstream():
    data = np.arange(6 * 7).reshape(6, 7)
    columns = {"tokens_idx": (0, 3), "valid_idx": (3, 6), "length_idx": (6, 7)}
    kinds = engine_interface.ResultTokens, engine_stand_ins.ResultTokens
    for array in (data, jax.numpy.asarray(data)):
        theirs, ours = (kind(data=array, samples_per_slot=2, **columns) for kind in kinds)
        for result in (theirs, ours):
            result.copy_to_host_async()
        assert type(ours.convert_to_numpy().data) is np.ndarray
        for field in ("tokens", "valid", "lengths"):
            for slot in range(3):
                wanted, got = (getattr(x.get_result_at_slot(slot), field) for x in (theirs, ours))
                np.testing.assert_array_equal(got, wanted)
        assert jax.tree.structure(ours).num_leaves == 1


ALONE = """
from test_engine_interface import engine_interface, engine_stand_ins, first_call
assert not engine_interface.INSTALLED and not [x for x in sys.modules if x.startswith("jetstream.")]
names = ("Engine", "EngineTokenizer", "SlotData")
found = dict(zip(names, first_call(), strict=True))
assert all(isinstance(x, getattr(engine_stand_ins, name)) for name, x in found.items())
try:
    import distflow_jax.serving.jetstream
except ImportError as error:
    print(error)
print(found["SlotData"].tokens.tolist())
"""


def first_call():
    """An engine, its tokenizer, and what slot 3 has after one call: drawn with uid (0, 3)."""
    mesh = mesh_of(1, 1, names=("data", "tensor"))
    engine = RolloutEngine(TINY, CONFIG, mesh, stop_ids=STOP_IDS, seed=3, tokenizer=TOKENIZER)
    tokenizer = engine.build_tokenizer(engine.get_tokenizer())
    ids, length = tokenizer.encode("12 + 35 =")
    params = engine.load_params(PARAMS)
    prefix = engine.prefill(params=params, padded_tokens=ids, true_length=length)
    state = engine.insert(prefix, engine.init_decode_state(), slot=3)
    _, result = engine.generate(params, state)
    return engine, tokenizer, result.convert_to_numpy().get_result_at_slot(3)


def test_an_engine_on_stand_ins_generates_the_same_tokens():
    """And the door of JetStream's own protocol names the command that installs it."""
    code = "import sys; sys.modules['jetstream'] = None; sys.path[:0] = ['tests', 'tests/rollout']"
    done = finished("-c", code + ALONE, env=haste.environment(8))
    said, tokens = done.stdout.splitlines()
    assert said == (
        "google-jetstream is not installed: pip install --no-deps google-jetstream==0.2.2"
    )
    engine, _, wanted = first_call()
    assert isinstance(engine, engine_interface.Engine) and engine_interface.INSTALLED
    assert json.loads(tokens) == wanted.tokens.tolist() and wanted.valid.all()
