"""What a member sends on the virtual clock arrives in the order in which it was sent."""

from paceline.predict.clock import Clock
from paceline.predict.links import Links
from paceline.predict.virtual import VirtualJob
from paceline.protocol.actions import Ready, Stepped
from paceline.protocol.messages import Commit, Push
from tests.protocol.network import make


class EncodingTakesASecond:
    """And nothing else takes any time."""

    def payload_bytes(self, send):
        return 64.0

    def sending_seconds(self, send):
        return float(isinstance(send.message, Push))


class Nowhere:
    def __init__(self, clock):
        self.links = Links(clock)

    def path(self, source, target, *, to_seat):
        return ()


def test_what_needs_no_encoding_does_not_overtake_what_does():
    clock, arrived = Clock(), []
    job = VirtualJob(make(1, 1, 1), EncodingTakesASecond(), Nowhere(clock), clock)
    job.members["server0"].arrive = lambda sends: arrived.extend(
        (clock.now, type(send.message)) for send in sends
    )
    job.members["worker0"].member.tell(Ready(0, hold=True))
    job.members["worker0"].member.tell(Stepped())
    clock.run()
    assert arrived == [(1.0, Push), (1.0, Commit)]
