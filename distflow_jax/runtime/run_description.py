"""A run in words: its lines before step 1 and after the last, and its files of config and plan."""

import json
import logging
import pathlib
import time

from distflow_jax.cluster import processes
from distflow_jax.config.config_dict import to_config_dict, to_json
from distflow_jax.data.loader import describe_dropped
from distflow_jax.layout import Metrics
from distflow_jax.models.decoder_config import adapted
from distflow_jax.models.parameters import num_params
from distflow_jax.observe.memory import GIB
from distflow_jax.parallel import host_memory
from distflow_jax.planning.plan_run import PreparedRun
from distflow_jax.planning.program_table import (
    bytes_of_fields,
    describe,
    describe_options,
    fields_on_meshes,
)
from distflow_jax.programs.units import format_bytes, format_decimal, format_seconds
from distflow_jax.report import progress, run_end
from distflow_jax.report.drawing import to_svg
from distflow_jax.report.plan_picture.picture import draw
from distflow_jax.report.read_run import read_run
from distflow_jax.report.run_writer import RunWriter
from distflow_jax.report.terminal import ResponseCount, Terminal
from distflow_jax.runtime.build import Runtime
from distflow_jax.runtime.instruments import Instruments
from distflow_jax.runtime.run_files import warn_of_changes

log = logging.getLogger("distflow_jax")


def introduce(prepared: PreparedRun, terminal: Terminal) -> None:
    """Prints the first four lines of a run: model, devices, data, algorithm.

    The other two, memory and folder, follow when the programs are compiled (`describe_start`).
    """
    if terminal.in_cell:
        return
    config, sizes, machine = prepared.config, prepared.sizes, prepared.machine
    model = prepared.source.config
    count = num_params(adapted(model, config.lora)) - num_params(model)
    adapters = f", adapters of {format_decimal(count, '')}" if config.lora.rank else ""
    numbers = f", {format_decimal(num_params(model), '')} parameters{adapters}"
    dtype = sizes.forward.compute_dtype
    terminal.row("model", f"{numbers}, {dtype}", name=prepared.source.spec)
    hosts = f" in {machine.processes} processes" if machine.processes > 1 else ""
    meshes = f"{machine.devices} {machine.platform}{hosts}: training {sizes.mesh.describe()[0]}"
    samplers = ""
    if prepared.own_samplers:
        each = machine.processes // sizes.sampler_hosts
        samplers = f", {each} {'sampler' if each == 1 else 'samplers'}"
        samplers += f" of tensor {sizes.rollout_tensor}" if sizes.rollout_tensor > 1 else ""
    terminal.row("devices", f"{meshes}{samplers}")
    batch = f"{config.data.prompts_per_step:,} {_ROWS[prepared.graph.data]}"
    if prepared.graph.data == "prompts":
        batch = f"{config.data.prompts_per_step:,} x {config.rollout.num_samples}"
    rows = len(prepared.loader.rows)
    terminal.row("data", f", {rows:,} rows, {batch} a step", name=config.data.train)
    nodes = " > ".join(task.node.id for task in prepared.plan.tasks)
    terminal.row("algorithm", f"{prepared.plan.name}, {config.training.steps} steps: {nodes}")


_ROWS = {
    "prompts": "prompts",
    "demonstrations": "demonstrations",
    "preferences": "pairs",
    "unpaired": "labelled responses",
}


