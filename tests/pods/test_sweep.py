"""Layouts of a run on a pod: which there are, in which order, which is compiled and suggested.

Nightly: the best of a mesh is that of all combinations; the suggested layout of a pod compiles and
fits; the script writes what it prints (needs libtpu).
"""

import dataclasses
import itertools
import json
import math
import shlex

import pytest
from support.accelerators import needs_libtpu
from support.programs import finished
from support.text_tables import cells_of
from support.tiny_config import tiny_config

from distflow_jax.models.weights.source import open_shapes
from distflow_jax.planning import unit_programs
from distflow_jax.planning.plan_run import plan_run
from distflow_jax.pods.pod_plan import plan_on
from distflow_jax.pods.pricing import (
    CACHE,
    MESH,
    OFFLOAD,
    REMAT,
    ROWS,
    SEARCHED,
    WIDTH,
    Pricing,
)
from distflow_jax.pods.search import Search
from distflow_jax.pods.sweep import Sweep, compile_fastest, price, sweep
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


def search_of(*run):
    return Search(Pricing(*run))


def planned_of(pod, config):
    planned = plan_run(config, pod.machine, open_source=open_shapes)
    return dataclasses.replace(planned, devices=pod.devices)


@pytest.fixture(scope="module")
def pod():
    return open_topology("gpu:1x4")


@pytest.fixture(scope="module")
def search(pod):
    return search_of(pod, config_of("mesh.tensor=2"))


@pytest.fixture(scope="module")
def found(search, pod):
    return Sweep(pod, tuple(price(search)))


def test_all_meshes_that_are_a_run_are_there(found, pod):
    """Against every product that makes 4."""
    sizes = (1, 2, 4)
    wanted = {shape for shape in itertools.product(sizes, repeat=3) if math.prod(shape) == pod.size}
    assert {tuple(c.values[key] for key in MESH) for c in found.candidates} == wanted
    seconds = [c.guess.expected.middle for c in found.candidates]
    assert seconds == sorted(seconds) and found.best is found.candidates[0]


def test_its_flags_give_the_plan_that_was_priced(found, pod):
    for candidate in found.candidates:
        flags = [flag.removeprefix("--config.") for flag in candidate.flags]
        assert len(flags) == len(SEARCHED)
        own = plan_on(pod, planned_of(pod, config_of(*flags)), compiled=False)
        assert own.seconds == pytest.approx(candidate.guess.seconds, rel=1e-9)
        assert own.memory == candidate.guess.memory


