"""What an optimizer step minimises: one file per kind of model or data."""
