"""Multi-turn rollouts: environments, tools, episodes."""
