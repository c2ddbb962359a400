"""Small training scripts, one function for each pattern; test_scripts.py runs them all."""

import importlib
import pkgutil

for found in pkgutil.iter_modules(__path__):
    if not found.name.startswith("test_") and found.name != "alone":
        importlib.import_module(f"{__name__}.{found.name}")
