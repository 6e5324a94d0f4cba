"""Lessons that run and show their figures."""
