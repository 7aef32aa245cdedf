"""The rules of the house: where modules stand, what they may import, how large they may be.

docs/architecture.md explains the rooms, docs/glossary.md the words. Nothing here imports jax. What
breaks a rule today stands in tests/house_exceptions.json with its reason; that list may only
shrink. Rooms have budgets of lines: one rises only with a change that says why, and what left for
it. `python tests/test_house.py` prints what the file would have to hold.
"""

import ast
import collections
import functools
import json
import pathlib
import re
import sys

import pytest
from support import house_measures

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "distflow_jax"
EXCEPTIONS = json.loads((ROOT / "tests" / "house_exceptions.json").read_text())

ROOT_MODULES = {"run", "notebook", "batch", "layout", "user_functions", "did_you_mean"}
# From the top. A room imports from the floors below its own, never from its neighbours.
FLOORS = [
    {"notebook", "commands"},
    {"service"},
    {"run", "pods"},
    {"runtime"},
    {"planning"},
    {"stream"},
    {"stages"},
    {"checkpoint", "serving", "coordinator", "environments"},
    {"training", "rollout", "observe"},
    {"models", "resharding", "watchdog", "report"},
    {"algorithms", "parallel", "cluster", "data", "dag", "rewards"},
    {"programs", "sandbox"},
    {"batch"},
    {"images"},
    {"config"},
    {"user_functions"},
    {"did_you_mean", "layout", "parsing"},
]
# Within a room: folders, and "." for the modules that stand in the room itself.
INNER_FLOORS = {
    "models": [
        {"weights"},
        {"families"},
        {"."},
        {"vision"},
        {"block_attention"},
        {"kernels", "chat"},
        {"attention"},
        {"remat"},
    ],
    "report": [
        {"live"},
        {"."},
        {"page"},
        {"sections"},
        {"headline", "chart_choice"},
        {"progress"},
        {"cells"},
        {"read_run", "charts", "page_style", "metric_reference", "terminal"},
        {"plan_picture", "trackers"},
        {"drawing", "json_lines", "log_lines"},
    ],
    "training": [{"objectives"}, {"."}],
    "stream": [
        {"ahead"},
        {"driver"},
        {"links", "batches"},
        {"host_thread", "node_runner"},
        {"frames"},
        {"."},
        {"wire"},
    ],
    "runtime": [{"samplers"}, {"."}],
    "rollout": [
        {"foreign"},
        {"sampler"},
        {"scheduling"},
        {"engine"},
        {"prefill"},
        {"sampler_program", "cache_sizing", "sampler_trial"},
        {"decode_state", "response_checks"},
        {"kv_cache", "requests", "engine_interface"},
        {"occupancy", "engine_stand_ins", "jetstream_install"},
    ],
}
OWNERS = {  # which rooms may import a package
    "ml_collections": {"config", "commands"},
    "jetstream": {"rollout", "serving"},
    "orbax": {"checkpoint"},
    "tensorboardX": {"report"},
    "wandb": {"report"},
    "mlflow": {"report"},
    "trackio": {"report"},
    "grain": {"data"},
    "PIL": {"images"},
    "difflib": {"did_you_mean"},
}
FORBIDDEN = {"torch", "ray", "vllm", "tensorflow"}
SAME_NAME = {"registry", "__init__"}  # the only stems that occur in several rooms
MOST_COLLABORATORS = 12  # of a class
MOST_CONDITIONS = 3  # on a mode of streaming, of a module
SLACK = 50  # lines by which a room's budget is above its lines at most
MOST_FUNCTION_LINES, MOST_PARAMETERS = 80, 8
README_LINES = 120
PRONOUNS = {"What", "Who", "Whose", "That", "Those"}
ARRAY = re.compile(r"\b(jax\.Array|np\.ndarray)\b")
SHAPE = re.compile(r"\[[\w.* +x/,-]+\]|\bscalars?\b|\bany shape\b|\bshaped\b")
SUFFIX = re.compile(r"_[A-Z]{1,6}$")


def files() -> list[pathlib.Path]:
    """All modules of the package."""
    return sorted(PACKAGE.rglob("*.py"))


@functools.cache
def tree(path: pathlib.Path) -> ast.Module:
    """The syntax tree of a module."""
    return house_measures.parsed(path.read_text())


def name(path: pathlib.Path) -> str:
    """A path as the rules print it."""
    return str(path.relative_to(ROOT))


