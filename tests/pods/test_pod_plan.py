"""A whole run planned for pods that are not there.

Nightly: formulas for FLOPs, bytes and collectives agree with programs compiled for TPU pods (needs
libtpu).
"""

import dataclasses
import json

import jax
import pytest
from support.accelerators import needs_libtpu
from support.partial_batches import APART
from support.text_tables import cells_of
from support.tiny_config import tiny_config

from distflow_jax.models.parameters import num_params
from distflow_jax.models.weights.source import open_model, open_shapes
from distflow_jax.parallel.host_memory import live_bytes
from distflow_jax.parallel.rules import device_bytes
from distflow_jax.planning.compiled_plan import compile_plan
from distflow_jax.planning.plan_run import plan_run
from distflow_jax.pods.compile import TooLarge, compile_program, reporting_size
from distflow_jax.pods.pod_picture import MEMORY_COLORS, draw_pod
from distflow_jax.pods.pod_plan import plan_on
from distflow_jax.pods.pod_tables import describe_plan
from distflow_jax.pods.topology import open_topology
from distflow_jax.programs.hlo import read
from distflow_jax.report.drawing import Line, Rect, Text
from distflow_jax.runtime.build import trace

SMALL = [
    "model.source=random:llama?hidden=256&layers=4&heads=4&kv_heads=4&mlp=1024&vocab=512",
    "algorithm.kl_coef=0.04",
    "data.prompts_per_step=64",
    "rollout.num_slots=128",
    "training.remat=full",
    "eval.dataset=",
]


def planned_for(name, *assignments):
    config = tiny_config(*SMALL, *assignments)
    pod = open_topology(name)
    planned = plan_run(config, pod.machine, open_source=open_shapes)
    return pod, dataclasses.replace(planned, devices=pod.devices)


@pytest.fixture(scope="module")
def of_gpus():
    before = live_bytes()
    found = plan_on(*planned_for("gpu:4x8", "mesh.tensor=2"), compiled=False)
    assert live_bytes() - before < 100  # single numbers
    return found


def test_gpus_are_planned_for_by_formulas(of_gpus):
    model = of_gpus.planned.source.config
    assert list(of_gpus.costs) == ["update_weights", "reference", "advantage", "actor_train"]
    traffic = {(t.kind, t.axes): t for t in of_gpus.costs["actor_train"].traffic}
    weights = num_params(model) / 2 * 2  # half of them, in bfloat16
    rows = of_gpus.planned.sizes.packing.rows[of_gpus.planned.sizes.mesh.layout]
    assert traffic["all-gather", ("fsdp",)].bytes == 2 * rows * weights
    assert traffic["reduce-scatter", ("fsdp",)].bytes == rows * weights
    for kind, passes in {"all-gather": 3, "all-reduce": 2, "reduce-scatter": 1}.items():
        assert traffic[kind, ("tensor",)].times == rows * 4 * 2 * passes
    assert all(t.groups.size == 32 for t in traffic.values())
    assert of_gpus.memory.device == of_gpus.pod.chip.memory and not of_gpus.problem


def joined(text):
    """The text with every gap a space."""
    return " ".join(text.split())


def test_the_tables_fit_a_terminal(of_gpus):
    text = describe_plan(of_gpus)
    assert max(map(len, text.splitlines())) <= 80
    traffic = cells_of(text, ["program", "axes"])
    assert len(traffic) == sum(len(cost.traffic) for cost in of_gpus.costs.values())
    assert {row[1] for row in traffic} >= {"fsdp", "tensor"}
    seconds = {row[0]: row[4:6] for row in cells_of(text, ["segment", "compute"], key=4)}
    assert seconds == {
        name: [f"{e.total:.3g}", str(e.expected(of_gpus.pod.efficiency))]
        for name, e in of_gpus.parts.items()
    }


