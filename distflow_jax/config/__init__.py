"""The run's configuration: a dataclass per section, their keys, and the settings of a graph."""
