"""Starts of scripts/train.py that must be refused: made from the config's keys, flags and parsers.

    python -m support.bad_starts FOLDER

Writes FOLDER/cases.json, with name, arguments and the words that the refusal must hold, and the
files that the arguments name. What is made for each key of the config, for each parser of
support/fuzz.py and for each place of a user's code covers a new one by itself. Inputs that are
rightly accepted are not made: the exceptions stand here with their reasons.
"""

import json
import pathlib
import shutil
import sys

from distflow_jax.commands.subcommands import SUBCOMMANDS
from distflow_jax.config.key_reference import keys
from distflow_jax.runtime.run_files import FILES, FOLDERS
from support import bad_input_cases, bad_input_files, fuzz
from support.paths import ROOT

TINY = f"--config={ROOT}/configs/tiny.py"
BYTES = "\udcff\udcfe"  # of a command line that is not UTF-8

# values that no key of a type takes; a type of several words is the first of them here
OF_TYPE = {
    "dict": ["7", "{'a': ", "{'a': 1e999}", BYTES],
    "tuple": ["{'a': 1}"],
    "int": ["many", "1.5", "nan", "[1]", "-2147483647", "99999999999"],
    "float": ["hot", "nan", "-inf", "1e39", "[1.0]", "1e-46"],
    "bool": ["maybe", "7"],
    "str": [BYTES],
}
FREE_TEXT = {  # any text is right
    *("data.system_prompt", "data.prompt_suffix", "observe.tracker_project"),
    *("model.cache_dir", "compilation_cache"),  # any folder, made where it is needed
}

CONFIG_FILES = {
    "empty": "",
    "syntax": "def get_config(:\n",
    "key_error": "def get_config():\n    return {}['a']\n",
    "exit": "import sys\nsys.exit(0)\n",
    "exit_inside": "def get_config():\n    raise SystemExit\n",
    "zero": "1 / 0\n",
    "needs": "def get_config(size):\n    return size\n",
    "recursion": "def get_config():\n    return get_config()\n",
    "missing": "import surely_not_installed_anywhere\n",
    "none": "def get_config():\n    return None\n",
    "number": "def get_config():\n    return 7\n",
    "text": "def get_config():\n    return 'x'\n",
    "dict": "def get_config():\n    return {'seed': 'x'}\n",
    "a_class": "class get_config:\n    pass\n",
    "not_callable": "get_config = 3\n",
    "lines": "raise ValueError('two\\nlines\\x1b[2J')\n",
    "os_error": "open('/surely/not/there')\n",
    "assertion": "assert False\n",
    "latin": b"x = '\xe9'\n",
    "zero_bytes": b"\0\0\0\0",
    "brackets": "x = " + "(" * 5000,
    "stop": "def get_config():\n    raise StopIteration\n",
    "other_config": "from ml_collections import ConfigDict\n"
    "def get_config():\n    return ConfigDict({'learning_rate': 1})\n",
    "no_section": "from configs import tiny\ndef get_config():\n    config = tiny.get_config()\n"
    "    config.training = None\n    return config\n",
    "odd_name": "from configs import tiny\ndef get_config():\n    config = tiny.get_config()\n"
    "    config.unlock()\n    config['a b'] = 1\n    return config\n",
}
RETURNED = {"number", "text", "dict", "a_class", "other_config", "no_section", "odd_name"}
# of every key, what only a file can give it
SETS_KEY = """from configs import tiny

def get_config(key):
    config = tiny.get_config()
    *path, last = key.split(".")
    section = config
    for name in path:
        section = section[name]
    with section.ignore_type():
        section[last] = [object()]
    return config
"""
USER_CODE = {
    "raises": "raise KeyError('x')\n",
    "exits": "import sys\nsys.exit(0)\n",
    "missing": "import surely_not_installed_anywhere\n",
    "syntax": "def f(:\n",
    "latin": b"x = '\xe9'\ndef f(*a, **k): pass\n",
    "recursion": "def g():\n    g()\ng()\n",
    "lines": "raise ValueError('two\\nlines\\x1b[2J')\n",
    "empty": "",
    "number": "f = 7\n",
    "none": "f = None\n",
    "binary": b"\x7fELF\0\0\0",
}
OF_USERS = {  # where a config names code of a user's
    "reward": ["reward.function={file}:f", "reward.num_workers=1"],
    "dag": ["dag={file}:f"],
    "environment": ["rollout.environment={file}:f"],
    "tracker": ["observe.trackers=('{file}:f',)"],
    "node": ["dag={folder}/fn_{name}.yaml"],
}


