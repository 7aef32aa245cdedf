"""Code blocks of the documents: files that a reader writes, and commands that a reader types."""

import dataclasses
import pathlib
import re
import shlex

from support.paths import ROOT

_FENCE = re.compile(r"^```(\w*)([^\n`]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_HEADING = re.compile(r"^#{1,6} (.*)$", re.MULTILINE)
_TITLE = re.compile(r'title="([^"]*)"')


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block: its language, its title (a file's name) and the heading above it."""

    path: pathlib.Path
    heading: str
    language: str
    title: str
    text: str


def blocks(path: pathlib.Path) -> list[Block]:
    """All blocks of a document, in order."""
    text = path.read_text(encoding="utf-8")
    bare = _FENCE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)  # "# " in code is none
    headings = [(found.start(), found[1]) for found in _HEADING.finditer(bare)]
    found = []
    for match in _FENCE.finditer(text):
        above = [heading for start, heading in headings if start < match.start()]
        title = _TITLE.search(match[2])
        heading = above[-1] if above else ""
        found.append(Block(path, heading, match[1], title[1] if title else "", match[3]))
    return found


def documents() -> list[pathlib.Path]:
    """README and the guides: what a reader follows. Decisions and measurements are no guides."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(text: str) -> list[list[str]]:
    """The commands of a shell block, as arguments; comments are left out."""
    joined = re.sub(r"\\\n\s*", " ", text)
    lines = [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]
    return [shlex.split(line) for line in lines]
