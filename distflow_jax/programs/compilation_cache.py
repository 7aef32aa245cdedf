"""JAX's persistent compilation cache: programs compiled once are loaded by later starts."""

import contextlib
import logging
import os
from collections.abc import Iterator

import jax
from jax.experimental.compilation_cache import compilation_cache

from distflow_jax.parsing.paths import checked_path

# JAX's own setting, which overrides compilation_cache.
VARIABLE = "JAX_COMPILATION_CACHE_DIR"
# By default JAX keeps only programs that took a second to compile; many of a start take less.
_SETTINGS = {
    "jax_enable_compilation_cache": True,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}

log = logging.getLogger("distflow_jax")


@contextlib.contextmanager
def kept_programs(folder: str) -> Iterator[None]:
    """Keeps compiled programs in `folder` and loads them from there; "" changes nothing.

    Programs for other shapes, options, devices or versions are separate entries. Raises ValueError
    for a folder that cannot be written to.
    """
    if chosen := os.environ.get(VARIABLE):
        if folder and folder != chosen:
            log.info("%s=%s overrides compilation_cache=%s", VARIABLE, chosen, folder)
        folder = ""
    if not folder:
        yield
        return
    if "://" not in folder:
        folder = str(checked_path("new_folder", "compilation_cache", folder).resolve())
    wanted = {"jax_compilation_cache_dir": folder} | _SETTINGS
    before = {name: getattr(jax.config, name) for name in wanted}
    _configure(wanted)
    try:
        yield
    finally:
        _configure(before)


def _configure(settings: dict) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    # without a reset JAX keeps the settings of the process's first program; it logs every reset
    logging.getLogger("jax._src.compilation_cache").setLevel(logging.WARNING)
    compilation_cache.reset_cache()
