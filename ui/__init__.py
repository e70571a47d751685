"""The web page; one tab, one file."""
