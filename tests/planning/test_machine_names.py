"""Chips have sane numbers, machines the sizes of their names, and a config ends on another chip.

Nightly: every shipped preset of docs/machines.md leaves 10 % of memory by formulas, as that page
says; those of one TPU VM do when compiled, too (needs libtpu).
"""

import dataclasses
import importlib
import re

import pytest
from support.accelerators import needs_libtpu
from support.paths import ROOT
from support.presets import PRESETS, traced_pod
from support.tiny_config import tiny_config

from distflow_jax.config.config_dict import from_config_dict
from distflow_jax.config.run_config import Config
from distflow_jax.models.weights.source import open_shapes
from distflow_jax.planning.chips import CHIPS
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.machine_names import named_machine
from distflow_jax.planning.plan_run import plan_run
from distflow_jax.pods import pod_plan
from distflow_jax.pods.topology import open_topology

PAGE = ROOT / "docs" / "machines.md"
# | machine | what is trained | `CONFIG:MACHINE,CONTEXT` | GiB of GiB | free | low to high | bound |
ROW = re.compile(
    r"^\|[^|]+\|[^|]+\| `(qwen\w+):([\w-]+),(\w+)`[^|]*\| ([\d.]+) of ([\d.]+) \| (\d+) % \| "
    r"([\d.]+) to ([\d.]+) \| ([\d.]+) \|",
    re.MULTILINE,
)
ROWS = ROW.findall(PAGE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_numbers_of_chips_are_there_and_sane(chip):
    assert chip.source and chip.platform in ("tpu", "gpu")
    assert 15 * 2**30 < chip.memory < 200e9
    # FLOPs for each byte read, and seconds to read all of the memory
    assert 80 < chip.flops / chip.memory_bandwidth < 800
    assert 0.01 < chip.memory / chip.memory_bandwidth < 0.1
    assert chip.network_bandwidth < chip.link_bandwidth < chip.memory_bandwidth
    assert 0.5e-6 < chip.hop_seconds < 10e-6
    if chip.dims:
        assert len(chip.largest) == len(chip.host) == chip.dims
        assert list(chip.largest) == sorted(chip.largest) and chip.wraps
        assert chip.devices <= max(chip.counted, 1)
        assert (chip.inner_bandwidth > chip.link_bandwidth) == (chip.devices > 1)


def test_newer_chips_are_faster_and_larger():
    def rising(*names, by):
        values = [getattr(CHIPS[name], by) * CHIPS[name].devices for name in names]
        return values == sorted(set(values))

    assert rising("v5e", "v4", "v5p", "v6e", "tpu7x", by="flops")
    assert rising("v5e", "v4", "v6e", "v5p", "tpu7x", by="memory_bandwidth")
    assert rising("v5e", "v4", "v6e", "v5p", "tpu7x", by="memory")
    assert rising("a100", "h100", "b200", by="flops")
    assert rising("a100", "a100_80", "h100", "h200", "b200", by="memory_bandwidth")
    assert rising("a10g", "l4", "a10", "rtx4090", "a100", by="flops")
    assert rising("l4", "a100", "h100", "h200", "b200", by="memory")


@pytest.mark.parametrize(
    ("name", "topology", "devices", "hosts"),
    [
        ("v5litepod-8", "v5e:2x4", 8, 1),
        ("v5e-1", "v5e:1x1", 1, 1),
        ("v5e-16", "v5e:4x4", 16, 4),
        ("v5e-64", "v5e:8x8", 64, 16),
        ("v6e-8", "v6e:2x4", 8, 1),
        ("v6e-256", "v6e:16x16", 256, 64),
        ("v4-8", "v4:2x2x1", 4, 1),
        ("v5p-8", "v5p:2x2x1", 4, 1),
        ("v5p-128", "v5p:4x4x4", 64, 16),
        ("v5p-2048", "v5p:8x8x16", 1024, 256),
        ("v5p-12288", "v5p:16x16x24", 6144, 1536),
        ("v4-1536", "v4:8x8x12", 768, 192),
        ("tpu7x-8", "tpu7x:2x2x1", 8, 1),
        ("tpu7x-128", "tpu7x:4x4x4", 128, 16),
        ("h100-8", "h100:1x8", 8, 1),
        ("gpu-64", "h100:8x8", 64, 8),
        ("rtx4090-1", "rtx4090:1x1", 1, 1),
    ],
)
def test_machines_by_name(name, topology, devices, hosts):
    found = named_machine(name)
    assert (found.topology, found.devices, found.hosts) == (topology, devices, hosts)
    machine = Machine.of(found)
    assert machine.processes * machine.local_devices == machine.devices == devices
    assert (machine.chip, machine.memory) == (found.chip.name, found.chip.memory)


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("v5e-2", "v5e-1 or v5e-4"),
        ("v5p-4", "v5p-8"),
        ("v5p-192", "v5p-128 or v5p-256"),
        ("h100-12", "h100-16"),
        ("h100", "h100-8"),
    ],
)
def test_machines_that_do_not_exist(name, fix):
    with pytest.raises(ValueError, match=fix):
        named_machine(name)


