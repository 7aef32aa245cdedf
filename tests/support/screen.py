"""A program on a pseudo-terminal, and the screen that it leaves."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios

from distflow_jax.report.terminal import WAITS
from support.waiting import HANG

# of a log file, where the machine needs long for it
_WAITS = f".*(?:{'|'.join(WAITS.values())})(?: \\.\\.\\.|: done in .*)\n"
_LONG_WAIT = re.compile(f"{_WAITS}|.*: \\d+[smh ]+.* so far.*\n")
_PIECE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")


def without_waits(log):
    """The text of a log without the lines that tell of long waits."""
    return _LONG_WAIT.sub("", log)


def run_on_terminal(command, *, columns=80, lines=50, **options):
    """(exit code, everything that the command wrote to a terminal of this size)."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, **options)
    os.close(theirs)
    written = b""
    try:
        while piece := os.read(ours, 1 << 16):
            written += piece
    except OSError:  # EIO: the last process has closed the terminal
        pass
    finally:
        os.close(ours)
    return process.wait(HANG), written.decode()


def shown_lines(written):
    """The lines that a terminal without an end shows of this, colours left out.

    Cursor up, erase line, carriage return and line feed are followed; anything else that moves the
    cursor is an error. Lines are not wrapped: a line wider than the terminal is seen as such.
    """
    screen, row, column = [""], 0, 0
    for match in _PIECE.finditer(written):
        numbers, kind, control, text = match.groups()
        if text is not None:
            before = screen[row].ljust(column)
            screen[row] = before[:column] + text + before[column + len(text) :]
            column += len(text)
        elif control == "\r":
            column = 0
        elif control == "\n":
            row += 1
            screen += [""] * (row == len(screen))
        elif kind == "A":
            row = max(0, row - int(numbers or 1))
        elif kind == "K":
            assert numbers == "2"
            screen[row] = ""
        else:
            assert kind in "mhl", match[0]  # colours, a hidden cursor
    return [line.rstrip() for line in screen]
