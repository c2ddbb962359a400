"""Observers of a script's steps: losses, phases, the movement of its weights."""
