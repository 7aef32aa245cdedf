"""Imports go down only, siblings do not import each other (docs/architecture.md)."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "distflow_jax"
# From the top: the wiring, then what is built on what. Names in one set are siblings.
LAYERS = [
    {
        "run",
        "run_files",
        "supervision",
        "setup",
        "states",
        "tracing",
        "machinery",
        "step_times",
        "utilization",
        "program_table",
        "memory_plan",
        "memory_advice",
        "pods",
        "offload",
        "settings",
        "inference",
        "trained_weights",
        "config",
        "machine",
        "mesh_sizes",
        "sizes",
        "sizes_table",
        "command_line",
        "config_dict",
        "notebook",
    },
    {"dag"},
    {"stages"},
    {"training", "rollout", "rewards", "coordinator", "checkpoint"},
    {"models"},
    {"algorithms", "parallel", "programs"},
    {"batch", "observe", "types", "plugins", "hints"},
]
# who may know what
OWNERS = {
    "ml_collections": {"config_dict"},
    "jetstream": {"rollout"},
    "orbax": {"checkpoint"},
    "tensorboardX": {"observe"},
    "grain": {"coordinator"},
}
FORBIDDEN = {"torch", "ray", "vllm", "tensorflow"}
FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imports(path: pathlib.Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def depth(part: str) -> int:
    return next(i for i, names in enumerate(LAYERS) if part in names)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down(path):
    part = path.relative_to(PACKAGE).with_suffix("").parts[0]
    if part == "__init__":
        return
    for module in imports(path):
        top = module.split(".")[0]
        assert top not in FORBIDDEN, f"{path} imports {module}"
        assert part in OWNERS.get(top, {part}), f"{path} imports {module}"
        other = part_of(module) if top == "distflow_jax" else part
        if not other or other == part:
            continue
        same_wiring = depth(part) == depth(other) == 0
        bottom = depth(other) == len(LAYERS) - 1 and other in ("types", "batch", "plugins")
        assert depth(other) > depth(part) or same_wiring or bottom, f"{path} imports {module}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_import_hides_in_a_function(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = [n for n in ast.walk(node) if isinstance(n, ast.Import | ast.ImportFrom)]
            assert not inner, f"{path}:{inner[0].lineno} imports inside {node.name}"


def test_users_of_the_package_need_no_other_framework():
    for folder in ("scripts", "configs"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            # kept scripts that make golden numbers run beside torch, in an environment of their own
            if "golden" in path.relative_to(ROOT).parts:
                continue
            found = {module.split(".")[0] for module in imports(path)} & FORBIDDEN
            assert not found, f"{path} imports {found}"


def test_only_processes_joins_a_job():
    users = {p for p in FILES if "jax.distributed" in p.read_text() and p.name != "processes.py"}
    assert not users
