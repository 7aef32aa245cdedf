"""Groups, samples and images as bytes, between homes and workers."""
