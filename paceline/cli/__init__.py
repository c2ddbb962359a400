"""The command: one file per verb; each parses, calls, prints."""
