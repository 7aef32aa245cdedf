"""Parsing of flags, and user errors as one line with exit code 2."""

import ast
import contextlib
import errno
import functools
import itertools
import pathlib
import re
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence

from absl import app, flags, logging
from ml_collections import config_flags

from distflow_jax.config import key_reference
from distflow_jax.config.config_dict import FLAG_ERRORS, explain_flag_error
from distflow_jax.config.unknown_keys import key_hint
from distflow_jax.config.user_error import NAME_ERRORS, user_error
from distflow_jax.did_you_mean import suggestion
from distflow_jax.parsing.json_text import json_problem, read_text
from distflow_jax.parsing.paths import named_path
from distflow_jax.report import log_lines
from distflow_jax.user_functions import MOST_SOURCE, errors_of_file, source_file

_CONFIG_FILE = "config file"
_NEAR_FLAG = 0.75  # similarity above which a flag of that name is meant, and no key
_HELP_FLAGS = ("help", "helpshort", "helpfull", "helpxml", "?")
MOST_FLAG_FILES = 16  # that name one another


def run_main(
    main: Callable[[list[str]], int | None],
    argv: Sequence[str] | None = None,
    *,
    takes_arguments: bool = False,
) -> None:
    """Parses the flags of `argv`, calls `main([program, ...])` and exits with its result.

    `argv` begins with the program; None: sys.argv.

    The config's flag must be named "config", without a default: config_flags.DEFINE_config_file
    would load a default while it is defined, where its errors cannot be explained. Use
    flags.mark_flag_as_required instead.

    User errors (a ValueError raised by this package or by the user's code, a missing or forbidden
    file) are printed as one line "error: ..." with exit code 2; --debug shows their traceback. All
    other errors show theirs always. Arguments that are not flags are user errors, unless
    `takes_arguments`: main gets them after the program's name.
    """
    argv = list(sys.argv if argv is None else argv)
    flags.DEFINE_boolean("debug", False, "Show tracebacks.", module_name=argv[0])
    parse = functools.partial(parse_flags, takes_arguments=takes_arguments)
    app.run(functools.partial(_call, main), argv=argv, flags_parser=parse)


def define_config(
    meaning: str, values: flags.FlagValues, argv: Sequence[str] | None = None
) -> None:
    """Defines the flag --config among `values`, and with it --config.KEY=VALUE.

    `argv` is what they parse; None: sys.argv.
    """
    given = None if argv is None else list(argv)
    config_flags.DEFINE_config_file("config", None, meaning, values, sys_argv=given)


def config_name() -> str:
    """The name of the file of --config, without its folder and argument, once flags are parsed."""
    file = config_flags.get_config_filename(flags.FLAGS["config"])
    return pathlib.Path(file.partition(":")[0]).stem


def chosen_keys(values: flags.FlagValues) -> set[str]:
    """The keys that --config.KEY=VALUE gave, once the flags are parsed."""
    return set(config_flags.get_override_values(values["config"]))


def _check_overrides(argv: Sequence[str], chosen: Collection[str]) -> None:
    """Raises flags.Error where parsing loses a part of what --config.KEY=VALUE says.

    A whole section would replace values of the config file by defaults, and of a key that stands
    twice in a dict the first value would be dropped.
    """
    known = key_reference.keys()
    for key in chosen:
        below = [name for name in known if name.startswith(f"{key}.")]
        if key not in known and below:
            raise flags.Error(
                f"config.{key} is a section of the config: set its keys, such as "
                f"--config.{below[0]}=VALUE"
            )
    for argument in argv:
        name, _, value = argument.partition("=")
        if name.lstrip("-").startswith("config.") and (twice := _key_given_twice(value)):
            raise flags.Error(f"{name.lstrip('-')}: key {twice!r} is given twice in {value}")


def _key_given_twice(text: str) -> str | None:
    """The first key that a dict in a Python literal has twice; None without one."""
    if "{" not in text:
        return None
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes: parsing the value warns too
            tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # text, or no literal
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            keys = [str(key.value) for key in node.keys if isinstance(key, ast.Constant)]
            twice = [key for i, key in enumerate(keys) if key in keys[:i]]
            if twice:
                return twice[0]
    return None


class WrongFlag(ValueError):
    """One line on a flag that cannot be parsed."""


def parse_flags(argv: list[str], *, takes_arguments: bool = False) -> list[str]:
    """Parses the process's flags; a wrong one ends the program with one line and exit code 2."""
    try:
        return read_flags(argv, flags.FLAGS, takes_arguments=takes_arguments)
    except SystemExit:
        # absl exits with 1 after --help, which a caller would take for a failure
        names = [argument.lstrip("-").split("=")[0] for argument in argv[1:]]
        if set(names) & set(_HELP_FLAGS):
            sys.exit(0)
        raise
    except WrongFlag as error:
        if "--debug" in argv:
            raise
        sys.exit(user_error(str(error)))