@pytest.mark.slow
def test_the_best_of_a_mesh_is_that_of_all_combinations(pod):
    """Against plans of every combination, each traced by itself."""
    slots = "data.prompts_per_step=16", "rollout.num_slots=0"
    search = search_of(pod, config_of(*slots))
    mesh = next(m for m in search.meshes() if m.values["mesh.tensor"] == 1 < m.values["mesh.fsdp"])
    plans = []
    for remat, rows, width, cache, offload in itertools.product(
        ("none", "dots", "attention", "full"), (1, 8), (1, 2, 4), (0.1, 0.6), ("none", "idle")
    ):
        values = {REMAT: remat, ROWS: rows * mesh.ranks, WIDTH: width, CACHE: cache}
        values[OFFLOAD] = offload
        assignments = [f"{key}={value}" for key, value in (mesh.values | values).items()]
        config = config_of(*slots, *assignments)
        plans.append(plan_on(pod, planned_of(pod, config), compiled=False))
    best = search.best_of(mesh)
    seconds = [plan.expected.middle for plan in plans]
    assert best.expected.middle == pytest.approx(min(seconds), rel=1e-9)
    # with less memory than the fastest takes, the fastest of those that fit
    totals = sorted(plan.memory.fullest.total for plan in plans)
    spare = 1 - (totals[len(totals) // 2] + 1) / pod.chip.memory
    fitting = [plan.expected.middle for plan in plans if plan.spare >= spare]
    assert 0 < len(fitting) < len(plans)
    best = search.best_of(mesh, spare)
    assert best.expected.middle == pytest.approx(min(fitting), rel=1e-9)
    least = search.best_of(mesh, 1.0)
    assert least.memory.fullest.total == totals[0]


def test_keys_of_the_command_line_stay(pod):
    chosen = {"mesh.tensor": 2, "training.remat": "dots", "mesh.rollout_tensor": 1}
    config = config_of(*(f"{key}={value}" for key, value in chosen.items()))
    swept = sweep(search_of(pod, config, chosen))
    assert {tuple(c.values[key] for key in MESH) for c in swept.candidates} == {
        (1, 2, 2),
        (2, 1, 2),
    }
    assert all(c.values[key] == value for c in swept.candidates for key, value in chosen.items())


def test_programs_are_traced_on_one_mesh(pod, monkeypatch):
    traced, trace_unit = [], unit_programs.trace_unit

    def counted(unit, *rest):
        traced.append(unit.name)
        return trace_unit(unit, *rest)

    monkeypatch.setattr(unit_programs, "trace_unit", counted)
    chosen = {"training.remat": "dots", "mesh.rollout_tensor": 1}
    config = config_of(*(f"{key}={value}" for key, value in chosen.items()))
    swept = sweep(search_of(pod, config, chosen))
    assert len(swept.candidates) == 6
    assert len(traced) == len(set(traced)) > 0


def words_of(command):
    """The words of a command on several lines, as a shell takes them."""
    return shlex.split(command.replace("\\\n", ""))


def test_the_table_says_what_it_knows(found):
    text = found.describe()
    said = " ".join(text.split())
    assert "by EXPECTED seconds" in said and "nothing was measured" in said
    assert max(map(len, text.splitlines())) <= 80
    suggested, flags = text.split("suggested: ")[1].split("\n\n")
    assert " ".join(suggested.split()).endswith("whose temporaries are estimated")
    assert words_of(flags) == list(found.best.flags)
    rows = cells_of(text, ["data", "fsdp"])
    meshes = [[str(c.values[key]) for key in MESH] for c in found.candidates[: len(rows)]]
    assert [row[:3] for row in rows] == meshes
    assert {row[9] for row in rows} == {"-"}
    tree = json.loads(json.dumps(found.to_tree()))
    assert tree["suggested"] == found.best.values and tree["flags"] == " ".join(found.best.flags)
    assert len(tree["layouts"]) == len(found.candidates) and not tree["problem"]
    assert {layout["compiled"] for layout in tree["layouts"]} == {None}


def test_what_is_too_large_is_not_suggested():
    pod = open_topology("gpu:1x2")
    small = dataclasses.replace(pod, chip=dataclasses.replace(pod.chip, memory=2**20))
    none = Sweep(small, tuple(price(search_of(small, config_of()))))
    assert none.best is None and "\n" not in none.problem
    assert "the smallest is data 1 x " in none.problem and "use more chips" in none.problem
    assert none.to_tree()["suggested"] is None and "suggested" not in none.describe()


class Compiler:
    """Stands for Pricing.compiled: by the training mesh, seconds of an update and a share of
    a chip's memory, or programs that are too large alone."""

    def __init__(self, results, too_large=()):
        self.results, self.too_large, self.asked = results, too_large, []

    def __call__(self, pod, planned):
        guess = plan_on(pod, planned, compiled=False)
        mesh = planned.sizes.mesh
        shape = mesh.data, mesh.fsdp, mesh.tensor
        self.asked.append(shape)
        seconds, share = self.results.get(shape, (1.0, 0.95))
        taken = int(pod.chip.memory * share)
        segments = [dataclasses.replace(s, temporaries=taken) for s in guess.memory.segments]
        memory = dataclasses.replace(guess.memory, segments=tuple(segments))
        flops = seconds * pod.chip.flops * pod.size
        costs = {name: dataclasses.replace(c, flops=flops) for name, c in guess.costs.items()}
        refused = {"actor_train": "too much"} if shape in self.too_large else {}
        return dataclasses.replace(guess, memory=memory, refused=refused, costs=costs)


def compiled_by(monkeypatch, compiler, search, found, compiles):
    said = []
    monkeypatch.setattr(Pricing, "compiled", lambda self, planned: compiler(self.pod, planned))
    candidates = compile_fastest(search, found.candidates, compiles=compiles, say=said.append)
    return Sweep(found.pod, tuple(candidates)), said


def shapes(candidates):
    return [tuple(c.values[key] for key in MESH) for c in candidates]


def test_the_fastest_are_compiled_and_compiled_seconds_decide(monkeypatch, search, found):
    first, second, third, fourth = shapes(found.candidates)[:4]
    compiler = Compiler({first: (3.0, 0.1), second: (1.0, 0.1), third: (2.0, 0.5)})
    swept, said = compiled_by(monkeypatch, compiler, search, found, 3)
    assert compiler.asked == [first, second, third]
    assert swept.best is swept.candidates[1] and swept.best.compiled.seconds < 4.0
    text = swept.describe()
    rows = cells_of(text, ["data", "fsdp"])
    assert [row[9] != "-" for row in rows[:4]] == [True, True, True, False]
    assert words_of(text.rpartition("\n\n")[2]) == list(swept.best.flags)
    assert "estimated" not in text.split("suggested: ")[1]
    assert max(map(len, text.splitlines())) <= 80
    assert said[-1].startswith("compiling 3 of at most 3: data ")
    fits = [layout["fits"] for layout in swept.to_tree()["layouts"][:4]]
    assert fits == [True, True, True, None]


def test_where_a_mesh_takes_more_its_next_settings_are_tried(monkeypatch, search, found):
    compiler = Compiler({}, too_large=shapes(found.candidates)[:1])
    swept, _ = compiled_by(monkeypatch, compiler, search, found, 2)
    assert len(compiler.asked) == 2 and swept.best is None
    assert "none of the 2 fastest layouts leaves 10% of HBM" in swept.problem
    assert "too much" in swept.problem
    assert "with --sweep_compile" in swept.problem and "\n" not in swept.problem
    assert compiled_by(monkeypatch, compiler, search, found, 0)[0] == found


def test_a_size_that_no_mesh_has_is_named(pod):
    for key, sizes in (("mesh.tensor", r"\[1, 2, 4\]"), ("mesh.data", r"\[1, 2, 4\]")):
        with pytest.raises(ValueError, match=f"{key}=3: no training mesh of gpu:1x4 .*{sizes}"):
            sweep(search_of(pod, config_of(f"{key}=3"), {key}))


def test_no_layout_at_all_is_one_line(pod):
    with pytest.raises(
        ValueError, match="this run fits no layout of gpu:1x4: mesh.expert=2 is for a mixture"
    ):
        sweep(search_of(pod, config_of("mesh.expert=2")))


@pytest.mark.slow
@needs_libtpu
def test_a_tpus_layout_is_compiled_and_fits():
    swept = sweep(search_of(open_topology("v5e:2x2"), config_of()), compiles=1)
    assert swept.best is swept.candidates[0] and swept.best.fits
    assert all(c.compiled is None for c in swept.candidates[1:])
    assert swept.best.compiled.memory.fullest.temporaries is not None
    assert "unknown" not in swept.describe()


@pytest.mark.slow
def test_the_script_writes_what_it_prints(tmp_path):
    flags = ["--config=configs/tiny.py", "--topology=gpu:1x2", "--sweep", f"--out={tmp_path}"]
    done = finished("scripts/plan.py", *flags, f"--apply={tmp_path / 'new' / 'flags'}")
    assert (tmp_path / "sweep.txt").read_text() in done.stdout
    tree = json.loads((tmp_path / "sweep.json").read_text())
    said, _, applied = done.stdout.rstrip().rpartition("\n")
    assert words_of(said.rpartition("\n\n")[2]) == tree["flags"].split()
    flag = applied.split()[-1]
    assert flag == f"--flagfile={tmp_path / 'new' / 'flags'}"
    planned = finished("scripts/plan.py", *flags[:2], flag)
    seconds = tree["layouts"][0]["estimated_step_seconds"]
    assert f"bound {seconds:.3g} s" in " ".join(planned.stdout.split())
