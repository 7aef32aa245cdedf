"""What a compiled program costs, read from its jaxpr and its HLO."""
