"""Answering conversations with trained models."""
