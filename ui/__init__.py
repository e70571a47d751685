"""The web page, one file per tab."""
