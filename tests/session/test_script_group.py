"""Numbers over all workers, once one of them is lost."""

import pytest
import torch

from paceline.errors import ExchangeError
from paceline.launch import Identity
from paceline.session.join_obstacle import JoinObstacle
from paceline.session.participants import Participants
from paceline.session.script_group import ScriptGroup


def test_where_servers_outlive_a_loss_a_mean_is_refused_at_once_and_names_the_lost():
    participants = Participants(Identity(index=0, workers=3))
    participants.members = (0, 2)
    group = ScriptGroup(participants, JoinObstacle(), pytest.fail, regroups=lambda: False)
    with pytest.raises(ExchangeError, match="worker1 was lost, and here mean"):
        group.mean(torch.zeros(1))
