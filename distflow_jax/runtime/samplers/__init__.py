"""The samplers of a run: made, fed with weights, evaluated, and running ahead."""
