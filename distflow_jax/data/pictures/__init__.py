"""Images of data files: their columns, and the files that the columns name."""
