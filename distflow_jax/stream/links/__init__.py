"""Links between task buffers and workers of other jobs."""
