"""`server`: workers push gradient chunks, servers update and return weights.

architecture  one worker's side of it, and the main function of a server member
setup         before step 1: who is where, the plan, the memory
hooks         where the exchange meets autograd
exchange      the worker's side at work; `serving` the server's; `loop` the thread of both
sums, updates what servers do with gradients
"""

from paceline.architectures.server.architecture import ServerArchitecture, serve

__all__ = ["ServerArchitecture", "serve"]
