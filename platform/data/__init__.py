"""Datasets: readers, the bundled corpus, samples, and prepared folders."""
