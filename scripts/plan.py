"""Prints a run's plan: order, reads and writes, layouts, sizes, programs. Trains nothing.

Examples:
  python scripts/plan.py --config=configs/grpo_smollm2.py --config.algorithm.kl_coef=0.04
  python scripts/plan.py --config=configs/grpo_smollm2.py --out=plan --mermaid
  python scripts/plan.py --config=configs/tiny.py --topology=v5e:4x4 --out=plan
  python scripts/plan.py --config=configs/tiny.py --topology=gpu:2x8 --sweep

Every program of a device segment is compiled for its costs: FLOPs, bytes, memory. --nocompile only
traces them. --topology compiles for a pod that need not exist, and estimates seconds: see
docs/scaling.md; --only=actor_train compiles one program of several. --out writes plan.txt,
plan.json, the picture plan.svg, and plan.mmd, a Mermaid flowchart; for a pod also pod.svg, its
memory and seconds. --sweep searches the fastest layout of the pod that fits, whatever config.mesh
says, and prints its flags; --out then writes sweep.txt and sweep.json.

Exit code 0 means that a run would start; 2 means that its devices have too little memory, or a user
error. The one-line message names the fix.
"""

import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Collection, Mapping
from typing import Any

import jax
from absl import flags
from ml_collections import config_flags

from distflow_jax.config.command_line import EXIT_USAGE, run_main
from distflow_jax.config.config_dict import from_config_dict
from distflow_jax.config.run_config import Config
from distflow_jax.dag.plan import Plan
from distflow_jax.models.weights.source import open_shapes
from distflow_jax.planning.compiled_plan import compile_plan
from distflow_jax.planning.field_specs import Value
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.plan_run import RunPlan, plan_run
from distflow_jax.planning.program_table import (
    bytes_of_fields,
    describe,
    fields_on_meshes,
    to_tree,
)
from distflow_jax.pods.pod_picture import draw_pod
from distflow_jax.pods.pod_plan import plan_on
from distflow_jax.pods.sweep import sweep
from distflow_jax.pods.topology import Pod, open_topology
from distflow_jax.report import progress
from distflow_jax.report.drawing import to_svg
from distflow_jax.report.plan_picture.mermaid import to_mermaid
from distflow_jax.report.plan_picture.picture import draw
from distflow_jax.runtime.build import trace

CONFIG = config_flags.DEFINE_config_file("config", None, "The run's configuration.")
DEVICES = flags.DEFINE_integer(
    "devices", 0, "Number of devices to plan for; 0: those of this machine.", 0
)
TOPOLOGY = flags.DEFINE_string(
    "topology", "", "Plan for a pod: v5p:8x8x16, v5e:16x16, v6e:16x16, gpu:64x8 (h100, h200)."
)
MEAN_RESPONSE = flags.DEFINE_integer(
    "mean_response", 0, "Mean tokens of a response, for --topology's estimate; 0: the longest.", 0
)
SWEEP = flags.DEFINE_boolean("sweep", False, "Search the fastest layout of --topology that fits.")
SWEEP_COMPILE = flags.DEFINE_integer(
    "sweep_compile", 3, "Number of --sweep's best layouts to compile; 0: only formulas.", 0
)
ONLY = flags.DEFINE_list(
    "only", [], "Programs of --topology to compile, such as actor_train,decode; empty: all."
)
PROCESSES = flags.DEFINE_integer("processes", 1, "Processes that --devices are divided over.", 1)
COMPILE = flags.DEFINE_boolean("compile", True, "Compile the programs for their costs.")
MERMAID = flags.DEFINE_boolean("mermaid", False, "Also print the plan as a Mermaid flowchart.")
OUT = flags.DEFINE_string("out", "", "Folder for the plan's text and pictures; empty: none.")
flags.mark_flag_as_required("config")


