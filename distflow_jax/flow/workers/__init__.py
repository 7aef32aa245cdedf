"""Samplers as jobs of their own: what trainers and workers send each other."""
