"""A job that loses a member is started again, from its newest checkpoint, in the same run folder.

A run so has several *lives*. Each member appends to its own files; `record/lives.py` reads them as
one run. What every architecture can do, whatever was lost; where others can go on without the lost
one nothing is started again.
"""

import time
from collections.abc import Callable

from paceline.errors import MemberError, UserError
from paceline.launch.failures import way_out
from paceline.record import RecordedEvent, RunFolder
from paceline.record.lives import RESTART

REFUSED = UserError.exit_status


def live(
    folder: RunFolder,
    restarts: int,
    life: Callable[[], None],
    *,
    again: Callable[[], None] = lambda: None,
    dilation: float = 1.0,
) -> None:
    """Call `life` until one ends well, at most `restarts` times more; the last failure is raised,
    with the flags that outlive such a loss.

    `again` is called before each further life. What is refused for what was asked (exit status
    2) would be refused again.
    """
    for left in range(restarts, -1, -1):
        try:
            life()
            return
        except MemberError as error:
            if left == 0 or error.member_status == REFUSED:
                error.args = (f"{error}{way_out(error, folder)}",)
                raise
            why = error.brief
        times = f"{left - 1} more times" if left != 2 else "once more"
        text = f"{why}; all members start again from the newest checkpoint"
        text += f", and would {times}" if left > 1 else ""
        now = time.monotonic() / dilation
        folder.add_event(
            RecordedEvent(time_seconds=now, member="launcher", kind=RESTART, text=text)
        )
        again()
