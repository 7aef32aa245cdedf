"""Processes of a job: how they find each other, start together and exchange host data."""
