"""Programs of strangers under confinement: without root, containers or packages."""
