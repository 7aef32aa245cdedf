"""A folder that a stranger has filled: its size, and its end, however deep it is.

Folders may be nested beyond the longest path and closed to their owner.
"""

import os


def count_bytes(folder: str) -> float:
    """Bytes on disk below a folder, 4 KiB at least for each name; infinite if it cannot be read."""
    count, folders = 0, [folder]
    while folders:
        try:
            for entry in os.scandir(folders.pop()):
                found = entry.stat(follow_symlinks=False)
                count += max(4096, found.st_blocks * 512)
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
        except FileNotFoundError:  # it has just been removed
            continue
        except OSError:  # too deep, or closed on purpose
            return float("inf")
    return count


def remove_folder(folder: str) -> None:
    """Removes a folder in which nothing runs any more.

    What is in a folder inside moves up, one level at a time: no path becomes longer than that.
    """
    moved = 0
    while entries := list(os.scandir(folder)):
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, 0o700)
            for inner in list(os.scandir(entry.path)):
                if inner.is_dir(follow_symlinks=False):
                    os.chmod(inner.path, 0o700)  # its own ".." changes
                    os.rename(inner.path, f"{folder}/moved-{moved}")
                    moved += 1
                else:
                    os.unlink(inner.path)
            os.rmdir(entry.path)
    os.rmdir(folder)
