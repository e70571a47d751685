"""Text as numbers: tokens, vocabularies, word vectors, lexicons."""
