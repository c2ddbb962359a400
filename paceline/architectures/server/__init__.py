"""`server`: workers push gradient chunks, servers update and return weights.

synchronous   one worker's side in steps that all workers take together; `asynchronous` in the rest
watching      what the first step shows of a script; `weights` what it sees of its weights,
              gradients and optimizer while they are with the servers
streaming     gradients that leave as they are made
exchange      between members, without autograd: `opening` one, `setup` and `plan` before it,
              `cutting` into it; `loop` carries out what the protocol's machines decide, by
              `worker`, the worker's side, and `transports`, the ways to the server's; `device`
              where a worker's tensors are on a GPU
seat          the server's side: `serving`, on a GPU `device_serving`; `updates` what is done with
              gradients, and the optimizer's state on its way
"""

from paceline import spec
from paceline.architectures.base import Architecture
from paceline.architectures.server.asynchronous import AsynchronousServer
from paceline.architectures.server.synchronous import SynchronousServer
from paceline.collectives.context import Context
from paceline.protocol.plan import check
from paceline.served.exchange import serve
from paceline.served.shapes import shape_of
from paceline.served.streaming import Streaming


def build(options: spec.Server, context: Context) -> Architecture:
    """One worker's side."""
    shape = shape_of(context.identity)
    check(options, shape)
    if options.exclusive:
        return SynchronousServer(options, context)
    return AsynchronousServer(options, context)


def streaming_of(architecture: Architecture) -> Streaming | None:
    """Where a worker's gradients leave as they are made; None where they do not, or not yet."""
    if isinstance(architecture, SynchronousServer | AsynchronousServer):
        return architecture.streaming
    return None


__all__ = ["build", "serve", "streaming_of"]
