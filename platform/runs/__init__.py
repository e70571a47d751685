"""A run on disk: its record, its model, its log and its metrics file."""
