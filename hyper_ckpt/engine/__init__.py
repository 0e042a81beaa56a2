"""Executes plans: moves bytes, counts them, and commits."""
