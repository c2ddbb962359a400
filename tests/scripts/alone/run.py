"""Run scripts as plain PyTorch; print their values, and what the models were, as JSON.

Started with this folder first on the path, so that `import paceline` finds the one that does
nothing.
"""

import json
import sys

import torch

import paceline
from tests.scripts import harness

torch.set_num_threads(1)
results = {}
for name in sys.argv[1:]:
    paceline.given.clear()
    values, _ = harness.run(name)
    start = [value for weights in paceline.given for value in weights]
    results[name] = {"values": values, "start": start}
json.dump(results, sys.stdout)
