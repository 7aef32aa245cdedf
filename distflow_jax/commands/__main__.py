"""python -m distflow_jax.commands SUBCOMMAND: the same as `distflow SUBCOMMAND`."""

from distflow_jax.commands.main import main

main()
