"""A newcomer's first hour: README's commands in a fresh clone, and the site.

Nightly: README's commands, in a fresh clone and to the letter, do what it says; `make train` learns
to add.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
from support.doc_blocks import blocks
from support.paths import ROOT
from support.run_folders import json_lines

README = ROOT / "README.md"
HOURS = 3600


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_commands_of_the_readme_do_what_it_says(tmp_path):
    """All shell blocks, as one script, then its graph and its Python: nothing is replaced.

    git finds this checkout at the repository's address.
    """
    clone, shown = tmp_path / "distflow_jax", blocks(README)
    script = "set -e\n" + "".join(block.text for block in shown if block.language == "bash")
    script += "".join(
        f"cat > {block.title} <<'END'\n{block.text}END\n" for block in shown if block.title
    )
    script += "".join(
        f"python - <<'END'\n{block.text}END\n" for block in shown if block.language == "python"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_", "PYTHON"))}
    address = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Homepage"]
    env |= {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": f"url.{ROOT}.insteadOf"}
    env["GIT_CONFIG_VALUE_0"] = address
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=env | {"JAX_PLATFORMS": "cpu", "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=2 * HOURS,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run = clone / "runs/grpo_smollm2"
    rows = json_lines(run / "metrics.jsonl")
    ((name, before),) = [(k, v) for k, v in rows[0].items() if k.startswith("val-core/")]
    assert before < 0.2 and rows[-1]["step"] == 20 and rows[-1][name] > 0.5
    assert (run / "report.html").is_file() and (clone / "exports/tiny/config.json").is_file()
    assert (clone / "runs/notebook/metrics.jsonl").read_text().count("\n") >= 5
    status = subprocess.run(["git", "status", "--porcelain"], cwd=clone, capture_output=True)
    assert status.stdout.decode().split() in ([], ["??", "exports/", "??", "my_grpo.yaml"])


# -- the site ---------------------------------------------------------------------------------


def mkdocs():
    """The program that builds the site; None where it is not installed."""
    ours = ROOT / ".venv-docs" / "bin" / "mkdocs"
    return str(ours) if ours.exists() else shutil.which(os.environ.get("MKDOCS", "mkdocs"))


def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path):
    program = mkdocs()
    if program is None:
        pytest.skip("mkdocs is not installed: `make docs` installs it and builds the site")
    command = [program, "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr.strip(), done.stderr
    loaded = re.compile(
        r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^>]*"
    )
    for page in tmp_path.rglob("*.html"):
        found = loaded.findall(page.read_text(encoding="utf-8"))
        assert not found, (page, found)
    for name in ("index", "tutorial", "tasks", "reference/config", "reference/api"):
        assert (tmp_path / f"{name}.html").is_file()
    assert "train" in pathlib.Path(tmp_path / "reference/api.html").read_text(encoding="utf-8")
