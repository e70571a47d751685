"""Automatic metrics, and answers to whole splits."""
