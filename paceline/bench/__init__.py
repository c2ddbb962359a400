"""Asking many questions: grids, repeats, statistics, peers, the papers' experiments.

Runs are made by `engines` (ours) and `peers` (theirs); pages and charts live in `report`.
"""
