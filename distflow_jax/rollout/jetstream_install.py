"""JetStream's version and the line that installs it, for programs that run without JetStream."""

REQUIREMENT = "google-jetstream==0.2.2"
INSTALL = f"pip install --no-deps {REQUIREMENT}"
