"""The command line: `python -m transformer VERB`, one verb a file."""
