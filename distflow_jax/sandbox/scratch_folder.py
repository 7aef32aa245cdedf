"""A folder that a stranger has filled: its size, and its end, however deep it is.

Folders may be nested beyond the longest path and closed to their owner.
"""

import contextlib
import os
import stat
import time
from collections.abc import Iterator


def count_bytes(folder: str, most: float, deadline: float) -> float:
    """Bytes on disk below a folder, 4 KiB at least for each name; infinite if it cannot be read.

    Ends above `most`, and at a time by the monotonic clock. No link is followed, even if a folder
    becomes one meanwhile.
    """
    count, folders = 0.0, []
    try:
        folders.append(_open(folder))
        while folders and count <= most and time.monotonic() < deadline:
            descriptor, entries = folders[-1]
            if (entry := next(entries, None)) is None:
                os.close(folders.pop()[0])
                continue
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # it has just changed
                found = entry.stat(follow_symlinks=False)
                count += max(4096, found.st_blocks * 512)
                if stat.S_ISDIR(found.st_mode):
                    folders.append(_open(entry.name, descriptor))
    except OSError:  # too deep, or closed on purpose
        return float("inf")
    finally:
        for descriptor, _ in folders:
            os.close(descriptor)
    return count


def _open(name: str, above: int | None = None) -> tuple[int, Iterator[os.DirEntry]]:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    descriptor = os.open(name, flags, dir_fd=above)
    return descriptor, os.scandir(descriptor)


def remove_folder(folder: str) -> None:
    """Removes a folder in which nothing runs any more.

    What is in a folder inside moves up, one level at a time: no path becomes longer than that. Its
    new names are random: whoever filled the folder has taken none of them.
    """
    mark, moved = os.urandom(16).hex(), 0
    while entries := list(os.scandir(folder)):
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, 0o700)
            for inner in list(os.scandir(entry.path)):
                if inner.is_dir(follow_symlinks=False):
                    os.chmod(inner.path, 0o700)  # its own ".." changes
                    os.rename(inner.path, f"{folder}/{mark}-{moved}")
                    moved += 1
                else:
                    os.unlink(inner.path)
            os.rmdir(entry.path)
    os.rmdir(folder)
