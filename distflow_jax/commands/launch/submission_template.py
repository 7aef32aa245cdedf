"""Text that a launcher submits: a Jinja template with the launcher's values.

Each cluster has a template in the folder templates/; --template=FILE takes another one, and
--print_template shows the cluster's own to begin with. A template sees `flags`, all flags of the
launcher by their names, and the values that its first lines name.
"""

import argparse
import json
import pathlib
import shlex
from typing import Any

import jinja2

from distflow_jax.parsing.paths import checked_path

_FOLDER = pathlib.Path(__file__).parent / "templates"


class _Print(argparse.Action):
    """Prints the template of a cluster and ends the process, as --help does."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print((_FOLDER / str(self.const)).read_text(), end="")
        parser.exit()


def add_flags(parser: argparse.ArgumentParser, name: str) -> None:
    """Adds the flags of templates; `name`: of the cluster's own."""
    parser.add_argument("--template", default="", metavar="FILE", help="your own template")
    parser.add_argument(
        "--print_template", action=_Print, nargs=0, const=name, help="print the template and exit"
    )


def render(name: str, options: argparse.Namespace, **values: Any) -> str:
    """The text of the template `name`, or of --template.

    Filters: `json` (a YAML scalar, list or map too) and `sh` (a word of a shell). Raises ValueError
    or FileNotFoundError for a template of the user that cannot be read or filled in.
    """
    path = _FOLDER / name
    if options.template:
        path = checked_path("file", "--template", options.template)
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["json"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.filters["sh"] = lambda value: shlex.quote(str(value))
    try:
        return environment.from_string(path.read_text(encoding="utf-8")).render(
            flags=vars(options), **values
        )
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"--template={path}, line {error.lineno}: {error.message}") from error
    except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"--template={path}: {error}") from error
