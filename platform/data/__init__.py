"""Data sets: readers, the bundled corpus, and the way from conversations to samples."""
