"""A run's config, plan and memory, written and printed before step 1."""

import json
import logging
import pathlib

from distflow_jax.config.config_dict import to_config_dict, to_json
from distflow_jax.observe.memory import GIB
from distflow_jax.parallel import device_memory, processes
from distflow_jax.planning.plan_run import PreparedRun
from distflow_jax.planning.program_table import (
    bytes_of_fields,
    describe,
    describe_options,
    fields_on_meshes,
)
from distflow_jax.report import progress
from distflow_jax.report.drawing import to_svg
from distflow_jax.report.plan_picture.picture import draw
from distflow_jax.report.run_writer import RunWriter
from distflow_jax.runtime.build import Runtime
from distflow_jax.runtime.run_files import warn_of_changes

log = logging.getLogger("distflow_jax")


def describe_run(
    prepared: PreparedRun,
    runtime: Runtime,
    writer: RunWriter,
    folder: pathlib.Path,
    step: int,
) -> None:
    """Writes config and plan; process 0 prints them, with a warning of each possible surprise.

    `step` is that of the checkpoint that the run continues from, 0 in a new run.
    """
    described = json.loads(to_json(to_config_dict(prepared.config)))
    is_first, plan = processes.process_index() == 0, prepared.plan
    if is_first and step:
        log.info("continuing from step %d in %s", step, folder)
        warn_of_changes(folder / "config.json", described)
    writer.config(described)
    fields = fields_on_meshes(plan, runtime.programs)
    engine, compiled = runtime.engine, runtime.compiled
    options = describe_options(runtime.programs.values(), engine and engine.mesh)
    tables = f"{describe(fields, compiled.costs)}\n{options}\n{compiled.memory.describe()}"
    text = f"{prepared.text()}\n{tables}"
    picture = to_svg(draw(plan, sizes=bytes_of_fields(fields)), f"plan {plan.name}")
    writer.plan(f"{text}\n\ndigest {plan.digest}", svg=picture, tree=plan.to_json())
    if is_first:
        title = f"{prepared.source.spec}, dag {plan.name}, {folder}"
        progress.introduce(title, prepared.table(), text)
        if prepared.loader.dropped:
            log.warning("%d overlong prompts were dropped", prepared.loader.dropped)


def planned_metrics(prepared: PreparedRun, runtime: Runtime) -> dict[str, float]:
    """GiB on this process's fullest device between two steps, beside what was planned.

    With pipeline ranks also the planned share of time that they wait.
    """
    bubble, memory = prepared.sizes.bubble_share, runtime.compiled.memory
    waits = {"perf/pipeline_bubble": bubble} if bubble else {}
    return waits | {
        "perf/memory_live_gb": device_memory.live_bytes() / GIB,
        "perf/memory_live_planned_gb": memory.between / GIB,
        "perf/memory_planned_gb": memory.fullest.total / GIB,
    }
