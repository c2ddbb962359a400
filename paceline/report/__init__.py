"""Show runs: a static page with charts, their files and numbers; exports; the live page."""

from paceline.report.rows import from_runs
from paceline.report.write import write, write_network, write_runs, write_search

__all__ = ["from_runs", "write", "write_network", "write_runs", "write_search"]
