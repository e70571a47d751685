"""Text in, answer out."""
