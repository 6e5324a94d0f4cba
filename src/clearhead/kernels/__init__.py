"""Numba on raw arrays; see README.md in this folder for how the pieces fit."""