def main(argv: list[str]) -> int:
    """Checks the config as a run does; prints the plan and its programs, and draws it."""
    config = from_config_dict(Config, CONFIG.value)
    if TOPOLOGY.value and DEVICES.value:
        raise ValueError(
            f"--topology={TOPOLOGY.value} has a number of devices: leave --devices={DEVICES.value} "
            "out"
        )
    if SWEEP.value and not TOPOLOGY.value:
        raise ValueError("--sweep needs a pod: give --topology, such as v5p:4x4x4")
    pod = open_topology(TOPOLOGY.value) if TOPOLOGY.value else None
    if ONLY.value and (SWEEP.value or not (pod and pod.compiles and COMPILE.value)):
        raise ValueError(
            f"--only={','.join(ONLY.value)} chooses programs to compile for one TPU --topology: "
            "leave it out"
        )
    machine = pod.machine if pod else wanted_machine()
    chosen = config_flags.get_override_values(flags.FLAGS["config"])
    if SWEEP.value:
        return sweep_pod(pod, config, chosen)
    planned = plan_run(config, machine, chosen, open_source=open_shapes)
    if pod:
        planned = dataclasses.replace(planned, devices=pod.devices)
    progress.table(planned.source.spec, planned.table())
    if pod:
        return plan_pod(pod, planned)
    text, fields, costs, memory, missing = planned.text(), [], {}, None, ""
    if jax.device_count() != machine.devices or machine.processes != jax.process_count():
        here = f"{jax.device_count()} devices in {jax.process_count()} process"
        text += f"\nprograms are not traced: this machine has {here}\n"
    else:
        programs = trace(planned)
        fields = fields_on_meshes(planned.plan, programs)
        compiled = compile_plan(planned, programs, only_trace=not COMPILE.value)
        costs, memory, missing = compiled.costs, compiled.memory, compiled.shortage
        text += f"\n{describe(fields, costs)}\n{memory.describe()}"
    print(text)
    if MERMAID.value:
        print(to_mermaid(planned.plan))
    if OUT.value:
        tree = to_tree(fields, costs) | ({} if memory is None else {"memory": memory.to_tree()})
        write_files(planned.plan, text, tree, bytes_of_fields(fields), pathlib.Path(OUT.value))
    if missing:
        print(f"error: a run would end before step 1: {missing}", file=sys.stderr)
        return EXIT_USAGE
    return 0


def plan_pod(pod: Pod, planned: RunPlan) -> int:
    """Compiles the plan for a pod; prints its memory and seconds."""
    found = plan_on(
        pod,
        planned,
        mean_response=MEAN_RESPONSE.value,
        compiled=COMPILE.value and pod.compiles,
        only=ONLY.value,
    )
    text = f"{planned.text()}\n{found.describe()}"
    print(text)
    if MERMAID.value:
        print(to_mermaid(planned.plan))
    if OUT.value:
        folder, drawing = pathlib.Path(OUT.value), draw_pod(found)
        write_files(planned.plan, text, found.to_tree(), {}, folder)
        (folder / "pod.svg").write_text(to_svg(drawing, f"plan for {pod.name}"), encoding="utf-8")
    if found.problem:
        print(f"error: a run would end before step 1: {found.problem}", file=sys.stderr)
        return EXIT_USAGE
    return 0


def sweep_pod(pod: Pod, config: Config, chosen: Collection[str]) -> int:
    """Searches the fastest layout on a pod that fits, and prints it."""
    found = sweep(
        pod,
        config,
        chosen,
        mean_response=MEAN_RESPONSE.value,
        compiles=SWEEP_COMPILE.value if COMPILE.value else 0,
        say=lambda line: print(line, file=sys.stderr),
    )
    text = found.describe()
    print(text)
    if OUT.value:
        folder = pathlib.Path(OUT.value)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "sweep.txt").write_text(text, encoding="utf-8")
        tree = json.dumps(found.to_tree(), indent=1)
        (folder / "sweep.json").write_text(tree, encoding="utf-8")
    if found.problem:
        print(f"error: {found.problem}", file=sys.stderr)
        return EXIT_USAGE
    return 0


def wanted_machine() -> Machine:
    """The machine to plan for; on CPU this process gets the same number of devices."""
    if not DEVICES.value:
        return Machine.current()
    if DEVICES.value % PROCESSES.value:
        raise ValueError(
            f"--devices={DEVICES.value} is not divisible by --processes={PROCESSES.value}"
        )
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", DEVICES.value)
    per_host = DEVICES.value // PROCESSES.value
    return dataclasses.replace(
        Machine.current(),
        processes=PROCESSES.value,
        devices=DEVICES.value,
        local_devices=per_host,
    )


def write_files(
    plan: Plan,
    text: str,
    tree: Mapping[str, Any],
    sizes: Mapping[Value, int],
    folder: pathlib.Path,
) -> None:
    """Writes plan.txt, plan.json, plan.mmd and plan.svg.

    `tree`: further entries of plan.json; `sizes`: bytes of fields, for the picture.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawing = draw(plan, sizes=sizes)
    whole = json.loads(plan.to_json()) | tree
    (folder / "plan.txt").write_text(text, encoding="utf-8")
    (folder / "plan.json").write_text(json.dumps(whole, indent=1), encoding="utf-8")
    (folder / "plan.mmd").write_text(to_mermaid(plan), encoding="utf-8")
    (folder / "plan.svg").write_text(to_svg(drawing, f"plan {plan.name}"), encoding="utf-8")


if __name__ == "__main__":
    run_main(main)
