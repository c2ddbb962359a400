"""The part of a worker in every batch of a script's data loader."""
