"""Layouts of a run on a pod: which there are, in which order, which is compiled and suggested.

Nightly: the suggested layout of a pod compiles and fits; the script writes what it prints (needs
libtpu).
"""

import dataclasses
import itertools
import json
import shlex

import pytest
from support.accelerators import needs_libtpu
from support.programs import finished
from support.text_tables import cells_of
from support.tiny_config import tiny_config

from distflow_jax.models.weights.source import open_shapes
from distflow_jax.planning.plan_run import plan_run
from distflow_jax.pods import sweep as sweep_lib
from distflow_jax.pods.pod_plan import SPARE, plan_on
from distflow_jax.pods.sweep import AXES, Sweep, compile_fastest, sweep
from distflow_jax.pods.topology import open_topology

SMALL = [
    "model.source=random:llama?hidden=64&layers=2&heads=4&kv_heads=2&mlp=128&vocab=512",
    "data.prompts_per_step=8",
    "rollout.num_slots=16",
    "training.remat=full",
    "eval.dataset=",
]


def config_of(*assignments):
    return tiny_config(*SMALL, *assignments)


def planned_of(pod, config):
    planned = plan_run(config, pod.machine, open_source=open_shapes)
    return dataclasses.replace(planned, devices=pod.devices)


@pytest.fixture(scope="module")
def pod():
    return open_topology("gpu:1x4")


@pytest.fixture(scope="module")
def found(pod):
    return sweep(pod, config_of("mesh.tensor=2"))


def test_all_layouts_that_are_a_run_are_there(found, pod):
    """Against every product that makes 4."""
    sizes = (1, 2, 4)
    wanted = {
        (data, fsdp, tensor, width)
        for data, fsdp, tensor, width in itertools.product(sizes, repeat=4)
        if data * fsdp * tensor == pod.size
    }
    assert {tuple(c.mesh.values()) for c in found.candidates} == wanted
    seconds = [c.guess.seconds for c in found.candidates]
    assert seconds == sorted(seconds) and found.best is found.candidates[0]


def test_its_flags_give_the_plan_that_was_priced(found, pod):
    for candidate in (found.candidates[0], found.candidates[-1]):
        flags = [flag.removeprefix("--config.") for flag in candidate.flags.split()]
        assert len(flags) == len(AXES)
        own = plan_on(pod, planned_of(pod, config_of(*flags)), compiled=False)
        assert own.seconds == pytest.approx(candidate.guess.seconds, rel=1e-12)
        assert own.memory == candidate.guess.memory


def words_of(command):
    """The words of a command on several lines, as a shell takes them."""
    return shlex.split(command.replace("\\\n", ""))


def test_the_table_says_what_it_knows(found):
    text = found.describe()
    said = " ".join(text.split())
    assert "by ESTIMATED seconds" in said and "nothing of this was measured" in said
    assert max(map(len, text.splitlines())) <= 80
    suggested, flags = text.split("suggested: ")[1].split("\n\n")
    assert " ".join(suggested.split()).endswith("whose temporaries are unknown")
    assert words_of(flags) == found.best.flags.split()
    rows = cells_of(text, ["data", "fsdp"])
    meshes = [[str(size) for size in c.mesh.values()] for c in found.candidates[: len(rows)]]
    assert [row[:4] for row in rows] == meshes
    assert {(row[6], row[8]) for row in rows} == {("-", "-")}
    tree = json.loads(json.dumps(found.to_tree()))
    assert tree["suggested"] == found.best.mesh and tree["flags"] == found.best.flags
    assert len(tree["layouts"]) == len(found.candidates) and not tree["problem"]
    assert {layout["compiled"] for layout in tree["layouts"]} == {None}


def of_memory(found, size):
    """The same layouts on chips with so much memory."""
    pod = dataclasses.replace(found.pod, chip=dataclasses.replace(found.pod.chip, memory=size))
    guesses = (dataclasses.replace(c.guess, pod=pod) for c in found.candidates)
    return Sweep(pod, tuple(map(sweep_lib.Candidate, guesses)))


def test_what_is_too_large_without_temporaries_is_not_suggested(found):
    held = [c.guess.memory.fullest.total for c in found.candidates]
    assert held[0] > min(held)
    few = of_memory(found, int(min(held) / (1 - SPARE)) + 1)
    fitting = [size for size in held if size == min(held)]
    assert few.best.guess.memory.fullest.total == min(held)
    said = " ".join(few.describe().split())
    assert f"{len(held) - len(fitting)} hold more than 90% of a chip's memory" in said
    none = of_memory(found, min(held))
    assert none.best is None and "\n" not in none.problem
    assert "the smallest is data 1 x " in none.problem and "use more chips" in none.problem
    assert none.to_tree()["suggested"] is None and "suggested" not in none.describe()