def case(name, *arguments, says=(), config=TINY, quick=True, workdir=None):
    """One start. `arguments` are config assignments, or flags."""
    given = [*bad_input_files.QUICK, *arguments] if quick else list(arguments)
    flags = [a if a.startswith("-") else f"--config.{a}" for a in given]
    workdir = "--workdir={run}" if workdir is None else workdir
    return {"name": name, "arguments": [config, workdir, *flags], "says": list(says)}


def of_keys():
    """Values of a wrong type and size for every key, and every key's name with a letter less."""
    for key in keys().values():
        kinds = [kind for kind in OF_TYPE if kind in key.type] or ["str"]
        values = OF_TYPE[kinds[0]]
        if kinds == ["str"] and key.name not in FREE_TEXT:
            values = [*values, "no-such-choice", "7"]
        if kinds[0] == "float" and key.kind and not key.kind.fits(-3e38):
            values = [*values, "-3e38"]
        last = key.name.split(".")[-1]
        for value in values:
            says = value if value in ("no-such-choice", "7") and kinds == ["str"] else last
            yield case(f"{key.name}={value}"[:80], f"{key.name}={value}", says=[says])
        middle = len(key.name) - len(last) // 2 - 1
        typo = key.name[:middle] + "~" + key.name[middle + 1 :]
        yield case(typo, f"{typo}=1", says=["unknown key", typo])
        yield case(f"file: {key.name}", config=f"--config={{dir}}/sets.py:{key.name}", says=[last])


def of_lists():
    """Every mistake of the default tests, those of contradictions and sizes among them."""
    lists = ("KEYS_AND_TYPES", "ENVIRONMENTS", "SIZES", "GRAPH_CASES", "DATA_CASES", "MODEL_CASES")
    for name in (*lists, "REWARD_CASES"):
        for i, (assignments, says) in enumerate(getattr(bad_input_cases, name)):
            yield case(f"{name} {i}", *assignments.split(" ; "), says=[says])


def of_flags():
    """Wrong values of every flag, and arguments that are none."""
    for flag in SUBCOMMANDS["train"].flags:
        values = {"integer": ["many", "-1", "1.5", "", "99999999999999999999"]}.get(flag.kind, [])
        for value in values:
            yield case(f"--{flag.name}={value}", f"--{flag.name}={value}", says=[flag.name])
        typo = f"--{flag.name}x=1"
        yield case(typo, typo, says=[f"{flag.name}x"])
    for wrong in ("stray", "--", "-"):
        yield {
            **case(f"argument {wrong}"),
            "arguments": [TINY, "--workdir={dir}/w", wrong, "stray"],
        }
    yield {"name": "no config", "arguments": ["--workdir={dir}/w"], "says": ["--config"]}
    yield {"name": "nothing", "arguments": [], "says": ["is missing"]}
    jobs = {
        "num_processes": ["--num_processes=2"],
        "process_id": ["--process_id=1"],
        "coordinator": ["--coordinator=nowhere"],
        "beyond": ["--coordinator=127.0.0.1:1", "--num_processes=2", "--process_id=2"],
        "no port": ["--coordinator=127.0.0.1", "--num_processes=2", "--process_id=1"],
        "port": ["--coordinator=127.0.0.1:99999", "--num_processes=2", "--process_id=1"],
    }
    for name, arguments in jobs.items():
        yield case(f"job: {name}", *arguments)
    for steps in ("x", "5", "3:", "4:2", "0:1", "1:2:3", "-1:2"):
        yield case(f"--profile_steps={steps}", f"--profile_steps={steps}", says=[steps])


