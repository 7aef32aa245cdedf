"""One line of the doctor's page."""

import dataclasses

OK, NOTE, PROBLEM = "ok", "note", "problem"


@dataclasses.dataclass(frozen=True)
class Finding:
    """A thing that was looked at. A problem would stop a run; a note may."""

    level: str  # OK, NOTE or PROBLEM
    name: str
    text: str
    fix: str = ""  # what to do about it

    def line(self) -> str:
        """The finding as the page shows it."""
        return f"{self.level:7}  {self.name:16}  {self.text}" + f": {self.fix}" * bool(self.fix)
