"""Settings of the sandbox, in which rewards and tools run programs of the model."""

import dataclasses

from distflow_jax.parsing.checked_fields import above, at_least, one_of
from distflow_jax.parsing.setting_checks import Section, setting

LEVELS = ("kernel", "namespaces", "cgroup")  # the strongest last


@dataclasses.dataclass(frozen=True)
class SandboxConfig(Section, name="sandbox"):
    """How programs of the model are confined, and what each of them may use."""

    # kernel, namespaces or cgroup (docs/sandbox.md); auto: the strongest that works on this
    # machine; remote: the provider at sandbox.url
    level: str = setting("auto", one_of(("auto", *LEVELS, "remote")))
    # the weakest level with which a run begins
    minimum: str = setting("kernel", one_of(LEVELS))
    seconds: float = setting(10.0, above(0))  # of a program, by the clock
    cpu_seconds: float = setting(10.0, above(0))  # of all processes of a program
    memory_mib: int = setting(512, at_least(64))  # of all processes of a program
    processes: int = setting(32, at_least(1))  # of a program, threads included
    output_kib: int = setting(1024, at_least(1))  # of a program's output, and of its errors
    disk_mib: int = setting(64, at_least(1))  # in a program's scratch folder
    # folder for scratch folders; "": the system's for temporary files
    scratch: str = ""
    # folder of Python packages that programs may import (pip install --target=FOLDER); "": none
    packages: str = ""
    # address of a provider: http://HOST:PORT/PATH or https://
    url: str = setting("", needs={"level": ("remote",)})
    # file with the secret that the provider asks for, readable by its owner only; "": none
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
