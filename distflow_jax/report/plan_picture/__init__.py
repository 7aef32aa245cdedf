"""The picture of a plan: layout, captions, legend."""
