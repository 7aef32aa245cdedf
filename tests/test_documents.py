"""README and guides: short sentences, links that lead somewhere, commands that parse."""

import ast
import functools
import importlib.util
import itertools
import pathlib
import re
import subprocess
import tomllib

import pytest
import yaml
from support.doc_blocks import blocks, commands, documents
from support.paths import ROOT

import distflow_jax
from distflow_jax.config.algorithm_tables import ADVANTAGES, POLICY_LOSSES
from distflow_jax.config.key_reference import keys
from distflow_jax.dag.graph_yaml import built_in
from distflow_jax.rewards.registry import REWARDS
from distflow_jax.stages.registry import NAMED, OBJECTIVES, STAGES

MOST_WORDS = 25
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
DOCUMENTS = documents()
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
_FENCE = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)

spec = importlib.util.spec_from_file_location(
    "make_reference", ROOT / "scripts" / "docs" / "make_reference.py"
)
make_reference = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make_reference)


def prose(text):
    """The document without code, comments and images; inline code is one word."""
    text = re.sub(r"<!--.*?-->", "", _FENCE.sub("", text), flags=re.DOTALL)
    text = re.sub(r"^    .*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"``.+?``|`[^`]+`", "code", text)
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)


def sentences(text):
    """Sentences of paragraphs, list items and cells of tables."""
    pieces = []
    for part in re.split(r"\n\s*\n", prose(text)):
        lines = part.splitlines()
        if any(line.startswith("|") for line in lines):
            pieces += [cell for line in lines for cell in line.strip("|").split(" | ")]
        else:
            joined = "\n".join(line.strip() for line in lines)
            pieces += re.split(r"\n(?=(?:[-*#>]|\d+\.) )", joined)
    for piece in pieces:
        yield from re.split(r"(?<=[.!?])[*_)\"]*\s+", piece.replace("\n", " "))


def words(sentence):
    return [word for word in sentence.split() if re.search(r"\w", word)]


def groups():
    """Title -> pages and folders, as the site lists them."""
    tree = yaml.safe_load((ROOT / "docs" / ".nav.yml").read_text(encoding="utf-8"))["nav"]
    return {
        name: pages for group in tree if isinstance(group, dict) for name, pages in group.items()
    }


def guides():
    """README and the pages that the site lists under these titles."""
    listed = groups()
    titles = ("Start", "Coming from", "Guides", "Scale")
    names = ["index.md", *(page for title in titles for page in listed[title])]
    return [ROOT / "README.md", *(ROOT / "docs" / name for name in names)]


@pytest.mark.parametrize("path", guides(), ids=lambda path: path.name)
def test_sentences_are_short(path):
    text = path.read_text(encoding="utf-8")
    long = [s for s in sentences(text) if len(words(s)) > MOST_WORDS]
    assert not long, "\n".join(long)


# -- links ------------------------------------------------------------------------------------


def anchor(heading):
    """The anchor of a heading, as code hosts and mkdocs make it."""
    plain = re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", heading).strip().lower())
    return plain.replace(" ", "-")


@functools.cache
def anchors(path):
    text = _FENCE.sub("", path.read_text(encoding="utf-8"))
    return {anchor(found) for found in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMES)
def test_links_lead_somewhere(path):
    text = _FENCE.sub("", path.read_text(encoding="utf-8"))
    for link in re.findall(r"(?:\]\(|^\[\w+\]: )([^)\s]+)", text, re.MULTILINE):
        if "://" in link:
            continue
        name, _, place = link.partition("#")
        target = (path.parent / name) if name else path
        assert target.exists(), f"{path.name}: {link}"
        assert not place or place in anchors(target), f"{path.name}: {link}"


def listed_pages(entries):
    """Paths of a navigation's entries below docs/; a folder stands for all of its pages."""
    for entry in entries:
        if isinstance(entry, dict):
            for below in entry.values():
                yield from listed_pages(below if isinstance(below, list) else [below])
        elif entry.endswith(".md"):
            yield ROOT / "docs" / entry
        else:
            yield from (ROOT / "docs" / entry).rglob("*.md")


def test_the_site_lists_every_page_once():
    """mkdocs builds a page without an entry and does not report it, but nothing leads there."""
    listed = list(listed_pages(yaml.safe_load((ROOT / "docs/.nav.yml").read_text())["nav"]))
    assert sorted(listed) == sorted((ROOT / "docs").rglob("*.md"))


def test_the_readme_links_every_path_that_it_names():
    text = _FENCE.sub("", (ROOT / "README.md").read_text(encoding="utf-8"))
    bare = re.sub(r"!?\[[^\]]*\]\([^)]*\)|^\[\w+\]: .*$|https?://\S+", "", text, flags=re.MULTILINE)
    folders = "distflow_jax|scripts|configs|docs|notebooks|benchmarks|tests"
    assert not re.findall(rf"\b(?:{folders})/[\w./]+", bare)


# -- decisions --------------------------------------------------------------------------------

DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
MOST_DECISION_FILES, MOST_ENTRY_LINES = 35, 7


def entries(path):
    """Title -> text of the entries of a page of decisions."""
    parts = path.read_text(encoding="utf-8").split("\n## ")[1:]
    return {title: body.strip() for title, _, body in (part.partition("\n") for part in parts)}


def test_decisions_are_entries_of_few_pages():
    """The index has a line for each page, and each entry says why, in a few lines."""
    index = ROOT / "docs" / "decisions" / "README.md"
    lines = index.read_text(encoding="utf-8").splitlines()
    linked = [found[1] for line in lines if (found := re.match(r"- \[\w+\]\((\w+\.md)\): ", line))]
    assert sorted([*linked, index.name]) == [path.name for path in DECISIONS]
    assert len(DECISIONS) <= MOST_DECISION_FILES
    for path in DECISIONS:
        for title, body in entries(path).items() if path != index else ():
            assert "**Why:**" in body, f"{path.name}: {title}"
            assert body.count("\n") < MOST_ENTRY_LINES, f"{path.name}: {title}"


@pytest.mark.parametrize("path", DECISIONS, ids=lambda path: path.stem)
def test_decisions_name_what_exists(path):
    """Paths of the repository, or below the package, and keys of the config."""
    text = path.read_text(encoding="utf-8")
    for name in re.findall(r"(?<![\w/.-])[a-z_]+/[\w/]*\w\.(?:py|js|md|json)\b", text):
        assert any((folder / name).exists() for folder in (ROOT, ROOT / "distflow_jax")), name
    known = keys()
    sections = {name.split(".")[0] for name in known if "." in name}
    for name in re.findall(r"`([a-z]+(?:\.[a-z_]+)+)(?=[`=])", text):
        if name.split(".")[0] in sections:
            assert name in known, name


# -- commands ---------------------------------------------------------------------------------


def shown_commands():
    """(document, arguments) of every command that starts a script of ours."""
    for path in DOCUMENTS:
        for block in blocks(path):
            if block.language in ("", "bash"):
                for command in itertools.takewhile(bool, _parsed(block.text)):
                    ours = command[1:] and command[1].startswith("scripts/")
                    if ours and command[0] == "python" and "golden" not in command[1]:
                        yield str(path.relative_to(ROOT)), command[1:]


def _parsed(text):
    try:
        return commands(text)
    except ValueError:  # quotes that are no shell's: the block is no command
        return []


SHOWN = list(shown_commands())


def test_documents_show_commands():
    assert len(SHOWN) > 30


@functools.cache
def flags_of(script):
    name = pathlib.Path(script).with_suffix("").relative_to("scripts")
    command = "launch local" if str(name) == "launch_local" else " ".join(name.parts)
    return {flag.name for flag in make_reference.flags_of(command)} | {"flagfile"}


@pytest.mark.parametrize(
    "command",
    [command for _, command in SHOWN],
    ids=[f"{name}-{i}" for i, (name, _) in enumerate(SHOWN)],
)
def test_a_shown_command_parses(command):
    """Scripts, config files, flags and config keys exist; values have the keys' types."""
    script, known = None, keys()
    for before, argument in zip(["", *command], command, strict=False):
        if argument.startswith("scripts/"):
            assert (ROOT / argument).is_file(), argument
            script = argument
        elif before == "--":  # a subcommand, which a launcher starts
            script = f"scripts/{argument}.py"
            assert (ROOT / script).is_file(), argument
        if script is None or not argument.startswith("--") or argument == "--":
            continue
        name, equals, value = argument[2:].partition("=")
        if name == "config":
            path = ROOT / value.split(":")[0]
            shipped = path.with_name("configs") / f"{path.name}.py"
            assert path.is_file() or shipped.is_file() or "..." in value, argument
        elif name.startswith("config."):
            key = known.get(name.removeprefix("config."))
            assert key, f"unknown key {argument}"
            assert equals and fits(value, key), argument
        else:
            assert name.removeprefix("no") in flags_of(script) or name in flags_of(script), argument


def fits(value, key):
    """Whether the text of a flag fits a key's default; texts fit keys of texts."""
    if isinstance(key.default, str) or key.default is None:
        return True
    try:
        given = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return isinstance(key.default, tuple) or value in ("true", "false")
    kind = (int, float) if isinstance(key.default, float) else type(key.default)
    return isinstance(given, kind)


# -- tables that follow the code --------------------------------------------------------------


def first_cells(name, heading):
    """The code in the first column of the tables under a heading."""
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    section = re.split(r"^## ", text.split(f"## {heading}\n")[1], flags=re.MULTILINE)[0]
    rows = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_the_catalogue_has_the_fields_of_all_stages():
    kinds = [*STAGES.values(), *OBJECTIVES.values(), *NAMED.values()]
    fields = {
        f for kind in kinds for f in (kind.reads or frozenset()) | kind.writes | kind.may_write
    }
    fields |= {name for kind in ADVANTAGES.values() for name in kind.reads}
    assert fields <= first_cells("dag.md", "Fields")


def test_the_page_of_algorithms_names_all_parts():
    text = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)`", text))
    assert {*ADVANTAGES, *POLICY_LOSSES} <= named
    assert {*REWARDS} <= first_cells("rewards.md", "Built-in functions")


def test_the_map_of_the_architecture_has_every_folder():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    folders = {path.parent for path in (ROOT / "distflow_jax").rglob("*/__init__.py")}
    assert not [f.name for f in folders if not re.search(rf"\b{f.name}/", text)]


def test_the_architecture_names_modules_that_exist():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    folders = ("distflow_jax", "tests", "scripts", "configs", "benchmarks")
    places = [f"/{path.relative_to(ROOT)}" for f in folders for path in (ROOT / f).rglob("*.py")]
    named = set(re.findall(r"(?<![\w/.-])[a-z_]+(?:/\w+)*\.py\b", text))
    assert not [name for name in named if not any(p.endswith(f"/{name}") for p in places)]


def test_the_readme_links_every_built_in_graph():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert not [name for name in built_in() if f"configs/dags/{name}.yaml" not in text]


def test_the_changelog_describes_the_version():
    """Its first section gathers what comes next; the second is the version of the package."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    first, second, *_ = re.findall(r"^## (.*)$", text, re.MULTILINE)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert first == "Unreleased"
    assert second == f"{distflow_jax.__version__} ({citation['date-released']})"


def test_the_repository_has_one_address():
    """`Homepage` in pyproject.toml; CITATION.cff, guides, README and notebooks repeat it."""
    pages = {"README.md", "CITATION.cff", *(f"notebooks/{path.name}" for path in NOTEBOOKS)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    address = project["urls"]["Homepage"].removeprefix("https://github.com/")
    name = address.split("/")[1]
    for page in pages:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert set(re.findall(rf"github(?:\.com)?/([\w-]+/{name})\b", text)) == {address}, page
    found = subprocess.run(
        ["git", "grep", "-l", "-F", address], cwd=ROOT, capture_output=True, text=True, check=True
    )
    guides = {name for name in found.stdout.split() if re.match(r"docs/\w+\.md|mkdocs\.yml", name)}
    assert set(found.stdout.split()) == pages | guides | {"pyproject.toml"}


def test_durations_agree():
    """README, the config and the quickstart state one duration of `make train`."""
    places = ("README.md", "docs/quickstart.md", "configs/grpo_smollm2.py")
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in places]
    assert all(re.search(r"about 10 minutes on 2 cores", " ".join(t.split())) for t in texts)
    measured = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert re.search(
        r"`make train` from a fresh clone .{0,60} took 10 min", " ".join(measured.split())
    )
