"""What compression leaves of a gradient, and what making it smaller costs.

Rates are of whole gradients, on one core: chunks of 256 KiB, 2026-11-16, by the codecs of
`served/compression.py`. Answers carry whole weights whatever the codec.
"""

import msgspec

from paceline import spec
from paceline.spec.server import Compression


class CodecCost(msgspec.Struct, frozen=True, kw_only=True):
    """One way to send a gradient."""

    sent_fraction: float = 1.0
    """Of a gradient's bytes, what travels."""

    encoding_rate: float = 0.0
    """Bytes of gradients that the thread of a worker that sends makes smaller in a second."""

    decoding_rate: float = 0.0
    """Bytes of gradients that a server has again in a second; none where nothing was encoded."""

    def encoding_seconds(self, size_bytes: float, speed: float) -> float:
        """Of a gradient, on a core of `speed` times that of the table."""
        return size_bytes / (self.encoding_rate * speed) if self.encoding_rate else 0.0

    def decoding_seconds(self, size_bytes: float, speed: float) -> float:
        return size_bytes / (self.decoding_rate * speed) if self.decoding_rate else 0.0


CODECS: dict[Compression, CodecCost] = {
    "none": CodecCost(),
    "fp16": CodecCost(sent_fraction=0.5, encoding_rate=4.0e9, decoding_rate=10e9),
    "bf16": CodecCost(sent_fraction=0.5, encoding_rate=3.6e9, decoding_rate=10e9),
    "int8": CodecCost(sent_fraction=0.251, encoding_rate=2.0e9, decoding_rate=7e9),
    "topk": CodecCost(encoding_rate=0.5e9, decoding_rate=10e9),
}
"""`topk` sends what its own fraction says: of each number that travels its place too."""


def codec_of(architecture: spec.Architecture) -> CodecCost:
    """How this architecture sends gradients to servers."""
    serving = architecture.serving
    if serving is None:
        return CODECS["none"]
    codec = CODECS[serving.compression]
    if serving.compression == "topk":
        return msgspec.structs.replace(codec, sent_fraction=2 * serving.topk_fraction)
    return codec
