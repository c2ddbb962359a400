"""A worker's part of every batch of a script's data loader."""
