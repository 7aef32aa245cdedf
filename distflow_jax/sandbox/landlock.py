"""Landlock: the files that a process and all that it starts may open, and no TCP.

Documentation/userspace-api/landlock.rst and include/uapi/linux/landlock.h of Linux. A kernel knows
the rights of its ABI only.
"""

import os
import struct
from collections.abc import Mapping

from distflow_jax.sandbox.system_calls import call

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
_MAKE_DEVICES = 1 << 6 | 1 << 9 | 1 << 11  # character and block devices, sockets
READ, RUN = READ_FILE | READ_DIR, READ_FILE | READ_DIR | EXECUTE
_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}  # by ABI
_OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | 1 << 14 | 1 << 15  # what a rule on a file may give


def abi() -> int:
    """The version that this kernel has; 0 without Landlock."""
    try:
        return call("landlock_create_ruleset", None, 0, 1)
    except OSError:
        return 0


def restrict(version: int, allowed: Mapping[str, int], scratch: str) -> None:
    """Allows nothing but these rights below these paths, and all but devices in `scratch`.

    Bind, connect over TCP, abstract sockets and signals to processes outside end too, as far as the
    ABI has them. Needs no_new_privs.
    """
    every = max(mask for first, mask in _RIGHTS.items() if first <= version)
    handled = [every]  # rights of files; of the network from ABI 4 on; scopes, from ABI 6 on
    handled += [3] * (version >= 4) + [3] * (version >= 6)
    rules = struct.pack(f"={len(handled)}Q", *handled)
    ruleset = call("landlock_create_ruleset", rules, len(rules), 0)
    for path, mask in {**allowed, scratch: every & ~_MAKE_DEVICES}.items():
        try:
            folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        if not os.path.isdir(path):
            mask &= _OF_FILES
        call("landlock_add_rule", ruleset, 1, struct.pack("=Qi", mask & every, folder), 0)
        os.close(folder)
    call("landlock_restrict_self", ruleset, 0)
    os.close(ruleset)