def _count_responses(prepared: PreparedRun, runtime: Runtime, terminal: Terminal) -> None:
    config, contexts = prepared.config, runtime.contexts
    sampled = config.data.prompts_per_step * config.rollout.num_samples
    rollout = ResponseCount(sampled // processes.process_count())
    evaluation = ResponseCount(len(prepared.eval_prompts) * config.eval.num_samples)
    contexts.on_response.add(rollout.add)
    contexts.on_evaluated.add(evaluation.add)
    nodes = [task.node.id for task in prepared.plan.tasks if task.node.role == "ROLLOUT"]
    terminal.details |= dict.fromkeys(nodes, rollout.__str__) | {"testing": evaluation.__str__}


def describe_run(
    prepared: PreparedRun,
    runtime: Runtime,
    writer: RunWriter,
    terminal: Terminal,
    folder: pathlib.Path,
    step: int,
) -> None:
    """Writes config and plan; process 0 warns of each possible surprise.

    `step` is that of the checkpoint that the run continues from, 0 in a new run. A notebook shows
    sizes and plan in a cell.
    """
    is_first, plan = processes.process_index() == 0, prepared.plan
    fields = fields_on_meshes(plan, runtime.programs)
    engine, compiled = runtime.engine, runtime.compiled
    options = describe_options(runtime.programs.values(), engine and engine.mesh)
    tables = f"{describe(fields, compiled.costs)}\n{options}\n{compiled.memory.describe()}"
    text = f"{prepared.text()}\n{tables}"
    title = f"{prepared.source.spec}, dag {plan.name}, {folder}"
    sizes = progress.size_lines(prepared.table())
    picture = to_svg(draw(plan, sizes=bytes_of_fields(fields)), f"plan {plan.name}")
    whole = f"{title}\n\n{sizes}\n\n{text}\n\ndigest {plan.digest}"
    if is_first:
        _count_responses(prepared, runtime, terminal)
    described = json.loads(to_json(to_config_dict(prepared.config)))
    if is_first and step:
        warn_of_changes(folder / "config.json", described)
    writer.config(described)
    writer.plan(whole, svg=picture, tree=plan.to_json())
    if is_first:
        progress.introduce_in_cell(title, prepared.table(), text, terminal)
        if prepared.loader.dropped:
            log.warning("%s", describe_dropped(prepared.loader.dropped_for))


def describe_start(runtime: Runtime, terminal: Terminal, folder: pathlib.Path, step: int) -> None:
    """Prints the last two lines before step 1: memory, and where the run lies."""
    if terminal.in_cell:
        return
    memory = runtime.compiled.memory
    has = f" of {format_bytes(memory.device)}" if memory.device else ""
    need = f"{format_bytes(memory.fullest.total)}{has} a device"
    terminal.row("memory", f"{need}, most in {memory.fullest.name}")
    begin = f"continues from step {step}" if step else "new"
    terminal.whole("run", f"{folder} ({begin}; plan.txt has the plan)")


def describe_end(
    prepared: PreparedRun,
    terminal: Terminal,
    folder: pathlib.Path,
    step: int,
    commands: run_end.Commands,
    *,
    stopped: bool,
) -> None:
    """Prints what the run reached, and the `commands` that may follow.

    `stopped`: it ends before its last step, and may be resumed.
    """
    word = "stopped" if stopped else "done"
    made = f"{step} of {prepared.config.training.steps}" if stopped else f"{step}"
    if terminal.in_cell:
        terminal.print(f"{word}: {made} steps in {folder}")
    if not terminal.enabled or terminal.in_cell:
        return
    seconds = format_seconds(time.time() - terminal.began)
    terminal.row(word, f"step {made}, after {seconds}")
    run_end.print_end(terminal, read_run(folder), folder)
    end = run_end.RunEnd(str(folder), answers=bool(prepared.policies), stopped=stopped)
    run_end.print_commands(terminal, commands(end))


def planned_metrics(run: PreparedRun, runtime: Runtime, instruments: Instruments) -> Metrics:
    """GiB on this process's fullest device between two steps, beside what was planned.

    With pipeline ranks also the planned share of time that they wait. No other thread may donate
    or delete arrays meanwhile.
    """
    bubble, memory = run.sizes.bubble_share, runtime.compiled.memory
    waits = {"perf/pipeline_bubble": bubble} if bubble else {}
    live = instruments.measured("perf/memory_live_gb", lambda: host_memory.live_bytes() / GIB)
    between, most = memory.between / GIB, memory.fullest.total / GIB
    planned = {"perf/memory_live_planned_gb": between, "perf/memory_planned_gb": most}
    return waits | live | planned
