"""Dry runs of the launchers for clusters, and the flags that tests start them with."""

import stat
import sys

from distflow_jax.cluster import job
from support.launched_hosts import launched
from support.paths import ROOT

# quotes, a variable of the shell and one of Kubernetes, spaces: all are to arrive as they are
TRAIN = [
    "scripts/train.py",
    "--config=configs/tiny.py",
    "--workdir=/shared/runs/first",
    "--config.reward.kwargs={'pattern': \"$HOME $(HOME) `id`; #\"}",
]
SLURM = ["--nodes=3", "--gpus_per_node=8", "--time=04:00:00", f"--directory={ROOT}"]
GKE = ["--name=first", "--image=europe-docker.pkg.dev/p/r/image:1", "--volume=claim:/shared"]
TPU = [*GKE, "--tpu=v5p", "--topology=2x2x2"]
GPU = [*GKE, "--gpu=nvidia-h100-80gb", "--nodes=3"]
SKY = ["--name=first", "--gpu=H100", "--nodes=3", "--volume=shared:/shared"]
VM = ["--name=my-tpu", "--zone=us-east5-a", "--accelerator_type=v5p-32"]


def dry_run(launcher, flags, capsys, command=TRAIN):
    """(what would be submitted, [(host, variables, command)])."""
    assert launcher.main([*flags, "--dry_run", "--unchecked", "--", *command]) == 0
    return capsys.readouterr().out, launched(launcher, [*flags, "--unchecked", "--", *command])


def places(shown):
    jobs = [job.find(environment) for _, environment, _ in shown]
    return [(found.coordinator, found.num_processes, found.process_id) for found in jobs]


def program(path, code):
    path.write_text(f"#!{sys.executable}\n{code}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
