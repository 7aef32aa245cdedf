"""One file per family of models: translation of its config, and its tables of tensor names."""