def imports(path: pathlib.Path) -> set[str]:
    """Dotted names that a module imports: modules, and names of modules."""
    found = set()
    for node in house_measures.nodes(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def module_of(dotted: str) -> tuple[str, ...] | None:
    """The path below the package of the module that holds `dotted`; None for other packages."""
    first, *parts = dotted.split(".")
    if first != "distflow_jax":
        return None
    while parts and not (PACKAGE.joinpath(*parts).with_suffix(".py")).exists():
        parts = parts[:-1]
    return tuple(parts)


def definitions(path: pathlib.Path, kind: type | tuple[type, ...]) -> list[ast.AST]:
    """All definitions of a kind in a module."""
    return [node for node in house_measures.nodes(tree(path)) if isinstance(node, kind)]


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def lines_of(node: ast.AST) -> int:
    """Lines of a definition."""
    return node.end_lineno - node.lineno + 1


def root_modules() -> set[str]:
    """Modules in the root that do not belong there."""
    return {path.stem for path in PACKAGE.glob("*.py")} - ROOT_MODULES - {"__init__"}


def twins() -> set[str]:
    """Names of modules that several rooms have, and names of tests that occur twice.

    pytest imports a test by its name alone: of two with one name the second is not collected.
    """
    places = {(path.relative_to(PACKAGE).parts[0], path.stem) for path in files()}
    stems = collections.Counter(stem for _, stem in places)
    stems.update(path.stem for path in (ROOT / "tests").rglob("test_*.py"))
    return {stem for stem, count in stems.items() if count > 1} - SAME_NAME


def class_twins() -> int:
    """Class names that several modules define."""
    places = collections.Counter(
        found for path in files() for found in {it.name for it in definitions(path, ast.ClassDef)}
    )
    return sum(count > 1 for count in places.values())


def floor(room: str, floors: list[set[str]]) -> int | None:
    """Number of a room's floor, 0 on top; None for a room that no floor has."""
    return next((i for i, rooms in enumerate(floors) if room in rooms), None)


def inner_room(parts: tuple[str, ...], floors: list[set[str]]) -> str:
    """The room within a room that a module stands in."""
    return parts[1] if floor(parts[1], floors) is not None else "."


def arrows_up() -> set[str]:
    """Imports that do not go down."""
    found = set()
    for path in files():
        own = path.relative_to(PACKAGE).with_suffix("").parts
        if own[-1] == "__init__":
            continue
        for dotted in imports(path):
            other = module_of(dotted)
            if not other:
                continue
            floors = FLOORS
            mine, theirs = own[0], other[0]
            if mine == theirs:
                floors = INNER_FLOORS.get(mine)
                if floors is None or len(own) < 2 or len(other) < 2:
                    continue
                mine, theirs = inner_room(own, floors), inner_room(other, floors)
                if mine == theirs:
                    continue
            a, b = floor(mine, floors), floor(theirs, floors)
            if a is None or b is None or a >= b:
                found.add(f"{'.'.join(own)} -> {'.'.join(other)}")
    return found


def foreign_imports() -> set[str]:
    """Imports of packages that belong to another room, or to nobody here."""
    found = set()
    for path in files():
        room = path.relative_to(PACKAGE).with_suffix("").parts[0]
        for package in {dotted.split(".")[0] for dotted in imports(path)}:
            if package in FORBIDDEN or room not in OWNERS.get(package, {room}):
                found.add(f"{name(path)} imports {package}")
    return found


def hidden_imports() -> set[str]:
    """Imports inside functions."""
    return {
        f"{name(path)}:{node.name}"
        for path in files()
        for node in definitions(path, FUNCTIONS)
        if any(isinstance(inner, ast.Import | ast.ImportFrom) for inner in ast.walk(node))
    }


def parameters(node: ast.AST) -> list[ast.arg]:
    """Parameters of a function, without self and cls."""
    arguments = node.args
    found = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [argument for argument in found if argument.arg not in ("self", "cls")]


def large_functions() -> set[str]:
    """Functions with too many lines or parameters; kernels take a reference for each operand."""
    return {
        f"{name(path)}:{node.name}"
        for path in files()
        if "kernels" not in path.parts
        for node in definitions(path, FUNCTIONS)
        if lines_of(node) > MOST_FUNCTION_LINES or len(parameters(node)) > MOST_PARAMETERS
    }


def shapeless() -> set[str]:
    """Public functions with array parameters whose shapes nobody learns."""
    found = set()
    for path in files():
        for node in definitions(path, FUNCTIONS):
            if node.name.startswith("_"):
                continue
            arrays = [
                argument.arg
                for argument in parameters(node)
                if argument.annotation and ARRAY.search(ast.unparse(argument.annotation))
            ]
            plain = [argument for argument in arrays if not SUFFIX.search(argument)]
            documented = ast.get_docstring(node)
            if plain and documented is not None and not SHAPE.search(documented):
                found.add(f"{name(path)}:{node.name}")
    return found


def is_property(node: ast.AST) -> bool:
    """Whether a function is a property, or one of several signatures."""
    names = {ast.unparse(one).split(".")[-1] for one in node.decorator_list}
    return bool(names & {"property", "cached_property", "overload", "setter"})


def undocumented() -> set[str]:
    """Public functions and methods without a docstring that need one: more than a property, or a
    line that returns."""
    found = set()
    for path in files():
        public = [
            node for node in tree(path).body if not getattr(node, "name", "_").startswith("_")
        ]
        for node in public:
            for one in (node, *(node.body if isinstance(node, ast.ClassDef) else ())):
                if not isinstance(one, FUNCTIONS) or one.name.startswith("_"):
                    continue
                short = len(one.body) == 1 and isinstance(one.body[0], ast.Return)
                if not (short or is_property(one) or ast.get_docstring(one)):
                    found.add(f"{name(path)}:{one.name}")
    return found


def broad_excepts() -> int:
    """Handlers of every error."""
    return sum(
        handler.type is None or getattr(handler.type, "id", "") in ("Exception", "BaseException")
        for path in files()
        for handler in definitions(path, ast.ExceptHandler)
    )


def pronoun_docstrings() -> int:
    """Docstrings that begin with a pronoun in place of a noun or verb."""
    documented = (ast.Module, ast.ClassDef, *FUNCTIONS)
    return sum(
        (ast.get_docstring(node) or "").split(maxsplit=1)[:1] in [[word] for word in PRONOUNS]
        for path in files()
        for node in definitions(path, documented)
    )


def readme_lines() -> int:
    """Lines of the README beyond those it may have."""
    return max(0, len((ROOT / "README.md").read_text().splitlines()) - README_LINES)


def banned_words() -> dict[str, str]:
    """{word: what to say instead} of the glossary's column "not", where it stands in backticks."""
    path = ROOT / "docs" / "glossary.md"
    rows = [line.split("|") for line in path.read_text().splitlines() if line.startswith("| ")]
    return {
        word: row[1].strip()
        for row in rows
        if len(row) > 4
        for word in re.findall(r"`(.+?)`", row[3])
    }


def texts() -> list[pathlib.Path]:
    """Files that people read: code, configs, scripts and documents."""
    kinds = {"distflow_jax": "py", "scripts": "py", "configs": "py", "docs": "md"}
    found = [p for folder, end in kinds.items() for p in (ROOT / folder).rglob(f"*.{end}")]
    return sorted([*found, ROOT / "README.md"])


def glossary_breaches() -> set[str]:
    """Uses of a word that the glossary replaces."""
    found = set()
    words = {word: re.compile(rf"(?<![\w.]){word}(?!\w)") for word in banned_words()}
    for path in texts():
        if path.name == "glossary.md":
            continue
        text = path.read_text()
        found |= {f"{name(path)}: {word}" for word, form in words.items() if form.search(text)}
    return found


def dead_paths() -> set[str]:
    """Paths of this repository that a document names and nothing has."""
    form = re.compile(
        r"(?<![\w./-])((?:distflow_jax|scripts|configs|tests|benchmarks|docs|notebooks|third_party)"
        r"/[\w./*-]*\w(?:\.\w+)?/?)"
    )
    found = set()
    for path in [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), *files()]:
        for named in form.findall(path.read_text()):
            stem = named.split("/")[-1].split(".")[0]
            if "X" in stem or stem.isupper() or (ROOT / named).exists():
                continue
            if not list(ROOT.glob(named)):
                found.add(f"{name(path)}: {named}")
    return found