def test_a_config_for_another_chip_names_both_and_the_fix():
    config = tiny_config("mesh.chip=v5e", "model.source=random:llama?hidden=128&layers=1&vocab=512")
    h100 = Machine.of(named_machine("h100-1"))
    with pytest.raises(ValueError, match=r"v5e.*h100.*docs/machines\.md.*--config\.mesh\.chip=$"):
        plan_run(config, h100)
    with pytest.raises(ValueError, match="mesh.chip=v5e: .* but the devices here are cpu"):
        plan_run(config, Machine.current())
    with pytest.raises(ValueError, match="mesh.chip=v5f"):
        plan_run(tiny_config("mesh.chip=v5f"), h100)
    assert plan_run(tiny_config("mesh.chip=h100"), h100).config.mesh.chip == "h100"


def plan_of(name, machine, context, pod, *, compiled):
    edited = importlib.import_module(f"configs.{name}").get_config(f"{machine},{context}")
    config = from_config_dict(Config, edited)
    model = dataclasses.replace(config.model, source=str(ROOT / "configs" / "shapes" / name))
    config = dataclasses.replace(config, model=model)
    planned = plan_run(config, pod.machine, open_source=open_shapes)
    planned = dataclasses.replace(planned, devices=pod.devices)
    return pod_plan.plan_on(pod, planned, compiled=compiled)


def test_the_page_has_every_preset_of_2k():
    shown = {(name, named_machine(machine).chip.name) for name, machine, *_ in ROWS}
    page = PAGE.read_text(encoding="utf-8")
    for name in PRESETS:
        for kind, context in importlib.import_module(f"configs.{name}").DIVISIONS:
            if context == "2k":
                assert (name, kind) in shown or f"`{kind}-1`" in page, (name, kind)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}:{row[1]}")
def test_presets_leave_a_tenth_of_memory_and_the_page_says_how_much(row):
    """Of TPUs the page has what libtpu compiled, which the formulas know roughly."""
    name, machine, context, held, has, spare, low, high, bound = row
    found = plan_of(name, machine, context, traced_pod(machine), compiled=False)
    rough = bool(found.pod.chip.dims)
    assert not found.problem and found.spare >= pod_plan.SPARE
    assert float(held) == pytest.approx(
        found.memory.fullest.total / 2**30, rel=0.15 if rough else 0.005
    )
    assert float(has) == pytest.approx(found.pod.chip.memory / 2**30, abs=0.06)
    assert float(spare) == pytest.approx(100 * (1 - float(held) / float(has)), abs=1.0)
    seconds = found.expected.low, found.expected.high, found.seconds
    assert [float(low), float(high), float(bound)] == pytest.approx(
        seconds, rel=0.3 if rough else 0.03
    )


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [row for row in ROWS if CHIPS[named_machine(row[1]).chip.name].dims],
    ids=lambda row: f"{row[0]}:{row[1]}",
)
def test_presets_of_tpus_leave_a_tenth_of_memory_when_compiled(row):
    name, machine, context, *_ = row
    found = plan_of(name, machine, context, open_topology(machine), compiled=True)
    assert not found.problem and not found.memory.unknown
    assert found.spare >= pod_plan.SPARE
