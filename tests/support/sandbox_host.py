"""Runs attempts to escape and greedy programs as one user, at every level; JSON of how they ended.

python tests/support/sandbox_host.py root|user FOLDER
"""

import concurrent.futures
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from distflow_jax.config.sandbox_config import LEVELS, SandboxConfig  # noqa: E402
from distflow_jax.sandbox import descendants, namespaces, zygote_process  # noqa: E402
from distflow_jax.sandbox.confinement import can_enter  # noqa: E402
from distflow_jax.sandbox.sandbox import Sandbox  # noqa: E402
from distflow_jax.sandbox.sandbox_records import SandboxError, SandboxProgram  # noqa: E402
from distflow_jax.sandbox.system_calls import NAMES, NUMBERS, call  # noqa: E402
from support import escapes, greedy_programs  # noqa: E402
from support.waiting import HANG  # noqa: E402

USER = 61234


def become_user() -> None:
    """Makes an ordinary user of root, who can reach the interpreter as users of machines can."""
    prefix = os.path.realpath(sys.base_prefix)
    if not can_enter(prefix):  # below root's home: a view of it with open folders
        call("unshare", namespaces.CLONE_NEWNS)
        namespaces._mount("none", "/", "", 16384 | 1 << 18)
        view = tempfile.mkdtemp()
        namespaces._mount(prefix, view, "", 4096)
        closed = "/" + prefix.split("/")[1]
        namespaces._mount("tmpfs", closed, "tmpfs", 0, "mode=755")
        os.makedirs(prefix)
        namespaces._mount(view, prefix, "", 4096)
    os.setgroups([])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)
    call("prctl", 4, 1, 0, 0, 0)  # dumpable: /proc of this process is its user's


def outside(home, told) -> dict[str, str]:
    """What each attempt says without a sandbox, of those that do no harm."""
    said = {}
    names = [name for name, attempt in escapes.ATTEMPTS.items() if attempt.outside]
    for name in names:
        escapes.renew(home)
        with tempfile.TemporaryDirectory() as folder:
            for file, content in escapes.files(name, told).items():
                pathlib.Path(folder, file).write_bytes(content)
            command = [sys.executable, "-c", "import sys; sys.path[0] = '.'; import main"]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=HANG)
            said[name] = (done.stdout + done.stderr).strip()
    return said


def inside(sandbox, home, told) -> dict[str, str]:
    """What each attempt says in the sandbox, or the signal that ended it."""
    escapes.renew(home)

    def one(name):
        files = escapes.files(name, told)
        outcome = sandbox.run(SandboxProgram(("python3", "main.py"), files))
        said = (outcome.stdout + outcome.stderr).decode(errors="replace").strip()
        return name, said or f"{outcome.cause} {outcome.exit_code}"

    before = state(home)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = dict(pool.map(one, escapes.ATTEMPTS))
    return found | {"": "" if state(home) == before else "the world has changed"}


def state(home) -> list[tuple]:
    """Names, contents, modes, owners and times of all files of the user."""
    rows = []
    for path in sorted(home.rglob("*")):
        s = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        rows.append((str(path), s.st_mode, s.st_uid, s.st_mtime_ns, s.st_nlink, content))
    return rows


def greedy(sandbox, scratch) -> dict[str, dict]:
    """How each greedy program ended, and what was left of it."""

    def one(name):
        source, limits = greedy_programs.source(name), greedy_programs.LIMITS
        if "deadline" not in greedy_programs.PROGRAMS[name].causes:  # how slow this machine is
            limits = dataclasses.replace(limits, seconds=HANG)
        files = {"main.py": source}
        program = SandboxProgram(("python3", "main.py"), files, b"x" * (1 << 20), limits)
        outcome = dataclasses.asdict(sandbox.run(program))
        outcome |= {"stdout": len(outcome["stdout"]), "stderr": outcome["stderr"][-500:].decode()}
        return name, outcome

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = dict(pool.map(one, greedy_programs.ALONE))
        others = [name for name in greedy_programs.PROGRAMS if name not in found]
        found |= pool.map(one, others)
    zygote = sandbox._zygote.process.pid
    while any(descendants._is_living(one) for one in descendants.children(zygote)):
        time.sleep(0.01)
    left = [
        path.name
        for path in scratch.rglob("*")
        if path.parent != scratch and "root" not in path.parts
    ]
    return found | {"": {"left": left}}


def signals_init(scratch) -> str:
    """How a program ends that signals its init, where Landlock is too old to stop that."""
    begin = "from distflow_jax.sandbox.zygote"
    old = f"from distflow_jax.sandbox import landlock; landlock.abi = lambda: 5\n{begin}"
    zygote_process._START = zygote_process._START.replace(begin, old)
    program = (
        "import os, time\nfor number in range(1, 65):\n try: os.kill(1, number)\n"
        " except OSError: pass\ntime.sleep(0.3)"
    )
    try:
        with Sandbox(SandboxConfig(level="namespaces", scratch=str(scratch))) as sandbox:
            files = {"main.py": program.encode()}
            return sandbox.run(SandboxProgram(("python3", "main.py"), files)).cause
    except SandboxError as error:
        return str(error)
    except ValueError:  # no such level here
        return ""


def main() -> None:
    """Prints {"user", "outside", level: {...} or why there is none, "init": how it ended}."""
    user, folder = sys.argv[1:]
    if user == "user":
        become_user()
    home = pathlib.Path(tempfile.mkdtemp(prefix="home-", dir=folder))
    home.chmod(0o755)
    scratch = pathlib.Path(tempfile.mkdtemp(prefix="scratch-", dir=folder))
    scratch.chmod(0o755)
    os.environ["DISTFLOW_SECRET"] = "secret"
    refused = [name for name in (*NAMES["refused"], *NAMES["absent"]) if name in NUMBERS]
    found = {"user": os.geteuid()}
    with escapes.world(home, NUMBERS, refused) as told:
        told = json.dumps(told).encode()
        found["outside"] = outside(home, told)
        for level in LEVELS:
            settings = SandboxConfig(level=level, scratch=str(scratch))
            try:
                with Sandbox(settings) as sandbox:
                    found[level] = {
                        "escapes": inside(sandbox, home, told),
                        "greedy": greedy(sandbox, scratch),
                    }
            except ValueError as error:
                found[level] = str(error)
    found["init"] = signals_init(scratch)
    found["left"] = [path.name for path in scratch.iterdir()]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
