"""Images as data files name them: paths, bytes, data URIs. Nothing is fetched."""

import dataclasses
import os
import re
import urllib.parse
from pathlib import Path
from typing import Any

from distflow_jax.did_you_mean import suggestion
from distflow_jax.images.data_uris import bytes_of_uri
from distflow_jax.images.picture_files import PictureFile
from distflow_jax.parsing.one_line import shown
from distflow_jax.parsing.paths import checked_path, named_path

_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:")
_MOST_NEAR = 4096  # files of a folder among which the nearest name is sought


@dataclasses.dataclass(frozen=True)
class ImageFolders:
    """Folders that images may be read from: the data file's, and `data.image_root`.

    A relative path begins in the root where one is given, and else beside the data file.
    """

    folder: Path
    root: Path | None = None

    def open(self, value: Any, place: str) -> PictureFile:
        """The image of one entry of a column or one part of a message.

        Args:
          value: a path, `file://PATH`, a data URI, bytes, or an object with `bytes`, `path`,
            `image` or `url`.
          place: of the image, the start of every error message.

        Raises:
          ValueError: no image, a path outside of the folders, or a URL.
        """
        if isinstance(value, dict):
            for key in ("bytes", "path", "image", "url"):
                if value.get(key) is not None:
                    return self.open(value[key], place)
        if isinstance(value, bytes):
            return PictureFile(place, value)
        if not isinstance(value, str) or not value:
            raise ValueError(
                f"{place}: expected a path, bytes, a data URI, or an object with 'bytes' or "
                f"'path', got {shown(value)}"
            )
        if value[:5].lower() == "data:":
            return PictureFile(place, bytes_of_uri(value, place))
        return PictureFile(f"{place} ({shown(value)[1:-1]})", self._path(value, place))

    def _path(self, text: str, place: str) -> Path:
        if text.startswith("file://"):
            text = urllib.parse.unquote(text.removeprefix("file://"))
        elif _SCHEME.match(text):
            raise ValueError(
                f"{place}: {shown(text)} is an address, and nothing is fetched: download the "
                "image and give its path"
            )
        base = self.root or self.folder
        try:
            path = (base / text).resolve()
        except (OSError, RuntimeError, ValueError) as error:  # a link to itself, a null character
            raise ValueError(f"{place}: {shown(text)} is not a path ({error})") from None
        allowed = [folder.resolve() for folder in (self.root, self.folder) if folder is not None]
        if not any(path.is_relative_to(folder) for folder in allowed):
            raise ValueError(
                f"{place}: {shown(text)} leads out of {' and '.join(map(str, allowed))}: move the "
                "image there, or let data.image_root name the folder that holds all images"
            )
        try:
            if path.is_file():
                return path
            if path.exists():
                raise ValueError(f"{place}: {shown(text)} is no file, but a folder or a device")
            hint = _near(path) or "check the path, which begins in " + str(base)
        except OSError as error:  # longer than a name may be
            raise ValueError(
                f"{place}: {shown(text)} is not a path ({error.strerror}): base64 needs "
                "'data:image/png;base64,' before it"
            ) from None
        raise ValueError(f"{place}: {shown(text)} does not exist; {hint}")


def image_folders(file: Path, root: str) -> ImageFolders:
    """The folders for images of a data file; `root` is `data.image_root`, "" without one."""
    return ImageFolders(file.parent, named_path("data.image_root", root) if root else None)


def check_root(root: str) -> None:
    """Raises ValueError or FileNotFoundError if `data.image_root` is no folder; "" is none."""
    if root:
        checked_path("folder", "data.image_root", root)


def _near(path: Path) -> str:
    if not path.parent.is_dir():
        return f"nor does its folder {shown(str(path.parent))}"
    with os.scandir(path.parent) as entries:
        names = [entry.name for entry, _ in zip(entries, range(_MOST_NEAR), strict=False)]
    return suggestion(path.name, sorted(names))