class Compiler:
    """Stands for plan_on with a compiler: programs that take a share of a chip's memory beside what
    lives, by the layout's place in the order, or too much alone, by the mesh's fsdp."""

    def __init__(self, found, shares, too_large=()):
        self.order = [tuple(c.mesh.values()) for c in found.candidates]
        self.shares, self.too_large, self.asked = shares, too_large, []

    def __call__(self, pod, planned, **options):
        guess = plan_on(pod, planned, compiled=False, **options)
        mesh = planned.sizes.mesh
        place = self.order.index((mesh.data, mesh.fsdp, mesh.tensor, planned.sizes.rollout_tensor))
        self.asked.append(place)
        taken = int(pod.chip.memory * self.shares.get(place, 0.95))
        segments = [dataclasses.replace(s, temporaries=taken) for s in guess.memory.segments]
        memory = dataclasses.replace(guess.memory, segments=tuple(segments))
        refused = {"actor_train": "too much"} if mesh.fsdp in self.too_large else {}
        return dataclasses.replace(guess, memory=memory, refused=refused)


def compiled_by(monkeypatch, compiler, found, compiles):
    said = []
    monkeypatch.setattr(sweep_lib, "plan_on", compiler)
    candidates = compile_fastest(found.pod, found.candidates, compiles=compiles, say=said.append)
    return Sweep(found.pod, tuple(candidates)), said


def test_the_fastest_are_compiled_until_one_fits(monkeypatch, found):
    compiler = Compiler(found, {2: 0.5, 3: 0.1})
    swept, said = compiled_by(monkeypatch, compiler, found, 9)
    assert compiler.asked == [0, 1, 2] and swept.best is swept.candidates[2]
    assert [c.compiled is not None for c in swept.candidates[:4]] == [True, True, True, False]
    text = swept.describe()
    rows = cells_of(text, ["data", "fsdp"])
    tight, fits = "compiled: 5.0% to spare", "compiled: 50.0% to spare"
    assert [row[8] for row in rows[:4]] == [tight, tight, fits, "-"]
    assert [row[6] == "-" for row in rows[:4]] == [False, False, False, True]
    assert words_of(text.rpartition("\n\n")[2]) == swept.best.flags.split()
    assert "unknown" not in text and max(map(len, text.splitlines())) <= 80
    assert said[-1].startswith("compiling 3 of at most 9: data ")
    assert [layout["fits"] for layout in swept.to_tree()["layouts"][:4]] == [
        *(False, False, True),
        None,
    ]


def test_where_none_of_those_compiled_fits_none_is_suggested(monkeypatch, found):
    compiler = Compiler(found, {2: 0.5})
    swept, _ = compiled_by(monkeypatch, compiler, found, 2)
    assert compiler.asked == [0, 1] and swept.best is None
    assert "none of the 2 fastest layouts leaves 10% of HBM" in swept.problem
    assert "(--sweep_compile)" in swept.problem and "\n" not in swept.problem
    assert compiled_by(monkeypatch, compiler, found, 0)[0] == found


def test_a_mesh_whose_training_is_too_large_is_not_compiled_twice(monkeypatch, found):
    compiler = Compiler(found, {}, too_large=(1, 2, 4))
    swept, _ = compiled_by(monkeypatch, compiler, found, 50)
    meshes = {place[:3] for place in compiler.order}
    assert len(compiler.asked) == len(meshes) == 6
    assert {c.verdict() for c in swept.candidates if c.compiled} == {"too much"}


def test_no_layout_at_all_is_one_line(pod):
    with pytest.raises(
        ValueError, match="no layout of gpu:1x4 suits this run: mesh.expert=2 is for a mixture"
    ):
        sweep(pod, config_of("mesh.expert=2"))


@pytest.mark.slow
@needs_libtpu
def test_a_tpus_layout_is_compiled_and_fits():
    swept = sweep(open_topology("v5e:2x2"), config_of(), compiles=1)
    assert swept.best is swept.candidates[0] and swept.best.fits
    assert all(c.compiled is None for c in swept.candidates[1:])
    assert swept.best.compiled.memory.fullest.temporaries is not None
    assert "unknown" not in swept.describe()


@pytest.mark.slow
def test_the_script_writes_what_it_prints(tmp_path):
    flags = ["--config=configs/tiny.py", "--topology=gpu:1x2", "--sweep", f"--out={tmp_path}"]
    done = finished("scripts/plan.py", *flags)
    assert (tmp_path / "sweep.txt").read_text() in done.stdout
    tree = json.loads((tmp_path / "sweep.json").read_text())
    assert words_of(done.stdout.rstrip().rpartition("\n\n")[2]) == tree["flags"].split()
