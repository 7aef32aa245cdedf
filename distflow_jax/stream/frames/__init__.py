"""Groups, samples and images as bytes, between task buffers and workers."""
