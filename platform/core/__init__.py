"""Foundations that everything else may use: errors, home folder, settings, logging, field help."""
