"""Checks of an installation and its machine, each a line of the subcommand doctor."""