def dead_modules() -> set[str]:
    """Modules that a docstring, comment or message of the package names and that do not exist."""
    examples = {"file.py", "rewards.py"}  # a user's
    known = {path.name for path in ROOT.glob("*/**/*.py") if ".venv" not in path.parts} | examples
    return {
        f"{name(path)}: {named}"
        for path in files()
        for named in re.findall(r"[\w/]+\.py\b", path.read_text())
        if named.split("/")[-1] not in known
    }


RULES = {
    "root modules": root_modules,
    "names of modules that several rooms have": twins,
    "imports that do not go down": arrows_up,
    "packages of other rooms": foreign_imports,
    "imports inside functions": hidden_imports,
    "large functions": large_functions,
    "functions without shapes": shapeless,
    "functions without a docstring": undocumented,
    "words that the glossary replaces": glossary_breaches,
    "paths that do not exist": dead_paths,
    "modules that do not exist": dead_modules,
}
COUNTS = {
    "broad excepts": broad_excepts,
    "docstrings that begin with a pronoun": pronoun_docstrings,
    "lines of the README above 120": readme_lines,
    "class names of several modules": class_twins,
    "calls that unpack a tuple that stands there": lambda: house_measures.packed_calls(sources()),
}


@functools.cache
def sources() -> dict[str, str]:
    """{path from the package's root: text} of all modules."""
    return {str(path.relative_to(PACKAGE)): path.read_text() for path in files()}


