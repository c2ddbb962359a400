"""At which batch of a job a worker begins that joins it, and which jobs it cannot enter."""

import threading

import pytest
from torch.distributed import HashStore

from paceline.errors import ExchangeError, JobOver, SpecError
from paceline.launch import Identity
from paceline.session.join_obstacle import KEY, JoinObstacle
from paceline.session.loader.positions import IRREGULAR, Positions
from paceline.session.participants import Participants

LENGTH = 4
ORDER = range(LENGTH)


class Worker:
    """A worker's positions, and what they look at."""

    def __init__(self, store, rank=0, exclusive=True):
        self.store = store
        identity = Identity(
            index=rank, workers=max(2, rank + 1), servers=1, founders=2 * (rank > 1)
        )
        self.participants = Participants(identity)
        if rank > 1:
            self.participants.members = (0, 1, rank)
        self.obstacle = JoinObstacle()
        self.positions = Positions(self.participants, self.obstacle, store, exclusive=exclusive)

    @property
    def obstacle_told(self):
        """The reason that workers who ask to join are told."""
        self.obstacle.batches_are_divided = True
        self.obstacle.publish(self.participants.identity, self.store)
        return self.store.get(KEY).decode()

    def take(self, batches):
        """One batch for each step, as the loader hands them over."""
        for _ in range(batches):
            self.positions.hand_over(divmod(self.participants.step, LENGTH), ORDER)
            self.participants.step += 1


@pytest.fixture
def founder():
    return Worker(HashStore())


def newcomer(founder, start):
    joined = Worker(founder.store, rank=2)
    joined.participants.begin_at(start)
    return joined


@pytest.mark.parametrize(("done", "begins"), [(3, (0, 3)), (4, (1, 0)), (9, (2, 1))])
def test_one_who_joins_begins_at_the_batch_of_its_first_step(founder, done, begins):
    founder.take(done)
    founder.positions.welcome(2)
    founder.take(1)
    assert newcomer(founder, done).positions.find(LENGTH) == begins


def test_a_script_that_takes_two_batches_a_step_is_closed(founder):
    founder.take(2)
    founder.positions.hand_over((0, 3), ORDER)
    assert founder.obstacle_told == IRREGULAR


def test_one_who_was_let_in_all_the_same_is_refused_by_what_it_is_told(founder):
    founder.positions.welcome(2)
    founder.participants.step = 2
    founder.positions.hand_over((1, 0), ORDER)
    with pytest.raises(SpecError, match="other than one batch for each step"):
        newcomer(founder, 2).positions.find(LENGTH)


def test_a_pass_that_is_broken_off_with_a_newcomer_inside_ends_the_job(founder):
    founder.take(1)
    founder.positions.welcome(2)
    founder.take(1)
    with pytest.raises(ExchangeError, match="breaks off a pass over its loader, and worker2"):
        founder.positions.hand_over((1, 0), ORDER)


def test_a_pass_may_be_broken_off_when_the_newcomer_has_gone(founder):
    founder.take(1)
    founder.positions.welcome(2)
    founder.take(1)
    founder.positions.forget(2)
    founder.positions.hand_over((1, 0), ORDER)
    founder.positions.welcome(3)
    founder.positions.forget(3)
    assert not founder.store.check(["position/3"])


def test_where_everyone_takes_its_own_steps_a_broken_pass_is_its_own(founder):
    own = Worker(founder.store, exclusive=False)
    own.positions.welcome(2)
    own.take(2)
    own.positions.hand_over((1, 0), ORDER)
    assert own.obstacle_told == IRREGULAR


def test_when_all_have_finished_nobody_is_waited_for(founder, capsys):
    store = founder.store
    threading.Timer(0.2, lambda: [store.set(f"ended/worker{r}", "8") for r in (0, 1)]).start()
    with pytest.raises(JobOver) as over:
        newcomer(founder, 8).positions.find(LENGTH)
    assert over.value.code == 0
    assert "the others have finished, and so has worker2" in capsys.readouterr().err


def test_one_that_was_lost_is_not_waited_for_to_have_finished(founder):
    founder.store.set("ended/worker0", "8")
    late = newcomer(founder, 8)
    late.participants.members = (0, 2)
    with pytest.raises(JobOver):
        late.positions.find(LENGTH)


def test_one_that_has_finished_is_not_all(founder):
    founder.store.set("ended/worker0", "8")
    founder.participants.step = 6
    founder.positions.welcome(2)
    threading.Timer(0.2, founder.take, (1,)).start()
    assert newcomer(founder, 6).positions.find(LENGTH) == (1, 2)
