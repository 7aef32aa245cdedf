"""Launchers submit a whole job, and each host that they show finds its place in it.

Nightly: a run that would end at its start is not submitted; each shown command of launchers starts
a run that fits.
"""

import json
import os
import pathlib
import re
import shlex
import subprocess

import pytest
import yaml
from support.launchers import GKE, GPU, SKY, SLURM, TPU, TRAIN, VM, dry_run, places, program
from support.paths import ROOT
from support.programs import finished

from distflow_jax.cluster import job
from distflow_jax.commands.launch import gke, hosts, local, skypilot, slurm, tpu_vm

NAMED = {"gke": gke, "skypilot": skypilot, "slurm": slurm, "tpu_vm": tpu_vm}


@pytest.mark.parametrize(
    "launcher, flags, kind, expected",
    [
        (slurm, SLURM, "slurm", [("node0:61441", 3, i) for i in range(3)]),
        (slurm, ["--nodes=1", *SLURM[1:]], "alone", [(None, 1, 0)]),
        (
            slurm,
            [*SLURM, "--env=JAX_COORDINATOR_PORT=9"],
            "slurm",
            [("node0:9", 3, i) for i in (0, 1, 2)],
        ),
        (gke, GPU, "kubernetes", [("first-hosts-0-0.first:8476", 3, i) for i in range(3)]),
        (gke, [*GPU, "--nodes=1"], "alone", [(None, 1, 0)]),
        (gke, TPU, "tpu", [(None, 2, i) for i in range(2)]),
        (gke, [*TPU, "--slices=3"], "tpu", [(None, 6, i) for i in range(6)]),
        (gke, [*TPU, "--topology=2x2x1"], "alone", [(None, 1, 0)]),
        (tpu_vm, VM, "auto", [(None, None, None)] * 4),
        (skypilot, SKY, "environment", [("node0:8476", 3, i) for i in range(3)]),
        (skypilot, [*SKY, "--nodes=1"], "alone", [(None, 1, 0)]),
    ],
)
def test_each_host_finds_its_place(launcher, flags, kind, expected, capsys):
    _, shown = dry_run(launcher, flags, capsys)
    assert places(shown) == expected
    assert {job.find(environment).kind for _, environment, _ in shown} == {kind}
    assert len({name for name, _, _ in shown}) == len(expected)
    for _, _, command in shown:
        assert command[1:] == TRAIN


@pytest.mark.parametrize(
    "launcher, flags", [(slurm, SLURM), (gke, GPU), (skypilot, SKY), (tpu_vm, VM)]
)
@pytest.mark.parametrize("prefix", [[], ["distflow"]])
def test_a_subcommand_is_launched_as_a_module(launcher, flags, prefix, capsys):
    words = ["train", "--config=tiny", "--workdir=/shared/runs/first"]
    _, shown = dry_run(launcher, flags, capsys, command=[*prefix, *words])
    module = ["-P", "-m", "distflow_jax.commands"]
    assert all(command[1:] == [*module, *words] for _, _, command in shown)


# -- GKE --------------------------------------------------------------------------------------


