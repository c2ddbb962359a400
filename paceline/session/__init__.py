"""The public calls of a script, and one process's part in a job."""