def test_seconds_are_said_to_be_estimates(of_gpus):
    text = joined(describe_plan(of_gpus))
    assert "ESTIMATED seconds" in text and "nothing was measured" in text
    assert "nothing was compiled" in text
    tree = json.loads(json.dumps(of_gpus.to_tree()))
    assert tree["estimated_step_seconds"] == pytest.approx(of_gpus.seconds)
    assert tree["segments"]["actor_train"]["estimated_seconds"]["total"] > 0
    step = sum(s["estimated_seconds"]["total"] for s in tree["segments"].values())
    assert step + tree["estimated_generation"]["total"] == pytest.approx(of_gpus.seconds)
    for end, seconds in tree["expected_step_seconds"].items():
        segments = [s["estimated_seconds"]["expected"][end] for s in tree["segments"].values()]
        of_sampling = tree["estimated_generation"]["expected"][end]
        assert sum(segments) + of_sampling == pytest.approx(seconds)


def test_a_step_is_expected_to_take_longer_than_its_bound(of_gpus):
    expected = of_gpus.expected
    assert of_gpus.seconds < expected.low < expected.middle < expected.high
    assert expected.high <= 1.6 * expected.low
    text = joined(describe_plan(of_gpus))
    assert f"a step: expected {expected} s, bound {of_gpus.seconds:.3g} s" in text


def test_the_picture_has_every_byte_and_second(of_gpus):
    drawing = draw_pod(of_gpus)
    of_memory = set(MEMORY_COLORS.values())
    bars: dict[float, float] = {}
    for shape in drawing.shapes:
        if isinstance(shape, Rect) and shape.fill in of_memory and shape.title.count(":"):
            if not shape.title.endswith(" s"):
                bars[shape.y] = bars.get(shape.y, 0.0) + shape.width
        left, right = (shape.box()[0], shape.box()[2]) if isinstance(shape, Text) else (0, 0)
        assert 0 <= left <= right <= drawing.width
    (limit,) = {s.points[0][0] for s in drawing.shapes if isinstance(s, Line)}
    (start,) = {s.x for s in drawing.shapes if isinstance(s, Rect) and "parameters" in s.title}
    share = [s.total / of_gpus.memory.device for s in of_gpus.memory.segments]
    assert [bars[y] / (limit - start) for y in sorted(bars)] == pytest.approx(share)
    texts = {shape.text for shape in drawing.shapes if isinstance(shape, Text)}
    assert {f"{e.total:.3g} s" for e in of_gpus.parts.values()} <= texts
    assert {"ESTIMATED seconds at peak rates, not measured", *of_gpus.parts} <= texts


def test_a_faster_chip_and_shorter_responses_take_less_time(of_gpus):
    shorter = plan_on(of_gpus.pod, of_gpus.planned, mean_response=8, compiled=False)
    assert shorter.generation.total < of_gpus.generation.total
    for name in ("reference", "actor_train"):  # which skip empty rows
        assert shorter.estimates[name].total < of_gpus.estimates[name].total
    h200 = plan_on(*planned_for("h200:4x8", "mesh.tensor=2"), compiled=False)
    assert h200.generation.total < of_gpus.generation.total
    assert h200.estimates["actor_train"].compute == of_gpus.estimates["actor_train"].compute


def test_accumulators_of_partial_batches_are_planned():
    """In a run in partial batches: the programs of a step hold them, as they do on this machine."""
    pod, planned = planned_for("gpu:1x8", *APART, "stream.partial_batch_prompts=16")
    programs = trace(planned)
    found = plan_on(pod, planned, compiled=False, programs=programs)
    sums = device_bytes(programs["actor_train"].given_states["actor"].sums.gradients)
    trained = 4 * num_params(planned.source.config) / 4  # float32, fsdp=4
    assert sums >= 0.95 * trained
    update = next(s for s in found.memory.segments if s.name == "actor_train")
    assert update.gradients >= sums
    assert compile_plan(planned, programs, only_trace=True).memory.between == found.memory.between


def test_responses_are_not_longer_than_allowed(of_gpus):
    with pytest.raises(ValueError, match="--mean_response=17 is above .*=16; use at most 16"):
        plan_on(of_gpus.pod, of_gpus.planned, mean_response=17, compiled=False)


def test_what_does_not_fit_is_refused_with_its_numbers():
    pod, planned = planned_for("gpu:1x8", "training.device_memory_gib=0.01")
    problem = plan_on(pod, planned, compiled=False).problem
    assert "needs about" in problem and "on each device, which has 10.2 MiB" in problem


