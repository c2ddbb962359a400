"""Search for the best settings over many runs. A trial is an ordinary experiment and run."""
