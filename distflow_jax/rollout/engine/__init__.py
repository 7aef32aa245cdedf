"""The JetStream engine: decode programs, sampling, slots' state on devices."""