def read_flags(
    argv: list[str], values: flags.FlagValues, *, takes_arguments: bool = False
) -> list[str]:
    """Parses `argv` into `values`; returns the program and the arguments that are no flags.

    Raises WrongFlag.
    """
    try:
        if path := (_config_source(argv) or "").partition(":")[0]:
            source_file(_CONFIG_FILE, path)
        with errors_of_file(path or None, _CONFIG_FILE), _only_errors():
            rest = values(argv)
        if "config" in values:
            # raises here if the config file could not be loaded
            getattr(values["config"].value, "lock", None)
            _check_overrides(argv, chosen_keys(values))
        if rest[1:] and not takes_arguments:
            raise flags.Error(f"unexpected argument {rest[1]!r}: flags are written --name=value")
    except (OSError, *FLAG_ERRORS) as error:
        message = _explain(error, argv, values)
        if message is None:
            raise
        raise WrongFlag(message) from error
    return rest


def with_flag_files(arguments: Sequence[str], depth: int = 0) -> list[str]:
    """The arguments, with the lines of each --flagfile=FILE in its place.

    ValueError or FileNotFoundError for a file that cannot be read, or that names itself.
    """
    found, words = [], iter(arguments)
    for word in words:
        name, equals, file = word.partition("=")
        if name not in ("--flagfile", "-flagfile"):
            found += [word, *words] if word == "--" else [word]
            continue
        file = file if equals else next(words, "")
        if depth >= MOST_FLAG_FILES:
            raise ValueError(f"--flagfile={file}: more than {depth} nested flag files")
        lines = read_text(named_path("--flagfile", file), MOST_SOURCE, "--flagfile").splitlines()
        kept = [x.strip() for x in lines if x.strip() and not x.startswith(("#", "//"))]
        found += with_flag_files(kept, depth + 1)
    return found


@contextlib.contextmanager
def _only_errors() -> Iterator[None]:
    """A block in which absl and ml_collections log errors only: the message here says the same."""
    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _config_source(argv: Sequence[str]) -> str | None:
    """FILE[:ARGUMENT] of the last --config; None without one."""
    given = [arg.split("=", 1)[1] for arg in argv if arg.lstrip("-").startswith("config=")]
    given += [b for a, b in itertools.pairwise(argv) if a in ("--config", "-config")]
    return given[-1] if given else None


def _unknown_flag(name: str, values: flags.FlagValues) -> str:
    """One line on a flag that does not exist: the nearest flag, or the key that is meant."""
    known = [flag for flag in values if flag not in _HELP_FLAGS]
    near = suggestion(name, known, "--{}".format, cutoff=_NEAR_FLAG)
    if not near and "config" in known:
        near = key_hint(name, key_reference.keys())
        near = near.replace("config.", "--config.") or "keys of the config are --config.KEY=VALUE"
    return f"unknown flag --{name} ({near or '--help lists the flags'})"


def _explain(error: Exception, argv: list[str], values: flags.FlagValues) -> str | None:
    if isinstance(error, flags.UnrecognizedFlagError):
        return _unknown_flag(error.flagname, values)
    if required := re.search(r"Flag --(\w+) must have a value other than None", str(error)):
        if required[1] == "config" and (named := _config_source(argv)):
            return f"config file {named!r}: get_config() returned None: let it return the config"
        return f"--{required[1]} is missing: give --{required[1]}=VALUE"
    if str(error).startswith(_CONFIG_FILE):
        return str(error)
    if str(error).endswith("does not take an argument"):  # --noNAME=VALUE, a plain ValueError
        return f"{error}: --noNAME alone means false; leave out =VALUE"
    if "config" not in values:
        return str(error) if isinstance(error, flags.Error) else None
    flag = values["config"]
    source = _config_source(argv) or flag.default
    if isinstance(error, OSError):
        return f"config file {source!r}: {error.__cause__ or error}"
    if "whilst parsing config file" in str(error):
        # config_flags quotes the traceback of get_config, and raises while it handles the error
        first: BaseException = error
        while first.__context__ is not None:
            first = first.__context__
        name = "" if isinstance(first, ValueError) else f"{type(first).__name__}: "
        return f"config file {source!r}: {name}{first}"
    if isinstance(error, AttributeError) and str(error).endswith("no attribute 'get_config'"):
        return f"config file {source!r} has no get_config(): define it, returning a config"
    if source is None:
        return str(error) if isinstance(error, flags.Error) else None
    # a flag whose parsing failed has no value: build the config once more
    config = flag.parser.parse(source) if isinstance(source, str) else source
    return explain_flag_error(error, config, argv)


def _call(main: Callable[[list[str]], int | None], argv: list[str]) -> int | None:
    log_lines.use_lines()
    try:
        return main(argv)
    except (ValueError, OSError) as error:
        if flags.FLAGS.debug or not _meant_for_user(error):
            raise
        if isinstance(error, UnicodeDecodeError):
            return user_error(f"a file is {json_problem(error)}; --debug shows where it is read")
        return user_error(str(error))


def _meant_for_user(error: Exception) -> bool:
    """Whether one line is enough: a ValueError not raised by our or the user's code is a bug."""
    if isinstance(error, OSError):
        return isinstance(error, NAME_ERRORS) or error.errno in (errno.ELOOP, errno.ENAMETOOLONG)
    if isinstance(error, UnicodeDecodeError):  # of a file
        return True
    last = traceback.extract_tb(error.__traceback__)[-1]
    foreign = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    ours = last.filename.startswith(str(pathlib.Path(__file__).parents[1]))
    return (last.line or "").startswith("raise ") and (
        ours or not last.filename.startswith(foreign)
    )
