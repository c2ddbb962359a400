"""`server`: workers push gradient chunks to servers, which average them or update the weights.

Who updates is decided once, here: `averaging` where each worker does, by the script's own
optimizer, and `updating` where servers do. The machinery of both is in `paceline/served`.
"""

from paceline import spec
from paceline.architectures.base import Architecture
from paceline.architectures.server.averaging import AveragingServer
from paceline.architectures.server.updating import UpdatingServer
from paceline.collectives.context import Context
from paceline.protocol.plan import check
from paceline.served.exchange import serve
from paceline.served.shapes import shape_of
from paceline.served.streaming import Streaming


def build(options: spec.Server, context: Context) -> Architecture:
    """One worker's side."""
    check(options, shape_of(context.identity))
    if options.gradients_leave(context.gradient_use) == "for means":
        return AveragingServer(options, context)
    return UpdatingServer(options, context)


def streaming_of(architecture: Architecture) -> Streaming | None:
    """How a worker's gradients leave as they are made; None where they do not."""
    return architecture.streaming if isinstance(architecture, UpdatingServer) else None


__all__ = ["build", "serve", "streaming_of"]