def test_the_jobset_of_a_tpu(capsys):
    flags = [*TPU, "--topology=4x4x4", "--slices=2", "--max_restarts=7", "--spot"]
    text, _ = dry_run(gke, flags, capsys)
    jobset = yaml.safe_load(text)
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert jobset["metadata"] == {
        "name": "first",
        "namespace": "default",
        "annotations": {
            "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
        },
    }
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 7
    (replicated,) = jobset["spec"]["replicatedJobs"]
    assert (replicated["name"], replicated["replicas"]) == ("hosts", 2)
    one_slice = replicated["template"]["spec"]
    assert (one_slice["parallelism"], one_slice["completions"]) == (16, 16)
    assert (one_slice["completionMode"], one_slice["backoffLimit"]) == ("Indexed", 0)
    pod = one_slice["template"]["spec"]
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
        "cloud.google.com/gke-tpu-topology": "4x4x4",
        "cloud.google.com/gke-spot": "true",
    }
    assert pod["restartPolicy"] == "Never" and pod["terminationGracePeriodSeconds"] == 300
    (group,) = re.findall(r"^USER \d+:(\d+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert pod["securityContext"]["fsGroup"] == int(group)
    (container,) = pod["containers"]
    assert container["resources"] == {"limits": {"google.com/tpu": 4}}
    assert container["env"] == [
        {"name": "DISTFLOW_GRACE_SECONDS", "value": "300"},
        {"name": "PYTHONUNBUFFERED", "value": "1"},
    ]
    assert {"name": "volume-0", "mountPath": "/shared"} in container["volumeMounts"]
    assert {"name": "volume-0", "persistentVolumeClaim": {"claimName": "claim"}} in pod["volumes"]


def test_the_jobset_of_gpu_nodes(capsys):
    flags = [*GPU, "--secret=hugging-face", "--directory=/app", "--env=A=$(B)"]
    text, _ = dry_run(gke, flags, capsys)
    jobset = yaml.safe_load(text)
    assert "annotations" not in jobset["metadata"]
    (replicated,) = jobset["spec"]["replicatedJobs"]
    pods = replicated["template"]["spec"]
    assert (replicated["replicas"], pods["parallelism"], pods["completions"]) == (1, 3, 3)
    pod = pods["template"]["spec"]
    assert pod["nodeSelector"] == {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}
    (container,) = pod["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    assert container["workingDir"] == "/app"
    assert container["envFrom"] == [{"secretRef": {"name": "hugging-face"}}]
    assert {entry["name"]: entry["value"] for entry in container["env"]} == {
        "PYTHONUNBUFFERED": "1",
        "DISTFLOW_GRACE_SECONDS": str(pod["terminationGracePeriodSeconds"]),
        "A": "$$(B)",  # Kubernetes makes $(B) of it, and of $(B) the value of B
        "DISTFLOW_COORDINATOR": "first-hosts-0-0.first:8476",
        "DISTFLOW_NUM_PROCESSES": "3",
    }
    assert container["command"] == ["python", *(word.replace("$(", "$$(") for word in TRAIN)]


def test_a_mistake_ends_the_jobset_and_all_else_restarts_it(capsys):
    text, _ = dry_run(gke, TPU, capsys)
    spec = yaml.safe_load(text)["spec"]
    (replicated,) = spec["replicatedJobs"]
    (rule,) = replicated["template"]["spec"]["podFailurePolicy"]["rules"]
    assert rule == {
        "action": "FailJob",
        "onExitCodes": {"containerName": "main", "operator": "In", "values": [2]},
    }
    (rule,) = spec["failurePolicy"]["rules"]
    assert rule == {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}


@pytest.mark.parametrize(
    "tpu, topology, chips_per_host, label, count",
    [
        ("v4", "2x2x4", 4, "tpu-v4-podslice", 4),
        ("v5e", "1x1", 1, "tpu-v5-lite-podslice", 1),
        ("v5e", "2x2", 4, "tpu-v5-lite-podslice", 1),
        ("v5e", "2x4", 4, "tpu-v5-lite-podslice", 2),
        ("v5e", "2x4", 8, "tpu-v5-lite-podslice", 1),
        ("v5e", "16x16", 4, "tpu-v5-lite-podslice", 64),
        ("v5p", "2x2x1", 4, "tpu-v5p-slice", 1),
        ("v5p", "4x4x4", 4, "tpu-v5p-slice", 16),
        ("v5p", "4x4x12", 4, "tpu-v5p-slice", 48),
        ("v6e", "16x16", 4, "tpu-v6e-slice", 64),
        ("tpu7x", "4x4x8", 4, "tpu7x", 32),
    ],
)
def test_slices(tpu, topology, chips_per_host, label, count, capsys):
    flags = [f"--tpu={tpu}", f"--topology={topology}", f"--chips_per_host={chips_per_host}"]
    text, shown = dry_run(gke, [*GKE, *flags], capsys)
    (replicated,) = yaml.safe_load(text)["spec"]["replicatedJobs"]
    pods = replicated["template"]["spec"]
    pod = pods["template"]["spec"]
    assert (pods["parallelism"], len(shown)) == (count, count)
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-accelerator"] == label
    limits = pod["containers"][0]["resources"]["limits"]
    assert limits == {"google.com/tpu": chips_per_host}


# -- TPU VM -----------------------------------------------------------------------------------


def test_gcloud_starts_it_on_all_hosts(capsys, tmp_path):
    folder = tmp_path / "a folder; with signs"
    folder.mkdir()
    program(
        folder / "python",
        "import json, os, sys\n"
        "told = [os.getcwd(), os.environ['A'], os.environ['DISTFLOW_DISTRIBUTED'], sys.argv[1:]]\n"
        "print(json.dumps(told))",
    )
    flags = [*VM, "--project=my-project", "--internal_ip", "--python=./python", "--env=A=it's $B"]
    text, shown = dry_run(tpu_vm, [*flags, f"--directory={folder}"], capsys)
    command = shlex.split(text)
    assert command[:-1] == [
        *["gcloud", "compute", "tpus", "tpu-vm", "ssh", "my-tpu"],
        *["--zone=us-east5-a", "--worker=all", "--project=my-project", "--internal-ip"],
    ]
    # what a login shell there makes of it
    done = subprocess.run(
        ["bash", "-c", command[-1].removeprefix("--command=")], capture_output=True, text=True
    )
    assert json.loads(done.stdout) == [str(folder), "it's $B", "auto", TRAIN], done.stderr
    assert [environment["A"] for _, environment, _ in shown] == ["it's $B"] * 4


@pytest.mark.parametrize(
    "accelerator_type, count",
    [
        ("v4-8", 1),
        ("v5p-8", 1),
        ("v5p-128", 16),
        ("v5litepod-1", 1),
        ("v5litepod-8", 1),
        ("v5litepod-16", 4),
        ("v6e-8", 1),
        ("v6e-256", 64),
    ],
)
def test_hosts_of_a_tpu_vm(accelerator_type, count):
    assert tpu_vm.tpu(accelerator_type).hosts == count


@pytest.mark.parametrize(
    "gpu, chip",
    [
        ("nvidia-tesla-a100", "a100"),
        ("nvidia-a100-80gb", "a100_80"),
        ("A100-80GB", "a100_80"),
        ("nvidia-h100-mega-80gb", "h100"),
        ("nvidia-h200-141gb", "h200"),
        ("A10G", "a10g"),
        ("RTX4090", "rtx4090"),
        ("L40S", "gpu"),
        ("", ""),
    ],
)
def test_chips_of_gpu_types(gpu, chip):
    assert hosts.gpu_chip(gpu) == chip


# -- all --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "launcher, flags, message",
    [
        (slurm, ["--nodes=0"], "--nodes must be at least 1, got 0"),
        (slurm, ["--gpus_per_node=-1"], "--gpus_per_node must be at least 0, got -1"),
        (slurm, ["--time=soon"], "--time must read like 04:00:00 or 2-12, got 'soon'"),
        (slurm, ["--time=5"], "--grace_seconds=300 must be above 0 and below --time=5 (300 sec"),
        (slurm, ["--partition=a\n#SBATCH --x"], "--partition takes no spaces or quotes"),
        (slurm, ["--option=--qos=a b"], "--option must be --NAME=VALUE without spaces"),
        (slurm, ["--setup=a\nb"], "--setup takes no line breaks"),
        (slurm, ["--directory=/nowhere"], "scripts/train.py does not exist in /nowhere"),
        (slurm, ["--env=A"], "--env must be NAME=VALUE, got 'A'"),
        (slurm, ["--env=A=1\n2"], "--env takes no line breaks"),
        (slurm, ["--env=DISTFLOW_PROCESS_ID=1"], "the launcher sets DISTFLOW_PROCESS_ID"),
        (gke, ["--name=First"], "--name must be lower-case letters, digits and dashes"),
        (gke, [f"--name={'a' * 50}"], "a letter first, at most 47 characters"),
        (gke, ["--volume=claim"], "--volume must be CLAIM:/PATH, got 'claim'"),
        (gke, ["--volume=Claim:/x"], "--volume must be lower-case"),
        (gke, ["--gpu=nvidia-l4"], "give either --tpu and --topology, or --gpu"),
        (gke, ["--slices=0"], "--slices must be at least 1"),
        (gke, ["--max_restarts=-1"], "--max_restarts must be at least 0"),
        (gke, ["--topology=4x4"], "--topology of v5p must be one of 2x2x1, 2x2x2"),
        (gke, ["--topology=4x4x6"], "multiples of 4 in rising order, got '4x4x6'"),
        (gke, ["--tpu=v6e", "--topology=3x3"], "--topology of v6e must be one of 1x1, 2x2"),
        (gke, ["--chips_per_host=8"], "--chips_per_host must be 4, or 8 for 2x4, got 8"),
        (gke, ["--chips_per_host=1"], "hosts of 1 chips cannot make up --topology=2x2x2"),
        (gke, ["--topology=2x2x1", "--slices=2"], "needs TPU slices of more than one host"),
        (gke, ["--queue=A"], "--queue must be lower-case"),
        (skypilot, ["--nodes=0"], "--nodes must be at least 1"),
        (skypilot, ["--gpu=H100 x"], "--gpu takes no spaces or quotes, got 'H100 x'"),
        (skypilot, ["--volume=s3://bucket:/x"], "--volume must be NAME:/PATH"),
        (tpu_vm, ["--project=a b"], "--project must be the name of a project, got 'a b'"),
        (tpu_vm, ["--accelerator_type=v5p"], "--accelerator_type=v5p: 'v5p' must be CHIP-NUMBER"),
        (tpu_vm, ["--accelerator_type=v5p-12"], "counts cores, 2 per chip); use v5p-8 or v5p-16"),
        (tpu_vm, ["--accelerator_type=v6e-12"], "use v6e-1 or v6e-4 or v6e-8 or v6e-16"),
        (
            tpu_vm,
            ["--accelerator_type=tpu7x-8"],
            "--accelerator_type=tpu7x-8 is not the type of a TPU VM",
        ),
    ],
)
def test_what_cannot_start_is_refused(launcher, flags, message):
    usual = {slurm: SLURM, gke: TPU, skypilot: SKY, tpu_vm: VM}[launcher]
    with pytest.raises(ValueError, match=re.escape(message)):
        launcher.main([*usual, *flags, "--dry_run", "--unchecked", "--", *TRAIN])


@pytest.mark.parametrize(
    "launcher, flags", [(slurm, SLURM), (gke, TPU), (skypilot, SKY), (tpu_vm, VM), (local, [])]
)
@pytest.mark.parametrize(
    "name, words, fix",
    [
        ("--workdir", ["--workdir=gs://b/run"], "cp --recursive FOLDER 'gs://b/run'"),
        ("--workdir", ["--workdir", "s3://b/run"], "aws s3 cp --recursive FOLDER 's3://b/run'"),
        ("--config.data.train", ["--config.data.train=gs://b/x"], "'gs://b/x' FOLDER"),
    ],
)
def test_a_bucket_is_refused_before_anything_is_printed(launcher, flags, name, words, fix, capsys):
    dry = [] if launcher is local else ["--dry_run", "--unchecked"]
    with pytest.raises(ValueError, match=f"^{name}=.* is in a bucket.*{fix}$"):
        launcher.main([*flags, *dry, "--", "train", "--config=tiny", *words])
    assert capsys.readouterr() == ("", "")


def test_buckets_of_programs_that_can_read_them_are_launched(capsys):
    """A script of one's own, and compiled programs, which JAX reads itself."""
    command = ["--config.compilation_cache=gs://b/programs", "--workdir=runs/x"]
    for words in (["own.py", "--data=gs://b/x"], ["train", "--config=tiny", *command]):
        assert tpu_vm.main([*VM, "--dry_run", "--unchecked", "--", *words]) == 0
        assert "gs://b/" in capsys.readouterr().out


@pytest.mark.parametrize("launcher, flags", [(skypilot, SKY), (tpu_vm, VM), (gke, TPU)])
def test_a_bucket_is_no_folder_of_hosts(launcher, flags):
    with pytest.raises(ValueError, match="^--directory=gs://b/x is in a bucket.*gcsfuse"):
        launcher.main([*flags, "--directory=gs://b/x", "--dry_run", "--", "train", "--config=tiny"])


@pytest.mark.parametrize("launcher, flags", [(gke, TPU), (skypilot, SKY)])
def test_a_workdir_that_hosts_do_not_share(launcher, flags):
    for words in (["--workdir=runs/first"], ["--workdir", "runs/first"], ["-workdir=runs/first"]):
        said = "--workdir=runs/first is not on a volume.*--volume=NAME:"
        with pytest.raises(ValueError, match=said):
            launcher.main([*flags, "--dry_run", "--", "scripts/train.py", *words])
        with pytest.raises(ValueError, match=said):
            launcher.main([*flags, "--dry_run", "--", "scripts/export.py", "--out=x", *words])
    with pytest.raises(ValueError, match="--workdir is missing: give --volume=NAME:PATH and a"):
        launcher.main([*flags, "--dry_run", "--", "train", "--config=tiny"])


@pytest.mark.parametrize(
    "launcher, flags", [(slurm, SLURM), (gke, GPU), (skypilot, SKY), (tpu_vm, VM)]
)
def test_line_breaks_in_the_command_are_refused(launcher, flags):
    with pytest.raises(ValueError, match="the command takes no line breaks, got '--x=1\\\\n2'"):
        launcher.main([*flags, "--dry_run", "--unchecked", "--", *TRAIN, "--x=1\n2"])


def test_a_job_in_the_environment_is_not_passed_on_unseen(monkeypatch):
    monkeypatch.setenv(job.COORDINATOR, "a:1")
    with pytest.raises(ValueError, match="DISTFLOW_COORDINATOR=a:1 is set, and sbatch would pass"):
        slurm.main([*SLURM, "--", *TRAIN])


def run(name, *arguments, path):
    env = os.environ | {"PATH": str(path)}
    return finished(f"scripts/launch/{name}.py", *arguments, env=env, codes=None)


CASES = [
    ("slurm", SLURM, "sbatch", []),
    ("gke", GPU, "kubectl", ["create", "--filename=-"]),
    ("tpu_vm", VM, "gcloud", None),
]


@pytest.mark.parametrize("name, flags, needed, given", CASES)
def test_submitting(name, flags, needed, given, tmp_path):
    flags = [*flags, "--unchecked"]
    missing = run(name, *flags, "--", *TRAIN, path=tmp_path)
    assert missing.returncode == 2 and missing.stdout == ""
    assert missing.stderr.startswith(f"error: {needed} is not installed here; ")
    assert missing.stderr.count("\n") == 1

    program(
        tmp_path / needed,
        "import json, sys\n"
        "sys.stdout.write(json.dumps(sys.argv[1:]) + '\\n' + sys.stdin.read())\n"
        "sys.exit(3)",
    )
    done = run(name, *flags, "--", *TRAIN, path=tmp_path)
    assert done.returncode == 3, done.stderr
    arguments, text = done.stdout.split("\n", 1)
    shown = run(name, *flags, "--dry_run", "--unchecked", "--", *TRAIN, path=tmp_path).stdout
    if given is None:
        assert [needed, *json.loads(arguments)] == shlex.split(shown.splitlines()[0])
    else:
        assert json.loads(arguments) == given
        assert text and shown.startswith(text)


@pytest.mark.slow
def test_a_run_that_would_end_at_its_start_is_not_submitted(tmp_path):
    program(tmp_path / "sbatch", "print('submitted')")
    flags = ["--nodes=2", "--gpus_per_node=8", "--time=04:00:00", f"--directory={ROOT}"]
    refused = run("slurm", *flags, "--", *TRAIN, "--config.mesh.tensor=3", path=tmp_path)
    assert refused.returncode == 2 and refused.stdout == ""
    assert refused.stderr.startswith("error: the run would fail at its start: mesh.tensor=3")
    assert refused.stderr.endswith(" (to submit it anyway, use --unchecked)\n")
    done = run("slurm", *flags, "--", *TRAIN, path=tmp_path)
    assert done.returncode == 0 and done.stdout == "submitted\n", done.stderr


def commands_in(text):
    joined = re.sub(r"\\\n\s*", " ", text)
    found = re.findall(r"^ *python (scripts/launch/.*)$", joined, re.MULTILINE)
    return [shlex.split(command) for command in found]


def shown_commands():
    """(launcher, arguments) of the page and of each --help."""
    texts = [(ROOT / "docs" / "clusters.md").read_text()]
    texts += [run(name, "--help", path="").stdout for name in sorted(NAMED)]
    found = [command for text in texts for command in commands_in(text)]
    return [(NAMED[pathlib.Path(script).stem], arguments) for script, *arguments in found]


def test_each_shown_command_is_taken(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    found = shown_commands()
    assert {launcher for launcher, _ in found} == set(NAMED.values()) and len(found) >= 10
    for launcher, arguments in found:
        assert launcher.main(["--dry_run", "--unchecked", *arguments]) == 0


@pytest.mark.slow
def test_each_shown_command_starts_a_run_that_fits(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    for launcher, arguments in shown_commands():
        assert launcher.main(["--dry_run", *arguments]) == 0
        assert "not checked" not in capsys.readouterr().err


# -- templates --------------------------------------------------------------------------------


@pytest.mark.parametrize("name, flags", [("slurm", SLURM), ("gke", GPU), ("skypilot", SKY)])
def test_a_printed_template_gives_the_same_text(name, flags, tmp_path, capsys):
    file = tmp_path / "mine"
    file.write_text(run(name, "--print_template", path="").stdout)
    own, _ = dry_run(NAMED[name], flags, capsys)
    assert dry_run(NAMED[name], [*flags, f"--template={file}"], capsys)[0] == own


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "does not exist"),
        ("{% if %}", ", line 1: Expected an expression"),
        ("\n{{ flags.nodez }}", "has no attribute 'nodez'"),
        ("{{ hots }}", "'hots' is undefined"),
        ("{{ nodes + 'x' }}", "unsupported operand"),
        ("{{ nodes // 0 }}", "division"),
    ],
)
def test_a_template_that_cannot_be_rendered_is_named(text, message, tmp_path):
    file = tmp_path / "mine"
    if text is not None:
        file.write_text(text)
    with pytest.raises((ValueError, FileNotFoundError), match=f"--template={file}.*{message}"):
        slurm.main([*SLURM, f"--template={file}", "--dry_run", "--unchecked", "--", *TRAIN])


