"""Lightning's entry point: with PACELINE_OBSERVE=FOLDER every Trainer of a job is observed.

Lightning asks all packages for callbacks when a Trainer is made, before it makes process groups.
"""

import os
from typing import Any

from paceline.session.recording import FOLDER


def callbacks() -> list[Any]:
    """Begin to observe where the environment asks for it; no callback is needed for that."""
    folder = os.environ.get(FOLDER, "")
    if folder:
        from paceline.observe.session import start

        start(folder)
    return []
