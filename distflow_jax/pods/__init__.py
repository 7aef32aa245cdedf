"""Plans for pods without access to them: chips and links, memory, traffic, estimated seconds.

The memory is computed by planning/memory_plan.py, as for runs on this machine.
"""
