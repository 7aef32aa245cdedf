"""The persistent cache of compiled programs, which makes every start but the first a short one."""

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from distflow_jax.parsing.paths import check_program_bucket, checked_path
from distflow_jax.programs.program_folder import VARIABLE, automatic_folder, prepare

AUTOMATIC = "auto"  # a folder below the user's cache folder
# By default JAX keeps only programs that took a second to compile; many of a start take less.
_SETTINGS = {
    "jax_enable_compilation_cache": True,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
_WARNING = "persistent compilation cache entry for"  # of JAX

log = logging.getLogger("distflow_jax")


@contextlib.contextmanager
def kept_programs(folder: str) -> Iterator[None]:
    """Keeps compiled programs in `folder` and loads them from there; "" changes nothing.

    Programs for other shapes, options, devices or versions are separate entries. Several runs may
    share a folder. "auto" is the user's cache folder, or none where that cannot be written to; for
    any other folder that is a ValueError.
    """
    if chosen := os.environ.get(VARIABLE):
        if folder not in ("", AUTOMATIC, chosen):
            log.info("%s=%s overrides compilation_cache=%s", VARIABLE, chosen, folder)
        folder = ""
    where = _automatic() if folder == AUTOMATIC else _named(folder)
    if not where:
        yield
        return
    wanted = {"jax_compilation_cache_dir": where} | _SETTINGS
    before = {name: getattr(jax.config, name) for name in wanted}
    _configure(wanted)
    try:
        with _one_warning():
            yield
    finally:
        _configure(before)


def _named(folder: str) -> str:
    """The path of a folder that the user chose; a bucket's is JAX's to read."""
    if "://" in folder:
        check_program_bucket("compilation_cache", folder)
    if not folder or "://" in folder:
        return folder
    path = checked_path("new_folder", "compilation_cache", folder).resolve()
    if problem := prepare(path):
        raise ValueError(f"compilation_cache={folder} {problem}; choose another folder")
    return str(path)


def _automatic() -> str:
    """The user's own folder for this kind of processor; "" where there can be none."""
    try:
        path = automatic_folder()
    except ValueError as error:  # a user without a home, as in containers
        log.info("no compiled programs are kept: %s", error)
        return ""
    if problem := prepare(path):
        log.info("no compiled programs are kept: %s %s (compilation_cache=FOLDER)", path, problem)
        return ""
    return str(path.absolute())


def _configure(settings: dict) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    # without a reset JAX keeps the settings of the process's first program; it logs every reset
    logging.getLogger("jax._src.compilation_cache").setLevel(logging.WARNING)
    compilation_cache.reset_cache()


@contextlib.contextmanager
def _one_warning() -> Iterator[None]:
    """JAX warns of each program that it cannot write or read: the first one stands for all."""
    before, said = warnings.showwarning, []

    def show(message: Warning | str, *place: Any, **more: Any) -> None:
        if _WARNING not in str(message):
            before(message, *place, **more)
        elif not said:
            said.append(message)
            log.warning("the compilation cache misses programs: %s", message)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before
