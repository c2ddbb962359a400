"""What an exchange decides: pure state machines and the plan they go by.

plan          from sizes, options and a cluster's shape to chunks (`chunks`), seats (`placement`)
              and rules
exchange      a worker's side with servers; `seat` the server's, over `closing`, its chunks, and
              their `steps`; who is there (`membership`), comes (`admission`), is lost while others
              go on (`losses`), has copies of what servers have (`homes`)
collectives   a worker's side without them, and its `buckets`; `pipeline` if stages of the model
              are dealt
views         who takes part in `collectives`; `coordinating` decides it
messages      what members tell each other; `actions` what machines are told and want done
member        has an exchange with servers carried out, in any world; collectives and stages are
              carried out by their architectures and by `predict`

No torch, no sockets, no clock. The runtime feeds the machines from the network, the predictor from
a virtual one, tests by hand.
"""

from paceline.protocol.chunks import Chunk, Layout, ParameterSize
from paceline.protocol.exchange import ExchangeMachine
from paceline.protocol.member import Member, World
from paceline.protocol.placement import Seat, cut_and_deal, exchange_seconds, seats
from paceline.protocol.plan import Plan, Rules, Shape, make_plan
from paceline.protocol.seat import SeatMachine

__all__ = [
    "Chunk",
    "ExchangeMachine",
    "Layout",
    "Member",
    "ParameterSize",
    "Plan",
    "Rules",
    "Seat",
    "SeatMachine",
    "Shape",
    "World",
    "cut_and_deal",
    "exchange_seconds",
    "make_plan",
    "seats",
]
