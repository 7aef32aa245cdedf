"""Shows what a run would do: order, roles, reads and writes, layouts, sizes. Trains nothing.

Examples:
  python scripts/plan.py --config=configs/grpo_smollm2.py --config.algorithm.kl_coef=0.04
  python scripts/plan.py --config=configs/grpo_smollm2.py --out=plan --mermaid

--out writes plan.txt, the pictures plan.svg and plan.png, and plan.mmd, a Mermaid flowchart.
"""

import pathlib

from absl import flags
from ml_collections import config_flags

from distflow_jax.command_line import run_main
from distflow_jax.config import Config, Machine, derive_sizes
from distflow_jax.config_dict import from_config_dict
from distflow_jax.dag.mermaid import to_mermaid
from distflow_jax.dag.picture import draw
from distflow_jax.dag.planner import Plan
from distflow_jax.dag.residency import describe
from distflow_jax.models.weights.source import open_model
from distflow_jax.observe import progress
from distflow_jax.observe.drawing import to_svg
from distflow_jax.observe.png import to_png
from distflow_jax.setup import make_plan, residency_of, settle
from distflow_jax.states import models_of

CONFIG = config_flags.DEFINE_config_file("config", None, "The run's configuration.")
DEVICES = flags.DEFINE_integer(
    "devices", 0, "Plan for so many devices, whatever this machine has; 0: this machine's.", 0
)
PROCESSES = flags.DEFINE_integer("processes", 1, "Processes that --devices are divided over.", 1)
MERMAID = flags.DEFINE_boolean("mermaid", False, "Print the plan as a Mermaid flowchart, too.")
OUT = flags.DEFINE_string("out", "", "Folder for the plan's text and pictures; empty: none.")
flags.mark_flag_as_required("config")


def main(argv: list[str]) -> int:
    """Checks the config as a run does, prints the plan, and draws it."""
    config = from_config_dict(Config, CONFIG.value)
    machine = Machine.current()
    if DEVICES.value:
        if DEVICES.value % PROCESSES.value:
            raise ValueError(
                f"--devices={DEVICES.value} is not divisible by --processes={PROCESSES.value}"
            )
        machine = Machine(
            PROCESSES.value,
            DEVICES.value,
            DEVICES.value // PROCESSES.value,
            machine.platform,
        )
    source = open_model(config.model.source, cache_dir=config.model.cache_dir or None)
    chosen = config_flags.get_override_values(flags.FLAGS["config"])
    config, graph = settle(config, chosen)
    sizes = derive_sizes(config, source.config, machine, graph)
    plan = make_plan(config, graph, sizes)
    stays = residency_of(plan, models_of(plan), config)
    text = plan.describe() + (f"\n{describe(stays)}" if stays else "")
    progress.table(f"{source.spec}", sizes.table(config, source.config, machine))
    print(text)
    if MERMAID.value:
        print(to_mermaid(plan))
    if OUT.value:
        write_pictures(plan, text, pathlib.Path(OUT.value))
    return 0


def write_pictures(plan: Plan, text: str, folder: pathlib.Path) -> None:
    """Writes plan.txt, plan.mmd, plan.svg and plan.png."""
    folder.mkdir(parents=True, exist_ok=True)
    drawing = draw(plan)
    (folder / "plan.txt").write_text(text, encoding="utf-8")
    (folder / "plan.mmd").write_text(to_mermaid(plan), encoding="utf-8")
    (folder / "plan.svg").write_text(to_svg(drawing, f"plan {plan.name}"), encoding="utf-8")
    (folder / "plan.png").write_bytes(to_png(drawing))


if __name__ == "__main__":
    run_main(main)
