"""One small training script per pattern; tests/test_scripts.py runs them alone and distributed."""
