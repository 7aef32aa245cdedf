"""Sections of a report's page: charts, timelines, samples, tables."""