# {measure: (its numbers by place, most of a place that the file does not name)}
NUMBERS = {
    "collaborators": (house_measures.collaborators, MOST_COLLABORATORS),
    "conditions on a mode": (house_measures.mode_conditions, MOST_CONDITIONS),
}
SUMMED = {"conditions on a mode"}


def numbers(measure: str) -> dict[str, int]:
    """The numbers of a measure that are above its limit, by place, and the sum where it counts."""
    find, most = NUMBERS[measure]
    found = find(sources())
    above = {place: count for place, count in sorted(found.items()) if count > most}
    return above | ({"sum": sum(found.values())} if measure in SUMMED else {})


@pytest.mark.parametrize("rule", RULES)
def test_rule(rule):
    found, allowed = RULES[rule](), set(EXCEPTIONS["rules"].get(rule, {}))
    assert not found - allowed, f"new: {sorted(found - allowed)}"
    assert not allowed - found, f"mended, take them off the list: {sorted(allowed - found)}"


@pytest.mark.parametrize("rule", COUNTS)
def test_count_only_falls(rule):
    count, allowed = COUNTS[rule](), EXCEPTIONS["counts"].get(rule, 0)
    assert count <= allowed, f"{count}, {allowed} are allowed"
    assert count == allowed, f"lower the number in tests/house_exceptions.json to {count}"


@pytest.mark.parametrize("measure", NUMBERS)
def test_numbers_only_fall(measure):
    found, allowed = numbers(measure), EXCEPTIONS["numbers"][measure]
    above = {place: n for place, n in found.items() if n > allowed.get(place, 0)}
    assert not above, f"above {NUMBERS[measure][1]}, or what tests/house_exceptions.json allows"
    assert found == allowed, "lower the numbers in tests/house_exceptions.json"


def folder_lines() -> dict[str, int]:
    """Lines of the modules of folders beside the package that have a budget."""
    return {
        folder: sum(len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py"))
        for folder in EXCEPTIONS["folders"]
    }


@pytest.mark.parametrize("kind", ["lines", "folders"])
def test_rooms_keep_their_budgets_of_lines(kind):
    budgets = EXCEPTIONS[kind]
    found = house_measures.lines_by_room(sources()) if kind == "lines" else folder_lines()
    assert found.keys() == budgets.keys()
    above = {room: n for room, n in found.items() if n > budgets[room]["most"]}
    assert not above, "say what leaves for it, or raise a budget and say why and what has left"
    low = {room: n for room, n in found.items() if n <= budgets[room]["most"] - SLACK}
    assert not low, "lower the budgets in tests/house_exceptions.json"
    assert all(budget["why"] for budget in budgets.values())


def test_every_exception_has_a_reason():
    assert all(reason for rule in EXCEPTIONS["rules"].values() for reason in rule.values())


def test_rooms_stand_on_few_floors():
    """The longest chain of rooms that import each other has at most 12."""
    below = collections.defaultdict(set)
    for path in files():
        own = path.relative_to(PACKAGE).with_suffix("").parts
        for dotted in imports(path):
            other = module_of(dotted)
            if other and own[-1] != "__init__" and other[0] != own[0]:
                below[own[0]].add(other[0])

    @functools.cache
    def height(room: str) -> int:
        return 1 + max(map(height, sorted(below[room])), default=0)

    assert max(map(height, sorted(below))) <= 12


def test_users_of_the_package_need_no_other_framework():
    for folder in ("scripts", "configs"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            # kept scripts that make golden numbers run beside torch, in an environment of their own
            if "golden" in path.relative_to(ROOT).parts:
                continue
            found = {dotted.split(".")[0] for dotted in imports(path)} & FORBIDDEN
            assert not found, f"{path} imports {found}"


def test_only_processes_joins_a_job():
    users = {p for p in files() if "jax.distributed" in p.read_text() and p.name != "processes.py"}
    assert not users


def main() -> None:
    """Prints the exceptions that today's code needs; known reasons are kept."""
    known = EXCEPTIONS["rules"]
    rules = {
        rule: {found: known.get(rule, {}).get(found, "") for found in sorted(find())}
        for rule, find in RULES.items()
    }
    counts = {rule: count() for rule, count in COUNTS.items()}
    lines = {
        room: {
            "most": -(-n // SLACK) * SLACK,
            "why": EXCEPTIONS["lines"].get(room, {}).get("why", ""),
        }
        for room, n in sorted(house_measures.lines_by_room(sources()).items())
    }
    found = {"rules": rules, "counts": counts, "lines": lines, "folders": EXCEPTIONS["folders"]}
    found["numbers"] = {measure: numbers(measure) for measure in NUMBERS}
    json.dump(found, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
