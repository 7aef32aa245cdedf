"""Trains a model by reinforcement learning, or resumes a run.

Example:
  python scripts/train.py --config=configs/grpo_smollm2.py --workdir=runs/first \\
      --config.training.optimizer.lr=2e-6

Exit code 0: done. 75: stopped by SIGTERM with a checkpoint; the same command resumes the run. 2: a
user error; the one-line message names the fix.
"""

from absl import flags
from ml_collections import config_flags

from distflow_jax import run
from distflow_jax.config.command_line import define_job_flags, find_job, run_main
from distflow_jax.config.config_dict import from_config_dict
from distflow_jax.config.run_config import Config
from distflow_jax.parallel import processes

CONFIG = config_flags.DEFINE_config_file("config", None, "The run's configuration.")
WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run; an existing run is resumed.")
PROFILE_STEPS = flags.DEFINE_string(
    "profile_steps", None, "Steps to profile, 3:5; short for --config.observe.profile_steps."
)
define_job_flags()
flags.mark_flags_as_required(["config", "workdir"])


def main(argv: list[str]) -> int:
    """Joins a job of several processes, if there is one, and trains."""
    if PROFILE_STEPS.value is not None:
        CONFIG.value.observe.profile_steps = PROFILE_STEPS.value
    config = from_config_dict(Config, CONFIG.value)
    job = find_job()
    processes.initialize(job)
    chosen = config_flags.get_override_values(flags.FLAGS["config"])
    code = run.train(config, WORKDIR.value, job, chosen=set(chosen))
    processes.shutdown()
    return code


if __name__ == "__main__":
    run_main(main)