def test_more_chips_with_the_same_work_of_each_send_no_more():
    def sent(name, data):
        sizes = [f"mesh.data={data}", "mesh.fsdp=8", "mesh.tensor=2", "rollout.num_slots=1024"]
        planned = planned_for(name, *sizes, f"data.prompts_per_step={64 * data}")
        found = plan_on(*planned, compiled=False)
        return {name: cost.to_tree()["bytes_by_axes"] for name, cost in found.costs.items()}

    few, many = sent("gpu:16x8", 8), sent("gpu:128x8", 64)
    assert few["actor_train"] == many["actor_train"] and few["reference"] == many["reference"]
    assert few["actor_train"]["data"]["all-reduce"] > 0


def test_frozen_weights_have_no_gradients_to_send():
    """Of adapters the gradients are few; weights are gathered as before."""

    def sent(*changed):
        sizes = ("mesh.data=2", "mesh.fsdp=4", "rollout.num_slots=256", *changed)
        found = plan_on(*planned_for("gpu:1x8", *sizes), compiled=False)
        return found.costs["actor_train"].to_tree()["bytes_by_axes"]

    whole, adapters = sent(), sent("lora.rank=1")
    for axes, kind in (("fsdp", "reduce-scatter"), ("data", "all-reduce")):
        assert 0 < adapters[axes][kind] < 0.1 * whole[axes][kind]
    assert 1 < adapters["fsdp"]["all-gather"] / whole["fsdp"]["all-gather"] < 1.1


def test_it_says_how_much_memory_is_left(of_gpus):
    fullest = of_gpus.memory.fullest
    has = of_gpus.pod.chip.memory
    assert of_gpus.spare == pytest.approx(1 - fullest.total / has)
    said = joined(describe_plan(of_gpus))
    assert "of HBM free" in said and ", with temporaries estimated by formulas" in said
    segments = tuple(
        dataclasses.replace(s, temporaries=int(0.95 * has) - s.live - s.gradients)
        for s in of_gpus.memory.segments
    )
    memory = dataclasses.replace(of_gpus.memory, segments=segments)
    tight = dataclasses.replace(of_gpus, memory=memory)
    assert "WARNING: 5.0% of HBM free" in describe_plan(tight) and not tight.problem
    assert tight.to_tree()["memory"]["spare"] == pytest.approx(0.05)


def test_what_is_too_large_is_shown_and_said(of_gpus):
    costs = {name: cost for name, cost in of_gpus.costs.items() if name != "actor_train"}
    refused = {"actor_train": "actor_train alone needs 17GiB of 15GiB of HBM"}
    found = dataclasses.replace(of_gpus, costs=costs, refused=refused)
    assert found.problem == "actor_train alone needs 17GiB of 15GiB of HBM, which does not fit"
    rows = {row[0]: row for row in cells_of(describe_plan(found), ["program", "arguments"])}
    assert rows["actor_train"][5] == "too large" and found.seconds < of_gpus.seconds
    assert {row[5] for name, row in rows.items() if name != "actor_train"} == {"-"}


@pytest.mark.parametrize(
    ("says", "needs"),
    [
        ("Ran out of memory in memory space hbm. Used 17.54G of 15.75G hbm.", "17.54GiB"),
        (
            "Ran out of memory on HBM, the total memory required for HLO temporaries (16.29G) "
            "exceeds available HBM (15.75G).",
            "16.29GiB",
        ),
    ],
)
def test_a_program_that_does_not_fit_alone_is_named(says, needs):
    with pytest.raises(TooLarge, match=f"actor_train alone needs {needs} of 15.75GiB of HBM"):
        with reporting_size("actor_train"):
            raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {says}")
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        with reporting_size("actor_train"):
            raise jax.errors.JaxRuntimeError("INTERNAL: something else")


