"""docs/architecture.md lists the files that a gradient passes through, and no others."""

import re
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline import spec
from paceline.testing import run_members

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
STEPS = 3


def files_of_a_pass(session):
    """The package's files whose functions run in a backward pass, in any thread."""
    seen, is_on = set(), [False]

    def notice(frame, event, _argument):
        if event == "call" and is_on[0]:
            _, package, file = frame.f_code.co_filename.partition("/paceline/")
            seen.update([file] if package else [])

    threading.setprofile(notice)  # threads begin in `distribute`
    model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session.distribute(model, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 300)).sum()
        is_on[0] = step == STEPS - 1
        sys.setprofile(notice if is_on[0] else None)
        loss.backward()
        sys.setprofile(None)
        is_on[0] = False
        optimizer.step()
    return seen


def listed():
    """The files of the page's two tables: of `ring`, and those that servers have instead."""
    section = PAGE.read_text(encoding="utf-8").partition("### The way of a gradient")[2]
    ring, servers = section.partition("Where servers update")[0].split("With dedicated servers")
    of_ring, of_servers = (set(re.findall(r"`(\w+/\w+\.py)`", part)) for part in (ring, servers))
    return of_ring, of_servers


@pytest.mark.parametrize(
    ("architecture", "served"),
    [("ring", False), ("server:placement=colocated,transport=tcp", True)],
)
def test_a_gradient_passes_through_the_files_that_the_page_lists(architecture, served):
    ring, servers = listed()
    expected = ring - {"collectives/collective.py", "collectives/group.py"} | servers
    found = run_members(
        files_of_a_pass, workers=2, architecture=spec.parse_architecture(architecture)
    )
    assert set().union(*found) == (expected if served else ring)
