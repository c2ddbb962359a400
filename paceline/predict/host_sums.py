"""Devices of one host that add up each layer's gradients before anything leaves it.

All send a layer's gradients to the device that was dealt it (the least loaded so far, whole layers:
a large one makes its device's bus the limit), and that one sends the new weights back to all.
"""

from collections.abc import Callable, Sequence
from functools import partial

from paceline.predict.dealing import Lot
from paceline.predict.links import Links


class HostSums:
    """One group's hosts: which layers are being added up or handed out."""

    def __init__(
        self,
        name: str,
        devices: int,
        layer_bytes: Sequence[int],
        lots: Sequence[Lot],
        links: Links,
        *,
        ready: Callable[[int], None],
        done: Callable[[int], None],
        answers: bool,
    ) -> None:
        """`ready`: a chunk's gradients are summed. `done`: a layer's weights are on every device.

        `answers`: weights come in answer to gradients; else `fetch` says when they are asked for.
        """
        self._name, self._devices, self._bytes, self._links = name, devices, layer_bytes, links
        self._ready, self._done, self._answers = ready, done, answers
        self._layers_of = [lot.layers for lot in lots]
        self._chunks_of = [
            [p.chunk.index for p in lots if layer in p.layers] for layer in range(len(layer_bytes))
        ]
        self._owner = self._deal()
        self.pending: set[int] = set()
        """Layers whose weights are not there for the next forward pass."""
        self._unsummed: dict[int, int] = {}
        self._unanswered: dict[int, int] = {}

    @staticmethod
    def link_names(name: str, devices: int) -> list[str]:
        return [f"{name} device{device}" for device in range(devices)]

    def _deal(self) -> list[int]:
        loads = [0] * self._devices
        owners = []
        for size in self._bytes:
            owner = min(range(self._devices), key=lambda device: (loads[device], device))
            loads[owner] += size
            owners.append(owner)
        return owners

    def made(self, layer: int) -> None:
        """Every device has this layer's gradients."""
        if self._answers:
            self._await(layer)
        self._send(layer, "in", lambda: self._summed(layer))

    def fetch(self) -> None:
        """All weights were asked for."""
        for layer in range(len(self._bytes)):
            self._await(layer)

    def _await(self, layer: int) -> None:
        self.pending.add(layer)
        self._unanswered[layer] = len(self._chunks_of[layer])

    def answered(self, chunk: int) -> None:
        """The weights of a chunk have come to the host."""
        for layer in self._layers_of[chunk]:
            self._unanswered[layer] -= 1
            if self._unanswered[layer] == 0:
                self._send(layer, "out", partial(self._handed_out, layer))

    def _summed(self, layer: int) -> None:
        for chunk in self._chunks_of[layer]:
            left = self._unsummed.get(chunk) or len(self._layers_of[chunk])
            self._unsummed[chunk] = left - 1
            if left == 1:
                self._ready(chunk)

    def _handed_out(self, layer: int) -> None:
        self.pending.discard(layer)
        self._done(layer)

    def _send(self, layer: int, way: str, then: Callable[[], None]) -> None:
        link = f"{self._name} device{self._owner[layer]} {way}"
        self._links.send(link, [(link, self._devices - 1.0)], self._bytes[layer], then)