def test_rows_that_devices_share():
    """Their keys and values are gathered, their gradients summed."""
    pod, planned = planned_for("gpu:1x8", "mesh.context=2", "training.attention=blocks")
    plan = plan_on(pod, planned, compiled=False)
    model, packing = planned.source.config, planned.sizes.packing
    rows, tokens = packing.rows[planned.sizes.mesh.layout], packing.limits.tokens
    keys = rows * tokens * model.num_kv_heads * model.head_dim * 2 * model.num_layers
    for name, gathers in (("reference", 1), ("actor_train", 2)):
        found = plan.costs[name].to_tree()["bytes_by_axes"]
        assert found["context"]["all-gather"] == gathers * 2 * keys
    assert found["context"]["reduce-scatter"] == 2 * keys
    gradients = rows * num_params(model) / 4 * 2  # in bfloat16, of what a device has
    assert found["context"]["all-reduce"] == gradients


def test_axes_that_formulas_do_not_know():
    with pytest.raises(
        ValueError, match="formulas cover the mesh axes data, .*, tensor, not pipeline=2"
    ):
        plan_on(*planned_for("gpu:1x8", "mesh.pipeline=2"), compiled=False)


MIXTURE = (
    "model.source=random:qwen3_moe?hidden=256&layers=4&heads=4&kv_heads=4&mlp=512&experts=8&active=2"
    "&vocab=512"
)


def test_devices_that_share_experts_or_rows_send_more_kinds():
    mixture = plan_on(*planned_for("gpu:4x8", MIXTURE, "mesh.expert=4"), compiled=False)
    costs = mixture.costs["actor_train"]
    assert not costs.unbounded
    sent = costs.to_tree()["bytes_by_axes"]
    tokens, layers = 4 * mixture.planned.sizes.packing.limits.tokens, 4
    rows = mixture.planned.sizes.packing.rows[mixture.planned.sizes.mesh.layout]
    once = rows * layers * tokens * 256 * 2  # bfloat16
    assert sent["expert"]["all-gather"] == 3 * once  # forward, again, gradient
    assert sent["expert"]["reduce-scatter"] == 2 * once
    of_experts = layers * 8 * (3 * 256 * 512 + 256)  # with their outputs of the router
    others = num_params(mixture.planned.source.config) - of_experts
    assert sent["expert"]["all-reduce"] == rows * others / 8 * 2
    assert sent["fsdp"]["reduce-scatter"] == rows * (others + of_experts / 4) * 2

    shared = plan_on(*planned_for("gpu:4x8", "mesh.context=2"), compiled=False)
    sent = shared.costs["actor_train"].to_tree()["bytes_by_axes"]
    kept = rows * 2 * layers * (tokens / 4) * 2 * 256 * 2
    assert sent["context"]["all-gather"] == 2 * kept == 2 * sent["context"]["reduce-scatter"]
    assert sent["context"]["all-reduce"] == 2 * rows * num_params(shared.planned.source.config) / 8


def test_a_model_needs_no_weights_to_be_planned_with(tmp_path):
    hidden = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    more = {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 256}
    settings = {"model_type": "llama", "tie_word_embeddings": True} | hidden | heads | more
    (tmp_path / "config.json").write_text(json.dumps(settings))
    source = open_shapes(str(tmp_path))
    assert source.config.hidden_size == 64 and source.tokenizer.vocab_size <= 512
    with pytest.raises(FileNotFoundError, match="config.json alone is enough for scripts/plan.py"):
        open_model(str(tmp_path))


@pytest.fixture(scope="module")
def of_tpus():
    before = live_bytes()
    found = plan_on(*planned_for("v5e:4x4", "mesh.tensor=2"))
    assert live_bytes() - before < 100  # single numbers
    return found


