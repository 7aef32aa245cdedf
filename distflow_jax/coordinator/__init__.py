"""The fields of a step and their moves between layouts."""
