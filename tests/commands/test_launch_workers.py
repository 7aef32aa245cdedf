"""Workers as a second group of hosts, on Slurm and on GKE: what is submitted, and started again."""

import os
import re
import shlex
import subprocess

import pytest
import yaml
from support.launchers import GPU, SLURM, TPU, dry_run, program
from support.paths import ROOT
from support.programs import finished
from support.run_folders import json_lines

from distflow_jax.cluster import job
from distflow_jax.commands.launch import gke, slurm

RUN = [
    "scripts/train.py",
    "--config=configs/tiny.py",
    "--workdir=/shared/runs/far",
    "--config.stream.workers=True",
    "--config.stream.max_staleness=1",
    "--config.stream.listen=0.0.0.0:0",
    "--config.reward.kwargs={'pattern': \"$HOME $(HOME) `id`; #\"}",
]
WORKER = [
    "scripts/worker.py",
    *(word for word in RUN[1:] if "workdir" not in word),
    "--join=/shared/runs/far",
    "--join_seconds=1800",
    "--orphan_seconds=1800",
]
GROUP = ["--workers=3", "--worker_partition=small", "--worker_gpus=1", "--worker_cpus=8"]


def scripts_in(text):
    """The two batch scripts of a dry run."""
    found = re.findall(r"<<'END_OF_BATCH'\n(.*?)END_OF_BATCH\n", text, re.DOTALL)
    assert len(found) == 2
    return found


def header_of(script):
    lines = [line for line in script.splitlines() if line.startswith("#SBATCH ")]
    return {line.removeprefix("#SBATCH --") for line in lines}


# -- Slurm ------------------------------------------------------------------------------------


def test_both_groups_have_nodes_of_their_own_on_slurm(capsys):
    flags = [*SLURM, "--partition=big", "--option=--qos=high", "--setup=module load cuda"]
    alone, _ = dry_run(slurm, flags, capsys, RUN)
    more = ["--worker_time=2-0", "--worker_option=--nodelist=n[5-8]", "--env=A=it's me"]
    text, shown = dry_run(slurm, [*flags, *GROUP, *more], capsys, RUN)
    for part in (text, *scripts_in(text)):
        assert subprocess.run(["bash", "-n"], input=part, text=True).returncode == 0
    trainers, workers = scripts_in(text)
    assert header_of(trainers) == header_of(alone)
    assert header_of(workers) == {
        "job-name=distflow-workers",
        "array=0-2",
        "nodes=1",
        "ntasks-per-node=1",
        "gpus-per-node=1",
        "cpus-per-task=8",
        "time=2-0",
        "partition=small",
        "output=slurm-%j-worker%a.log",
        f"chdir={ROOT}",
        "signal=TERM@300",
        "requeue",
        "open-mode=append",
        "nodelist=n[5-8]",
    }
    assert "module load cuda" in workers.splitlines()
    assert [name for name, *_ in shown] == [*(f"node{i}" for i in range(3)), *names("worker")]
    for _, environment, command in shown[3:]:
        assert job.find(environment).kind == "alone" and environment["A"] == "it's me"
        assert command[1:] == WORKER


def names(prefix):
    return [f"{prefix}{i}" for i in range(3)]


def test_workers_take_whole_nodes_and_what_the_run_has_by_default(capsys):
    text, _ = dry_run(slurm, [*SLURM, "--partition=big", "--workers=1"], capsys, RUN)
    header = header_of(scripts_in(text)[1])
    assert {"exclusive", "mem=0", "array=0-0", "partition=big", "time=04:00:00"} <= header
    assert not any(line.startswith("gpus") for line in header)


def start(folder, *flags, path):
    env = os.environ | {"PATH": f"{path}:{os.environ['PATH']}"}
    command = ("scripts/launch/slurm.py", *SLURM, *GROUP, "--unchecked", *flags, "--", *RUN)
    return finished(*command, env=env, codes=None)


SBATCH = """
import json, pathlib, sys
log = pathlib.Path({log!r})
with log.open("a") as file:
    file.write(json.dumps([sys.argv[1:], sys.stdin.read()]) + "\\n")
count = len(log.read_text().splitlines())
print("71;cluster" if count == 1 else "Submitted batch job 72")
sys.exit(1 if count == {failing} else 0)
"""


def submitted(log):
    return json_lines(log)


def test_slurm_gets_both_jobs_as_the_dry_run_says(tmp_path):
    log = tmp_path / "log"
    program(tmp_path / "sbatch", SBATCH.format(log=str(log), failing=0))
    done = start(tmp_path, path=tmp_path)
    assert done.returncode == 0 and "the trainers are job 71\n" in done.stdout
    (first, trainers), (second, workers) = sent = submitted(log)
    assert first == ["--parsable"]
    assert second == ["--dependency=after:71", "--export=ALL,DISTFLOW_TRAINERS=71"]
    log.unlink()
    text = start(tmp_path, "--dry_run", path=tmp_path).stdout
    assert scripts_in(text) == [trainers, workers]
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert subprocess.run(["bash"], input=text, text=True, env=environment).returncode == 0
    assert submitted(log) == sent


