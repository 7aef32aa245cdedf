"""Images: their record, their reading, and their place in a prompt. Nothing here uses JAX."""
