"""Run scripts as plain PyTorch and print their results: `python run.py SCRIPT…`, one JSON object.

Started with this folder first on the path, so that `import paceline` finds the one that does
nothing.
"""

import json
import runpy
import sys
from pathlib import Path

import torch

torch.set_num_threads(1)
results = {name: runpy.run_path(name)["result"] for name in sys.argv[1:]}
json.dump({Path(name).stem: result for name, result in results.items()}, sys.stdout)
