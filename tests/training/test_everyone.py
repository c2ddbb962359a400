"""Numbers over all workers, once one of them is lost."""

from types import SimpleNamespace

import pytest
import torch

from paceline.errors import ExchangeError
from paceline.session.script_group import Everyone


def test_where_servers_outlive_a_loss_a_mean_is_refused_at_once_and_names_the_lost():
    session = SimpleNamespace(
        workers=3,
        members=(0, 2),
        has_joined=False,
        survivors=SimpleNamespace(go_on=False),
        close_to_newcomers=lambda why: None,
    )
    with pytest.raises(ExchangeError, match="worker1 was lost, and here mean"):
        Everyone(session).mean(torch.zeros(1))
