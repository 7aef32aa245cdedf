"""Samplers as jobs of their own: workers, their talk with the trainers, and weights."""
