"""Samplers as jobs of their own: workers, and the homes that they get groups from."""
