"""A run whose disk is full says so and ends; with room again it ends as an undisturbed one.

Nightly: a run on a full, read-only or failing disk ends in one line, loses nothing, and goes on
when there is room.
"""

import os
import re
import shutil
import subprocess
import sys

import pytest
from support import haste
from support.paths import ROOT
from support.run_folders import lasting
from support.waiting import HANG

SETTINGS = [
    "--config.model.source=random:llama?hidden=64&layers=2&heads=4&kv_heads=2&mlp=128&vocab=512",
    "--config.training.steps=6",
    "--config.checkpoint.every=1",
]
# a file system of its own, which no one else sees and which ends with the script
SCRIPT = """
set -e
mount -t tmpfs -o size=$SIZE tmpfs "$DISK"
code=0; "$@" || code=$?
echo "first: exit $code"
df --output=avail -B1 "$DISK" | tail -1
mount -o remount,size=1g "$DISK"
"$@"
cp -a "$DISK/run" "$OUT"
"""


def namespaces():
    """The command that runs a program in a mount namespace of its own; None without the right."""
    for words in (["unshare", "--mount"], ["unshare", "--mount", "--map-root-user"]):
        if (
            shutil.which("unshare")
            and not subprocess.run(
                [*words, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True
            ).returncode
        ):
            return words
    return None


def command(workdir):
    return [sys.executable, "scripts/train.py", "--config=tiny", f"--workdir={workdir}", *SETTINGS]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("undisturbed") / "run"
    subprocess.run(
        command(workdir), cwd=ROOT, env=haste.environment(), check=True, capture_output=True
    )
    return workdir


@pytest.mark.slow
@pytest.mark.parametrize("part", [0.1, 0.4, 0.7, 0.9])
def test_a_full_disk_loses_nothing(undisturbed, tmp_path, part):
    """A disk that has room for a part of the run: not for step 1, not for one checkpoint more."""
    unshare = namespaces()
    if unshare is None:
        pytest.skip("no right to mount a file system")
    (tmp_path / "disk").mkdir()
    size = sum(path.stat().st_blocks * 512 for path in undisturbed.rglob("*"))
    names = {"DISK": str(tmp_path / "disk"), "OUT": str(tmp_path / "run")}
    names["SIZE"] = str(int(part * size))
    done = subprocess.run(
        [*unshare, "bash", "-c", SCRIPT, "script", *command(tmp_path / "disk" / "run")],
        cwd=ROOT,
        env=os.environ | haste.environment() | names,
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "first: exit 2" in done.stdout
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and re.search(r"cannot be written \(No space left", errors[0])
    assert "Traceback" not in done.stderr
    assert lasting(tmp_path / "run") == lasting(undisturbed)
