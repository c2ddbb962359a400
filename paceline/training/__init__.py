"""Training: the public calls, the loop of one worker, the server process, checkpoints."""
