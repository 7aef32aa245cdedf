"""Pillow, imported at the first image: a run on text never imports it."""

import functools
import importlib
from types import ModuleType


@functools.cache
def load(module: str = "Image") -> ModuleType:
    """A module of Pillow: Image, ImageDraw."""
    return importlib.import_module(f"PIL.{module}")