@needs_libtpu
@pytest.mark.slow
def test_tpus_are_compiled_for(of_tpus):
    assert set(of_tpus.costs) == {
        "update_weights", "prefill", "decode", "reference", "advantage", "actor_train"
    }  # fmt: skip
    for name, cost in of_tpus.costs.items():
        assert cost.unread == 0 and cost.unbounded == (), name
        assert cost.peak_bytes > 0 and all("?" not in t.axes for t in cost.traffic), name
    assert not of_tpus.problem and of_tpus.memory.fullest.total < of_tpus.pod.chip.memory
    text = describe_plan(of_tpus)
    assert "stragglers" in text
    gathers = [t for t in of_tpus.costs["actor_train"].traffic if t.covered]
    assert gathers and all(t.overlapped for t in gathers)


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("data", [1, 2])
def test_formulas_say_what_the_compiler_does_with_shared_rows(data):
    sizes = [f"mesh.data={data}", "mesh.context=2", "training.attention=blocks"]
    pod, planned = planned_for("v5e:4x4", *sizes)
    guess = plan_on(pod, planned, compiled=False)
    for name in ("reference", "actor_train"):
        found = guess.costs[name].to_tree()["bytes_by_axes"]
        compiled = compile_program(guess.programs[name], pod).to_tree()["bytes_by_axes"]
        for kind in ("all-gather", "reduce-scatter"):
            assert found["context"].get(kind) == compiled["context"].get(kind), name
    axes = "context" if data == 1 else "data*context"
    sums = compiled[axes]["all-reduce"]  # of the layers; the table's go another way
    assert found[axes]["all-reduce"] == pytest.approx(sums, rel=0.1)


@needs_libtpu
@pytest.mark.slow
def test_flops_of_a_tpus_program_are_those_of_the_jaxpr(of_tpus):
    """Two ways to count: the jaxpr's products over all chips, and the HLO's on each."""
    planned = of_tpus.planned
    program = of_tpus.programs["actor_train"]
    found = read(program.compile().as_text())
    assert 16 * found.flops == pytest.approx(of_tpus.costs["actor_train"].flops, rel=0.05)
    assert planned.machine.devices == 16


@needs_libtpu
@pytest.mark.slow
def test_formulas_say_what_the_compiler_does(of_tpus):
    """GPUs are planned by them: they are held against a TPU's compiled programs."""
    guess = plan_on(of_tpus.pod, of_tpus.planned, compiled=False)
    gathered = [p.costs["update_weights"].collective_bytes["all-gather"] for p in (guess, of_tpus)]
    assert gathered[0] == pytest.approx(gathered[1], rel=0.25)
    for name in ("reference", "actor_train"):
        found, wanted = (p.costs[name].to_tree()["bytes_by_axes"] for p in (guess, of_tpus))
        gathered = wanted["fsdp"]["all-gather"]
        assert found["fsdp"]["all-gather"] == pytest.approx(gathered, rel=0.25), name
        # XLA sums whole arrays in places: an all-reduce is a reduce-scatter and a gather
        of_formula, compiled = (
            sum(b * (2 if kind == "all-reduce" else 1) for kind, b in x["tensor"].items())
            for x in (found, wanted)
        )
        assert of_formula == pytest.approx(compiled, rel=0.25), name


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("axis", "assignments", "kinds"),
    [
        # of so small a pair XLA makes all-reduces of what is reduce-scattered
        ("context", ["mesh.context=2"], ["all-gather"]),
        ("expert", [MIXTURE, "mesh.expert=4"], ["all-gather", "reduce-scatter"]),
    ],
)
def test_so_they_do_where_rows_or_experts_are_shared(axis, assignments, kinds):
    pod, planned = planned_for("v5e:4x4", *assignments)
    names = ["reference", "actor_train"]
    compiled = plan_on(pod, planned, only=names)
    assert set(compiled.costs) == set(names)
    guess = plan_on(pod, planned, compiled=False)
    for name in names:
        found, wanted = (p.costs[name].to_tree()["bytes_by_axes"][axis] for p in (guess, compiled))
        for kind in kinds:
            assert found[kind] == pytest.approx(wanted[kind], rel=0.25), (name, kind)


def test_programs_that_are_not_compiled_are_named(of_gpus):
    names = tuple(n for n in of_gpus.costs if n != "actor_train")
    costs = {"actor_train": of_gpus.costs["actor_train"]}
    found = dataclasses.replace(of_gpus, costs=costs, left_out=names)
    text = describe_plan(found)
    rows = cells_of(text, ["program", "arguments"])
    assert [row[0] for row in rows if row[5] == "not compiled"] == list(names)
    assert "without programs that were not compiled" in joined(text)
    assert found.to_tree()["not_compiled"] == list(names)


def test_a_program_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="--only=actor,decode: .* 'actor'; .* decode, .*actor_tr"):
        plan_on(*planned_for("gpu:1x8"), compiled=False, only=["actor", "decode"])