@pytest.mark.parametrize("name", ["on", "no", "null"])
def test_names_are_text_in_yaml(name, capsys):
    text, _ = dry_run(gke, [*GPU, f"--name={name}", "--env=YES=1e3", "--queue=off"], capsys)
    jobset = yaml.safe_load(text)
    assert jobset["metadata"]["name"] == name
    assert jobset["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "off"}
    spec = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert {"name": "YES", "value": "1e3"} in spec["containers"][0]["env"]
    task = yaml.safe_load(dry_run(skypilot, [*SKY, f"--name={name}", "--env=YES=1e3"], capsys)[0])
    assert (task["name"], task["envs"]["YES"]) == (name, "1e3")


def test_the_task_of_skypilot(capsys, tmp_path):
    """Its `run` finds the job of each node, as the dry run says."""
    flags = [*SKY, "--spot", "--infra=gcp/us-central1", "--setup=pip install -e .[gpu]"]
    text, shown = dry_run(skypilot, [*flags, "--python=./python", "--env=A=it's $B"], capsys)
    task = yaml.safe_load(text)
    assert task["resources"] == {
        "accelerators": "H100:8",
        "infra": "gcp/us-central1",
        "use_spot": True,
        "job_recovery": {
            "strategy": "FAILOVER",
            "recover_on_exit_codes": [75],
            "max_restarts_on_errors": 3,
        },
    }
    assert (task["num_nodes"], task["volumes"]) == (3, {"/shared": "shared"})
    assert task["setup"] == "pip install -e .[gpu]\n"
    program(
        tmp_path / "python",
        "import os, sys, json; print(json.dumps([dict(os.environ), sys.argv[1:]]))",
    )
    sets = {"SKYPILOT_NODE_IPS": "node0\nnode1\nnode2", "SKYPILOT_NUM_NODES": "3"}
    for i, (_, environment, command) in enumerate(shown):
        env = os.environ | task["envs"] | sets | {"SKYPILOT_NODE_RANK": str(i)}
        done = subprocess.run(
            ["bash", "-c", task["run"]], cwd=tmp_path, env=env, capture_output=True
        )
        found, arguments = json.loads(done.stdout)
        assert arguments == command[1:] and environment.items() <= found.items()


@pytest.mark.slow
def test_a_file_of_the_hosts_ends_the_check_and_is_named(tmp_path, capsys):
    """A file that is on the cluster alone is no mistake; an error of the rest is one."""
    flags = [*SLURM, "--nodes=1", "--gpus_per_node=2", "--dry_run", "--"]
    command = ["scripts/train.py", f"--config={ROOT}/configs/tiny.py", f"--workdir={tmp_path}/run"]
    for there in ("--config.model.source=/on/the/cluster", "--config=/on/the/cluster"):
        assert slurm.main([*flags, *command, there]) == 0
        err = capsys.readouterr().err
        assert (
            err
            == "the run is not checked further: /on/the/cluster does not exist on this machine\n"
        )
    with pytest.raises(ValueError, match="would fail at its start: mesh.tensor=3"):
        slurm.main([*flags, *command, "--config.mesh.tensor=3"])


def test_the_commands_of_pods_need_no_checkout():
    """The image holds the package, neither scripts/ nor configs/."""
    files = ("docs/clusters.md", "scripts/launch/gke.py", "distflow_jax/commands/launch/gke.py")
    for file in files:
        text = re.sub(r"\\+\n\s*", " ", (ROOT / file).read_text())
        commands = re.findall(
            r"^ *(?:python scripts/launch/gke.py|distflow launch gke) .* -- +(.*)",
            text,
            re.MULTILINE,
        )
        assert commands, file
        for command in commands:
            assert command.startswith("train ") and "scripts/" not in command
            assert "configs/" not in command


def test_a_dry_run_can_be_submitted_as_it_is(capsys):
    slurm.main([*SLURM, "--dry_run", "--unchecked", "--", *TRAIN])
    output = capsys.readouterr().out
    assert subprocess.run(["bash", "-n"], input=output, text=True).returncode == 0
    gke.main([*GPU, "--dry_run", "--unchecked", "--", *TRAIN])
    assert yaml.safe_load(capsys.readouterr().out)["kind"] == "JobSet"


def test_variables_read_as_a_shell_reads_them():
    environment = hosts.variables(["A=it's", "B= $x ", "C=", "D=a=b"])
    text = hosts.assignments(environment)
    words = dict(word.split("=", 1) for word in shlex.split(text))
    assert (
        words
        == environment
        == {"PYTHONUNBUFFERED": "1", "A": "it's", "B": " $x ", "C": "", "D": "a=b"}
    )