def test_trainers_without_their_workers_are_named(tmp_path):
    program(tmp_path / "sbatch", SBATCH.format(log=str(tmp_path / "log"), failing=2))
    done = start(tmp_path, path=tmp_path)
    assert done.returncode == 1
    assert "the workers were not submitted; `scancel 71` cancels the trainers" in done.stderr


@pytest.mark.parametrize(
    "codes, alive, starts, requeued",
    [
        ([0], True, 1, False),  # the run has ended
        ([2], True, 1, False),  # a user error
        ([75], True, 1, True),  # no trainer answers yet
        ([75], False, 1, False),  # and none will
        ([1, 137, 0], True, 3, False),  # crashes
        ([1, 1, 1, 1, 1], True, 3, False),
        ([134, 75], True, 2, True),
    ],
)
def test_which_workers_start_again_on_slurm(tmp_path, capsys, codes, alive, starts, requeued):
    text, _ = dry_run(slurm, [*SLURM, *GROUP, "--worker_retries=2"], capsys, RUN)
    (tmp_path / "batch").write_text(scripts_in(text)[1])
    (tmp_path / "codes").write_text("\n".join(map(str, codes)) + "\n")
    shell = {
        "srun": 'echo "$@" >> starts; n=$(wc -l < starts); exit $(sed -n ${n}p codes)',
        "squeue": f'[ "$2" = --jobs=71 ] && echo "{"71 big" if alive else ""}"',
        "scontrol": 'echo "$@" >> requeued',
        "sleep": "exit 0",
    }
    for name, code in shell.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{code}\n")
        (tmp_path / name).chmod(0o755)
    slurm_sets = {"SLURM_ARRAY_JOB_ID": "72", "SLURM_ARRAY_TASK_ID": "1", "DISTFLOW_TRAINERS": "71"}
    environment = os.environ | slurm_sets | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "batch"], cwd=tmp_path, env=environment, capture_output=True)
    assert done.returncode == codes[min(starts, len(codes)) - 1]
    lines = (tmp_path / "starts").read_text().splitlines()
    assert len(lines) == starts and all("scripts/worker.py" in line for line in lines)
    found = (tmp_path / "requeued").exists()
    assert found == requeued
    if found:
        assert (tmp_path / "requeued").read_text() == "requeue 72_1\n"


# -- GKE --------------------------------------------------------------------------------------


def parts_of(flags, capsys):
    text, shown = dry_run(gke, flags, capsys, RUN)
    return list(yaml.safe_load_all(text)), shown


