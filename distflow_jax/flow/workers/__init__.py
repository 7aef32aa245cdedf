"""Samplers as jobs of their own: workers, the wire between them and the trainers, and weights."""
