"""The built-in training loop: optimizers, learning-rate schedules, checkpoints, evaluation."""
