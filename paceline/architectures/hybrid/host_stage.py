"""Buckets on a device whose host sums them: what lies between `host_sums.py` and a GPU.

A bucket leaves for main memory by a lane of its own when backward has filled it, and its sum comes
back by another. The thread that trains starts both and looks now and then whether a bucket has
arrived; only at the end of a pass does the device wait for the sums.
"""

import contextlib
from itertools import chain

import torch
from torch import Tensor

from paceline.collectives.context import Context
from paceline.errors import SpecError
from paceline.served.client import Moment
from paceline.served.device import Lane, Pinned, is_apart, open_guest_lane, say_who_shares
from paceline.wire import Segment


class HostStage:
    """This worker's ways between its device and its host's memory."""

    def __init__(self, context: Context) -> None:
        self._context, self._pinned = context, Pinned(context)
        self._lanes: dict[torch.device, tuple[Lane, Lane]] = {}
        """Of each device: out and back."""
        self._brought: set[torch.device] = set()
        """Devices that sums of this step are on their way to."""

    def bucket(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Memory for a bucket on the device; None where that is the host's own."""
        if not is_apart(device):
            return None
        if device.type not in ("cpu", "cuda"):
            problem = f"gradients are on {device}, and a host's memory sums them."
            raise SpecError("architecture hybrid", problem, "use a CPU or a CUDA device.")
        if self._context.views is not None:
            problem = "hybrid sums gradients of a GPU, and cannot go on in place without a worker."
            raise SpecError("--on-loss", problem, "use ring, or write stop and --restarts.")
        if device not in self._lanes:
            self._lanes[device] = open_guest_lane(device), open_guest_lane(device)
            if device.type == "cuda":
                say_who_shares(self._context, "the host sums in main memory all the same")
        return torch.zeros(elements, dtype=dtype, device=device)

    def pin(self, segment: Segment) -> None:
        """Copies will go to and from it."""
        if any(device.type == "cuda" for device in self._lanes):
            self._pinned.add(segment)

    def leave(self, flat: Tensor, into: Tensor) -> Moment:
        """Have a bucket copied as it is when all that the device was asked for is done; returns
        when it has arrived."""
        out, _ = self._lanes[flat.device]
        made = out.here()
        out.after(made)
        out.copy([into], [flat])
        out.reuse(made)
        return out.reached()

    def arrived(self, flat: Tensor, moment: Moment) -> None:
        """Nobody asks for the moment any more."""
        self._lanes[flat.device][0].reuse(moment)

    def bring(self, flat: Tensor, total: Tensor) -> None:
        """Have a bucket's sum copied to it. `total` may change when this worker's next gradients
        have arrived: they are made after `follow`."""
        self._lanes[flat.device][1].copy([flat], [total])
        self._brought.add(flat.device)

    def follow(self) -> None:
        """What the device is asked for from here on begins when all sums are there."""
        for device in self._brought:
            _, back = self._lanes[device]
            moment = back.reached()
            back.follow(moment)
            back.reuse(moment)
        self._brought.clear()

    def settle(self) -> None:
        """Before memory goes: all copies are done, and the device forgets it."""
        for lane in chain(*self._lanes.values()):
            with contextlib.suppress(RuntimeError):  # of a broken device, which was told before
                lane.reached().synchronize()
        self._pinned.close()

    def close(self) -> None:
        self.settle()
        for lane in chain(*self._lanes.values()):
            with contextlib.suppress(RuntimeError):
                lane.close()
