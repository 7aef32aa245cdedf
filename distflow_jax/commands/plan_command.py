"""The subcommand plan."""

import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import jax

from distflow_jax.config.config_dict import from_config_dict
from distflow_jax.config.run_config import Config
from distflow_jax.config.user_error import EXIT_USAGE
from distflow_jax.dag.plan import Plan
from distflow_jax.models.weights.source import open_shapes
from distflow_jax.parsing.paths import named_path
from distflow_jax.planning.chips import CHIPS
from distflow_jax.planning.compiled_plan import compile_plan
from distflow_jax.planning.field_specs import Value
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.memory_plan import MemoryPlan
from distflow_jax.planning.plan_run import RunPlan, plan_run
from distflow_jax.planning.program_table import (
    bytes_of_fields,
    describe,
    fields_on_meshes,
    to_tree,
)
from distflow_jax.pods.async_plan import plan_async
from distflow_jax.pods.calibration import calibrated
from distflow_jax.pods.given_lengths import read_lengths
from distflow_jax.pods.pod_picture import draw_pod
from distflow_jax.pods.pod_plan import plan_on
from distflow_jax.pods.pod_tables import describe_plan
from distflow_jax.pods.pricing import Pricing
from distflow_jax.pods.search import Search
from distflow_jax.pods.sweep import sweep
from distflow_jax.pods.topology import Pod, open_topology
from distflow_jax.programs.text_table import fill_lines
from distflow_jax.report import progress
from distflow_jax.report.drawing import to_svg
from distflow_jax.report.plan_picture.picture import draw
from distflow_jax.runtime.build import trace

UNNAMED_GPU = "gpu"  # --chip of a launcher to which the type of a GPU is not given

# Flags, and the one that each of them needs, or that takes its effect
_NEEDS = (
    ("sweep", "topology"),
    ("async", "topology"),
    ("apply", "sweep"),
    ("calibrate", "topology"),
    ("mean_response", "topology"),
    ("processes", "devices"),
)
_EXCLUDES = (
    ("devices", "topology"),
    ("processes", "topology"),
    ("chip", "topology"),
    ("async", "sweep"),
    ("mean_response", "async"),
    ("only", "sweep"),
    ("only", "async"),
)


def main(options: SimpleNamespace) -> int:
    """Checks the config as a run does; prints the plan and its programs, and draws it."""
    config = from_config_dict(Config, options.config)
    _check_flags(options)
    lengths = getattr(options, "async")
    pod = open_topology(options.topology) if options.topology else None
    if pod and options.calibrate:
        pod = calibrated(pod, pathlib.Path(options.calibrate))
    if options.only and not (pod and pod.compiles and options.compile):
        raise ValueError(
            f"--only={','.join(options.only)} selects programs to compile for one TPU "
            "--topology: omit it"
        )
    chip = options.chip
    if chip == UNNAMED_GPU:
        chip = config.mesh.chip or "h100"
    machine = pod.machine if pod else wanted_machine(options.devices, options.processes, chip)
    if options.sweep:
        return sweep_pod(options, pod, config)
    if lengths:
        return compare_schedules(options, pod, config, named_path("--async", lengths))
    planned = plan_run(config, machine, options.chosen, open_source=open_shapes)
    if pod:
        planned = dataclasses.replace(planned, devices=pod.devices)
    progress.table(planned.source.spec, planned.table())
    if pod:
        return plan_pod(options, pod, planned)
    text, fields, costs, memory, missing = planned.text(), [], {}, None, ""
    of_others = options.chip or machine.processes != jax.process_count()
    if of_others or jax.device_count() != machine.devices:
        here = f"{jax.device_count()} devices in {jax.process_count()} process"
        text += f"\nprograms are not traced: this machine has {here}\n"
    else:
        programs = trace(planned)
        fields = fields_on_meshes(planned.plan, programs)
        compiled = compile_plan(planned, programs, only_trace=not options.compile, only_costs=True)
        costs, memory, missing = compiled.costs, compiled.memory, compiled.shortage
        text += f"\n{describe(fields, costs)}\n{memory.describe()}{_left_out(memory)}"
    print(text)
    if options.out:
        tree = to_tree(fields, costs) | ({} if memory is None else {"memory": memory.to_tree()})
        write_plan(planned.plan, text, tree, bytes_of_fields(fields), options.out)
    if missing:
        print(f"error: a run would end before step 1: {missing}", file=sys.stderr)
        return EXIT_USAGE
    return 0


def _left_out(memory: MemoryPlan) -> str:
    """A line on temporaries that the sums are without."""
    if not memory.unknown:
        return ""
    names = ", ".join(memory.unknown)
    return fill_lines(
        f"\nnot in the sums: temporaries of {names}; a run compiles these programs, and checks its "
        "memory again\n"
    )