def of_workdirs(folder):
    """Folders that no run can write to, and those in which something else is in the way."""
    places = {
        "bucket": "gs://bucket/run",
        "s3": "s3://bucket/run",
        "proc": "/proc/run",
        "device": "/dev/null",
        "below a device": "/dev/null/run",
        "file": "{dir}/table.csv",
        "below a file": "{dir}/table.csv/run",
        "long": "{dir}/" + "x" * 300,
        "longer": "{dir}" + "/xxxxxxxx" * 600,
        "bytes of /proc": f"/proc/{BYTES}",
    }
    for name, place in places.items():
        yield case(f"workdir: {name}", workdir=f"--workdir={place}")
    for name in (*FOLDERS, *FILES):
        way = folder / f"way_{name}"
        way.mkdir()
        if name in FOLDERS:
            (way / name).write_text("in the way")
        else:
            (way / name).mkdir()
        yield case(f"workdir: {name}", workdir=f"--workdir={way}", says=[name])


def of_config_files(folder):
    """Config files that raise, return something else, or are no Python."""
    (folder / "sets.py").write_text(SETS_KEY)
    for name, text in CONFIG_FILES.items():
        path = folder / f"config_{name}.py"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        # what a file returns is named by its keys
        says = [] if name in RETURNED else [path.name]
        yield case(f"config {name}", config=f"--config={path}", quick=False, says=says)
    for place in ("", "{dir}", "/dev/null", "{dir}/nowhere.py", "tini", "{dir}/table.csv", BYTES):
        yield case(f"config at {place}", config=f"--config={place}", quick=False)


def of_users(folder):
    """Code of a user's that raises or ends the process where it is imported, at each place."""
    for name, text in USER_CODE.items():
        path = folder / f"code_{name}.py"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        graph = bad_input_files.GRAPH.replace("role: REWARD", f"role: REWARD\n  fn: {path}:f", 1)
        (folder / f"fn_{name}.yaml").write_text(graph)
        for place, arguments in OF_USERS.items():
            filled = [a.format(file=path, folder=folder, name=name) for a in arguments]
            yield case(f"{place}: {name}", *filled, says=[path.name])


def of_parsers(folder, count):
    """`count` damaged files of every format, of those that its parser refuses."""
    seeds = fuzz.write_seeds(folder)
    for name, (path, parse) in seeds.items():
        if name == "template":
            continue  # in tokenizer_config
        whole = path.read_bytes()
        head, found, number = fuzz.head_of(name, whole), 0, 0
        while found < count:
            path.write_bytes(fuzz.mutated(whole[:head], number, name) + whole[head:])
            number += 1
            if read(parse, path):
                continue
            kept = folder / f"{name}_{number}"
            if path.parent.name == "hf":
                shutil.copytree(path.parent, kept)
            else:
                kept = kept.with_suffix(path.suffix)
                shutil.copy(path, kept)
            found += 1
            # a chat template is refused where it is used, for clients of a server too
            says = [] if name == "tokenizer_config" else [kept.name]
            yield case(f"damaged {name} {number}", *of_file(name, kept), says=says)
        path.write_bytes(whole)


def read(parse, path):
    try:
        parse(path)
        return True
    except (ValueError, FileNotFoundError):
        return False


def of_file(name, path):
    """Assignments of a config with this file of a parser."""
    if name == "graph":
        return [f"dag={path}"]
    if path.suffix in (".jsonl", ".json", ".parquet", ".arrow", ".feather"):
        return [f"data.train={path}", "data.prompts_per_step=8"]
    return [
        f"model.source={path}",
        *("data.max_prompt_length=96", "training.row_tokens=112", "training.logp_chunk=16"),
        "reward.function=exact",
    ]


def all_cases(folder, damaged=6):
    """All starts; their files lie in the folder. {dir} stands for it."""
    bad_input_files.write_files(folder)
    found = [*of_keys(), *of_lists(), *of_flags(), *of_workdirs(folder)]
    found += [*of_config_files(folder), *of_users(folder), *of_parsers(folder, damaged)]
    names = [case["name"] for case in found]
    assert len(set(names)) == len(names), [n for n in names if names.count(n) > 1]
    for number, case in enumerate(found):
        for field in ("arguments", "says"):
            texts = [text.replace("{run}", f"{{dir}}/runs/{number}") for text in case[field]]
            case[field] = [text.replace("{dir}", str(folder)) for text in texts]
    return found


def main(folder):
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cases.json").write_text(json.dumps(all_cases(folder), indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
