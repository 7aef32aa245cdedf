"""The sampler as a server: JetStream's service and ours, over the same weights."""
