"""Plans for pods without access to them: chips and links, memory, traffic, estimated seconds."""
