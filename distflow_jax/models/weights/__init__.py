"""Weight files: sources, formats, and checks of tensor names and shapes."""
