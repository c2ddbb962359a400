"""Hooks on the gradients, weights and optimizers of a user's script; buckets of gradients."""
