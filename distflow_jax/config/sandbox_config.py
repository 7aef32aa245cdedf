"""Settings of the sandbox, in which rewards and tools run programs of the model."""

import dataclasses

from distflow_jax.parsing.checked_fields import above, at_least, one_of
from distflow_jax.parsing.setting_checks import Section, setting

LEVELS = ("kernel", "namespaces", "cgroup")  # the strongest last


@dataclasses.dataclass(frozen=True)
class SandboxConfig(Section, name="sandbox"):
    """Isolation and resource limits of programs that the model writes."""

    # isolation level: kernel, namespaces or cgroup (docs/sandbox.md); auto: the strongest that
    # works on this machine; remote: the provider at sandbox.url
    level: str = setting("auto", one_of(("auto", *LEVELS, "remote")))
    minimum: str = setting("kernel", one_of(LEVELS))  # the weakest level at which a run may start
    seconds: float = setting(10.0, above(0))  # wall time limit of a program
    # CPU time limit of all processes of a program together
    cpu_seconds: float = setting(10.0, above(0))
    # memory limit of all processes of a program together, in MiB
    memory_mib: int = setting(512, at_least(64))
    # maximum number of processes and threads of a program
    processes: int = setting(32, at_least(1))
    # limit on the stdout, and on the stderr, of a program, in KiB
    output_kib: int = setting(1024, at_least(1))
    disk_mib: int = setting(64, at_least(1))  # size limit of a program's scratch folder, in MiB
    # folder in which scratch folders are created; "": the system's temporary folder
    scratch: str = ""
    # folder of Python packages that programs may import (pip install --target=FOLDER); "": none
    packages: str = ""
    # address of the provider: http://HOST:PORT/PATH or https://
    url: str = setting("", needs={"level": ("remote",)})
    # file with the token for the provider, readable by its owner only; "": none
    token_file: str = setting("", needs={"level": ("remote",)})

    def __post_init__(self):
        super().__post_init__()
        if self.level == "remote" and not self.url:
            raise ValueError("sandbox.level=remote needs sandbox.url=http://HOST:PORT/PATH")
        if self.level in LEVELS and LEVELS.index(self.level) < LEVELS.index(self.minimum):
            raise ValueError(
                f"sandbox.level={self.level} is below sandbox.minimum={self.minimum}; "
                "raise the level, or lower sandbox.minimum"
            )
