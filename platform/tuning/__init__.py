"""Sweeps: many runs of the same training under different settings, and what they show."""
