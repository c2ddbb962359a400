"""Run a script or a module as before, and observe it: `python -m paceline.observe train.py …`."""

import os
import runpy
import sys
from pathlib import Path

USAGE = """usage: python -m paceline.observe [--out FOLDER] SCRIPT [ARGUMENTS…]
       python -m paceline.observe [--out FOLDER] -m MODULE [ARGUMENTS…]

Run SCRIPT as python would and record where its time goes, also under torchrun, mpirun and srun:
       torchrun --nproc-per-node 4 -m paceline.observe train.py --epochs 3
"""


def main() -> None:
    arguments = sys.argv[1:]
    folder = ""
    if arguments[:1] == ["--out"] and len(arguments) > 1:
        folder, arguments = arguments[1], arguments[2:]
    as_module = arguments[:1] == ["-m"]
    arguments = arguments[1:] if as_module else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="", file=sys.stdout if arguments else sys.stderr)
        raise SystemExit(0 if arguments else 2)
    target = arguments[0]
    sys.argv = arguments
    if as_module:
        sys.path[0] = os.getcwd()
    else:
        if not Path(target).is_file():
            print(f"paceline observe: there is no script {target}.", file=sys.stderr)
            raise SystemExit(2)
        sys.path[0] = str(Path(target).resolve().parent)
    from paceline.observe.place import default_folder
    from paceline.observe.session import start
    from paceline.session.recording import FOLDER

    folder = folder or os.environ.get(FOLDER, "")
    start(folder, script=target)
    # A script that turns out to be Paceline's own is recorded by its own session.
    os.environ[FOLDER] = folder or str(default_folder(target))
    if as_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(target, run_name="__main__")


if __name__ == "__main__":
    main()
