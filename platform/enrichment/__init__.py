"""Columns and streams that models add to a dataset: causes, labels, unpaired text, filters."""
