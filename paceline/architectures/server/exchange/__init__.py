"""What members of `server` and leaders of `hybrid` have between them, without autograd.

A worker puts gradients in and takes weights out (`worker.py`), of any framework.
"""