def test_workers_are_a_job_beside_the_jobset(capsys):
    flags = ["--worker_gpu=nvidia-l4", "--worker_machine_type=g2-standard-8", "--worker_spot"]
    flags += ["--workers=3", "--worker_max_restarts=7", "--secret=wire-token"]
    (jobset, group), shown = parts_of([*GPU, *flags], capsys)
    assert (jobset["kind"], group["kind"], group["apiVersion"]) == ("JobSet", "Job", "batch/v1")
    label = {"distflow-run": "first"}
    assert jobset["metadata"]["labels"] == group["metadata"]["labels"] == label
    assert group["metadata"]["name"] == "first-workers"
    spec = group["spec"]
    assert (spec["parallelism"], spec["completions"], spec["completionMode"]) == (3, 3, "Indexed")
    assert spec["backoffLimitPerIndex"] == 7 and "backoffLimit" not in spec
    mistake, taken = spec["podFailurePolicy"]["rules"]
    codes = {"containerName": "main", "operator": "In", "values": [2]}
    assert mistake == {"action": "FailIndex", "onExitCodes": codes}
    assert taken == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # as podFailurePolicy demands
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-accelerator": "nvidia-l4",
        "node.kubernetes.io/instance-type": "g2-standard-8",
        "cloud.google.com/gke-spot": "true",
    }
    (container,) = pod["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 1}}
    assert container["envFrom"] == [{"secretRef": {"name": "wire-token"}}]
    assert container["command"] == ["python", *(word.replace("$(", "$$(") for word in WORKER)]
    assert {"name": "volume-0", "mountPath": "/shared"} in container["volumeMounts"]
    assert [name for name, *_ in shown][3:] == names("first-workers-")
    for _, environment, command in shown[3:]:
        assert job.find(environment).kind == "alone" and command[1:] == WORKER


def test_certificates_come_from_a_secret_and_keys_go_where_addresses_are(capsys):
    folder = "/etc/distflow/tls"
    (jobset, group), _ = parts_of([*GPU, "--workers=1", "--tls_secret=wire"], capsys)
    (replicated,) = jobset["spec"]["replicatedJobs"]
    pods = [replicated["template"]["spec"]["template"]["spec"], group["spec"]["template"]["spec"]]
    for pod, expected in zip(pods, (None, ["ca.crt"]), strict=True):
        (secret,) = [one["secret"] for one in pod["volumes"] if one["name"] == "tls"]
        assert secret["secretName"] == "wire"
        found = [item["key"] for item in secret["items"]] if "items" in secret else None
        assert found == expected
        (container,) = pod["containers"]
        mount = {"name": "tls", "mountPath": folder, "readOnly": True}
        assert mount in container["volumeMounts"]
        environment = {one["name"]: one["value"] for one in container["env"]}
        assert environment["DISTFLOW_TLS_CA"] == f"{folder}/ca.crt"
        assert ("DISTFLOW_TLS_KEY" in environment) == (expected is None)


@pytest.mark.parametrize(
    "tpu, topology, label, chips",
    [
        ("v5e", "2x4", "tpu-v5-lite-podslice", 8),
        ("v6e", "1x1", "tpu-v6e-slice", 1),
        ("v5p", "2x2x1", "tpu-v5p-slice", 4),
    ],
)
def test_workers_on_tpu_hosts(tpu, topology, label, chips, capsys):
    flags = [f"--worker_tpu={tpu}", f"--worker_topology={topology}", "--workers=2"]
    (_, group), _ = parts_of([*TPU, *flags], capsys)
    pod = group["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": label,
        "cloud.google.com/gke-tpu-topology": topology,
    }
    assert pod["containers"][0]["resources"] == {"limits": {"google.com/tpu": chips}}


# -- both -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "launcher, flags, message",
    [
        (slurm, ["--workers=-1"], "--workers must be at least 0, got -1"),
        (slurm, ["--worker_gpus=-1"], "--worker_gpus must be at least 0, got -1"),
        (slurm, ["--worker_time=soon"], "--worker_time must read like 04:00:00"),
        (slurm, ["--worker_time=5"], "--worker_time=5 must be above --grace_seconds=300"),
        (slurm, ["--worker_partition=a b"], "--worker_partition takes no spaces"),
        (slurm, ["--worker_option=--a b"], "--worker_option must be --NAME=VALUE without spaces"),
        (slurm, ["--worker_flag=listen"], "--worker_flag must be --NAME=VALUE, got 'listen'"),
        (slurm, ["--worker_flag=--a=\n"], "the command takes no line breaks"),
        (gke, ["--worker_gpus=0"], "--worker_gpus must be at least 1, got 0"),
        (gke, ["--worker_gpu=nvidia-l4", "--worker_tpu=v5e"], "give either --worker_tpu and"),
        (gke, ["--worker_tpu=v9"], "--worker_tpu must be one of tpu7x, v4, v5e, v5p, v6e, got"),
        (gke, ["--worker_tpu=v5e", "--worker_topology=4x4"], "must be one of 1x1, 2x2, 2x4, got"),
        (gke, [], "a worker is one host: --worker_topology of v5p must be one of 2x2x1, got ''"),
        (gke, ["--worker_machine_type=A b"], "--worker_machine_type must be lower-case"),
        (gke, ["--tls_secret=A"], "--tls_secret must be lower-case"),
    ],
)
def test_what_cannot_start_is_refused(launcher, flags, message):
    usual = {slurm: SLURM, gke: TPU}[launcher]
    with pytest.raises(ValueError, match=re.escape(message)):
        launcher.main([*usual, "--workers=2", *flags, "--dry_run", "--unchecked", "--", *RUN])


@pytest.mark.parametrize(
    "run, message",
    [
        (RUN[:5], "cannot reach trainers at 127.0.0.1:0: pass --config.stream.listen=0.0"),
        (
            [*RUN[:5], "--config.stream.listen", "localhost:5"],
            "cannot reach trainers at localhost:5",
        ),
        ([*RUN[:3], RUN[5]], "--workers needs a run with --config.stream.workers=True"),
        ([*RUN[:2], *RUN[3:]], "--workdir"),
        (["scripts/evaluate.py", *RUN[1:]], "--workers needs a training run after --"),
    ],
)
def test_runs_that_no_worker_can_join_are_refused(run, message):
    for launcher, flags in ((slurm, SLURM), (gke, GPU)):
        with pytest.raises(ValueError, match=re.escape(message)):
            launcher.main([*flags, "--workers=2", "--dry_run", "--unchecked", "--", *run])


def test_a_dry_run_of_both_groups_can_be_submitted_as_it_is(capsys):
    slurm.main([*SLURM, *GROUP, "--dry_run", "--unchecked", "--", *RUN])
    output = capsys.readouterr().out
    assert subprocess.run(["bash", "-n"], input=output, text=True).returncode == 0
    assert shlex.join(WORKER[:2]) in output
    gke.main([*GPU, "--workers=2", "--dry_run", "--unchecked", "--", *RUN])
    assert [part["kind"] for part in yaml.safe_load_all(capsys.readouterr().out)] == [
        "JobSet",
        "Job",
    ]
