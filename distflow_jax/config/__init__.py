"""The run's configuration: dataclasses, the command line, and the settings of a graph."""
