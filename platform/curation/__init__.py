"""Curation: extract dialogues from subtitles and clean them."""
