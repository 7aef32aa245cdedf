"""The subcommands of `distflow`, which scripts/ calls too."""
