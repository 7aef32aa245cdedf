"""Programs of this checkout in processes of their own: run to their end, or beside the test."""

import os
import pathlib
import signal
import subprocess
import sys

from support import haste
from support.paths import ROOT
from support.waiting import HANG, until


def finished(*command, env=None, cwd=ROOT, seconds=900, codes=(0,)):
    """The exit code and the output of a Python program, as text.

    Without `env` it compiles in a hurry. `codes`: how it has to end; None: in any way.
    """
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env=haste.environment() if env is None else env,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    said = done.stdout[-3000:] + done.stderr[-4000:]
    assert codes is None or done.returncode in codes, said
    return done


LATE = "tests/support/delayed_train.py"  # sampler and trainer are late at random, with DELAYS


def training(workdir, settings, *, processes=0, devices=1, program="scripts/train.py", flags=()):
    """The command of a run of configs/tiny.py.

    `processes`: under the local launcher with its `flags`, each with so many `devices`.
    """
    launch = ["scripts/launch_local.py", f"--processes={processes}"]
    launch += [f"--devices_per_process={devices}", *flags, "--"]
    train = [program, "--config=configs/tiny.py", f"--workdir={workdir}"]
    return (launch if processes else []) + train + [f"--config.{key}" for key in settings]


def train(workdir, settings, *, env=None, seconds=900, codes=(0,), **how):
    """A run of configs/tiny.py, from its start to its end."""
    command = training(workdir, settings, **how)
    return finished(*command, env=env, seconds=seconds, codes=codes)


def train_late(workdir, settings, delays, **size):
    """A run whose sampler and trainer are late at random; without `delays` they are not."""
    env = haste.environment() | {"DELAYS": delays}
    return train(workdir, settings, program=LATE, env=env, **size)


class Process:
    """A program of this checkout that goes on beside the test; its output goes to a file."""

    def __init__(self, log, command, devices=None, own=None, program=sys.executable):
        """`own`: variables of its environment; `program`: that has the `command`."""
        self.log = log
        with log.open("a") as file:
            self.process = subprocess.Popen(
                [program, *command],
                cwd=ROOT,
                env=haste.environment(devices) | (own or {}),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def end(self, seconds=HANG):
        """The exit code; it is killed after so long."""
        try:
            return self.process.wait(seconds)
        finally:
            self.kill()

    def kill(self, number=signal.SIGKILL):
        """Sends a signal to it and its children."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)

    def output(self):
        """The end of what it wrote."""
        return self.log.read_text()[-4000:]

    def kill_one(self, draw):
        """SIGKILL to one of its children, any; the launcher ends the others."""
        path = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        children = until(lambda: path.read_text().split(), self.output)
        os.kill(int(draw.choice(children)), signal.SIGKILL)


def alive(pid):
    """Whether a process goes on; one that nobody has collected yet does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = pathlib.Path(f"/proc/{pid}/stat")
    return not (stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] == "Z")


def certificate(cert, key, names="DNS:localhost,IP:127.0.0.1"):
    """Writes a certificate for these names and its key, by openssl."""
    subprocess.run(
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        f"-keyout {key} -out {cert} -subj /CN=localhost -addext subjectAltName={names}",
        shell=True,
        check=True,
        capture_output=True,
    )
