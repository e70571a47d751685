"""Samples as tensors: encoding text as numbers, and streams of batches."""