def plan_pod(options: SimpleNamespace, pod: Pod, planned: RunPlan) -> int:
    """Compiles the plan for a pod; prints its memory and seconds."""
    found = plan_on(
        pod,
        planned,
        mean_response=options.mean_response,
        compiled=options.compile and pod.compiles,
        only=options.only,
    )
    text = f"{planned.text()}\n{describe_plan(found)}"
    print(text)
    if options.out:
        write_plan(planned.plan, text, found.to_tree(), {}, options.out)
        write_files(options.out, {"pod.svg": to_svg(draw_pod(found), f"plan for {pod.name}")})
    if found.problem:
        print(f"error: a run would end before step 1: {found.problem}", file=sys.stderr)
        return EXIT_USAGE
    return 0


def sweep_pod(options: SimpleNamespace, pod: Pod, config: Config) -> int:
    """Searches the fastest layout on a pod that fits, and prints it."""
    found = sweep(
        Search(Pricing(pod, config, options.chosen, mean_response=options.mean_response)),
        compiles=options.sweep_compile if options.compile else 0,
        say=lambda line: print(line, file=sys.stderr),
    )
    text = found.describe()
    print(text)
    if options.apply and found.best:
        file = pathlib.Path(options.apply)
        write_files(file.parent, {file.name: found.flag_file()})
        print(f"train with these settings: --flagfile={options.apply}")
    if options.out:
        tree = json.dumps(found.to_tree(), indent=1)
        write_files(options.out, {"sweep.txt": text, "sweep.json": tree})
    if found.problem:
        print(f"error: {found.problem}", file=sys.stderr)
        return EXIT_USAGE
    return 0


def compare_schedules(
    options: SimpleNamespace, pod: Pod, config: Config, path: pathlib.Path
) -> int:
    """Prints the seconds of a step in each schedule, for the lengths at a path."""
    found = plan_async(pod, config, options.chosen, read_lengths(path, config, pod.size))
    print(found.describe())
    if options.out:
        write_files(options.out, {"async.json": json.dumps(found.to_tree(), indent=1)})
    return 0


def _check_flags(options: SimpleNamespace) -> None:
    """Raises ValueError for flags without an effect: beside another, or without one."""
    given = {f: v for f, v in vars(options).items() if v and (f, v) != ("processes", 1)}

    def shown(flag: str) -> str:
        value = given[flag]
        return f"--{flag}" if value is True else f"--{flag}={value}"

    for flag, other in _EXCLUDES:
        if flag in given and other in given:
            raise ValueError(f"{shown(flag)} has no effect with {shown(other)}: omit one of them")
    for flag, needed in _NEEDS:
        if flag in given and needed not in given:
            hint = ", such as v5p-128" * (needed == "topology")
            raise ValueError(f"{shown(flag)} needs --{needed}: give it{hint}")


def wanted_machine(devices: int, processes: int, chip: str = "") -> Machine:
    """The machine to plan for; on CPU this process gets the same number of devices.

    `devices` in all `processes`; 0: those of this machine. `chip`: what they are, by its name.
    Raises ValueError if one is not divisible by the other, or there is no such chip.
    """
    if chip and (chip not in CHIPS or not devices):
        raise ValueError(
            f"--chip={chip} must be one of {', '.join(CHIPS)}, with a number of --devices"
        )
    if not devices:
        return Machine.current()
    if devices % processes:
        raise ValueError(f"--devices={devices} is not divisible by --processes={processes}")
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", devices)
    machine = dataclasses.replace(
        Machine.current(),
        processes=processes,
        devices=devices,
        local_devices=devices // processes,
    )
    if not chip:
        return machine
    return dataclasses.replace(
        machine,
        platform=CHIPS[chip].platform,
        memory=CHIPS[chip].memory,
        host_memory=0,
        chip=chip,
    )


def write_plan(
    plan: Plan,
    text: str,
    tree: Mapping[str, Any],
    sizes: Mapping[Value, int],
    folder: str,
) -> None:
    """Writes plan.txt, plan.json and plan.svg.

    `tree`: further entries of plan.json; `sizes`: bytes of fields, for the picture.
    """
    whole = json.loads(plan.to_json()) | tree
    drawing = draw(plan, sizes=sizes)
    write_files(
        folder,
        {
            "plan.txt": text,
            "plan.json": json.dumps(whole, indent=1),
            "plan.svg": to_svg(drawing, f"plan {plan.name}"),
        },
    )


def write_files(folder: str | pathlib.Path, texts: Mapping[str, str]) -> None:
    """Writes texts by the names of their files into a folder, which is made."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
