"""What `base.Architecture` promises, held against every entry of the table.

A new architecture is tested by being listed: how many processes it takes, whether it has servers,
takes any script and trains like `single`, its spec says.
"""

import inspect
import math
from importlib import import_module
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from paceline import spec
from paceline.architectures.base import Architecture
from paceline.errors import MemberError
from paceline.predict.model import model_of
from paceline.testing import run_members

SECONDS, STEPS, BATCH = 100.0, 6, 8
NAMES = sorted(set(spec.ARCHITECTURES) - {"auto"})
VARIANTS = {name: spec.ARCHITECTURES[name]() for name in NAMES}
VARIANTS["server:mode=async"] = spec.parse_architecture("server:mode=async")
VARIANTS["hybrid:between=server"] = spec.parse_architecture("hybrid:between=server")
TAKING_SCRIPTS = sorted(name for name, options in VARIANTS.items() if options.takes_scripts)


def run(options, function=None):
    """Two workers where it may have several, and a server where it may have one."""
    workers = 1 if options.is_one_process else 2
    servers = 1 if options.takes_servers and workers > 1 else 0
    return run_members(
        function or live,
        workers=workers,
        servers=servers,
        architecture=options,
        timeout_seconds=SECONDS,
    )


def samples(workers, rank):
    """This worker's equal part of each step's batch."""
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(STEPS, workers, BATCH // workers, 5, generator=generator)
    targets = torch.sin(inputs.sum(-1, keepdim=True))
    return inputs[:, rank], targets[:, rank]


def live(session):
    """One worker's life with an architecture: what it saw."""
    torch.manual_seed(session.rank)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.BatchNorm1d(7), nn.Linear(7, 1))
    own = [*model.parameters()]
    optimizer = torch.optim.SGD(own, lr=0.05, momentum=0.9)
    distributed, chosen = session.distribute(model, optimizer)
    architecture = session.architecture
    seen = {
        "same objects": distributed is model and chosen is optimizer,
        "same parameters": all(a is b for a, b in zip(own, model.parameters(), strict=True)),
        "start": _numbers(model),
        "buffers": [b.tolist() for b in model.buffers()],
    }
    inputs, targets = samples(session.workers, session.rank)
    for step in range(STEPS):
        halves = zip(inputs[step].chunk(2), targets[step].chunk(2), strict=True)
        optimizer.zero_grad()
        for number, (x, y) in enumerate(halves):
            model[2].eval()  # its batches differ, and so would its statistics
            loss = nn.functional.mse_loss(model(x), y) / 2
            if number == 0:
                with architecture.no_sync():
                    loss.backward()
            else:
                loss.backward()
        seen["norm"] = float(architecture.clip(0.5))
        optimizer.step()
    architecture.settle()
    seen["end"] = _numbers(model)
    seen["counters"] = msgspec.json.encode(architecture.counters()).decode()
    architecture.close(failed=False)
    session.distribution.architectures.clear()
    return seen


def _numbers(model):
    return [value for p in model.parameters() for value in p.detach().flatten().tolist()]


@pytest.fixture(scope="module")
def alone():
    (seen,) = run(spec.Single())
    return seen


@pytest.mark.parametrize("name", TAKING_SCRIPTS)
def test_an_architecture_keeps_its_promises(name, alone):
    options = VARIANTS[name]
    found = run(options)
    for seen in found:
        assert seen["same objects"], "the script's model and optimizer stay its own"
        assert seen["same parameters"]
        assert seen["start"] == found[0]["start"], "every worker starts from worker 0's numbers"
        assert seen["start"] == alone["start"]
        assert seen["buffers"] == found[0]["buffers"]
        assert seen["end"] != seen["start"], "it trains"
        assert all(math.isfinite(value) for value in seen["end"])
        assert seen["norm"] > 0
        if options.exclusive:
            assert seen["end"] == pytest.approx(alone["end"], abs=1e-5), "as one worker would"


@pytest.mark.parametrize("name", sorted(set(VARIANTS) - set(TAKING_SCRIPTS)))
def test_one_that_cannot_take_a_script_refuses_it(name):
    with pytest.raises(MemberError, match="SpecError") as raised:
        run(VARIANTS[name])
    assert "fix: " in str(raised.value)


def test_the_page_that_says_how_to_add_one_tells_every_fact():
    page = Path(__file__).parents[2] / "docs" / "adding-an-architecture.md"
    facts = [name for name in vars(spec.ArchitectureFacts) if not name.startswith("_")]
    assert {"exclusive", "takes_scripts", "rounds"} <= set(facts)
    text = page.read_text(encoding="utf-8")
    assert [name for name in facts if f"| `{name}` |" not in text] == []


def test_an_architecture_that_takes_servers_says_what_they_run():
    for options in VARIANTS.values():
        assert bool(options.served_by) or not options.takes_servers


@pytest.mark.parametrize("name", NAMES)
def test_the_code_that_an_architecture_names_is_there_and_says_what_it_is(name):
    options = VARIANTS[name]
    for place in filter(None, (options.built_by, options.served_by)):
        module, _, attribute = place.partition(":")
        assert import_module(module).__doc__
        assert callable(getattr(import_module(module), attribute))
    if options.predicted_by:
        assert model_of(options).step


@pytest.mark.parametrize("name", NAMES)
def test_the_two_facts_without_a_default_are_stated(name):
    assert VARIANTS[name].waits_for_all in (True, False)
    assert VARIANTS[name].exclusive in (True, False)


@pytest.mark.parametrize("name", NAMES)
def test_the_promised_methods_are_there_as_promised(name):
    """Classes in the table have them by themselves; functions say that they return one."""
    module, _, attribute = spec.ARCHITECTURES[name].built_by.partition(":")
    entry = getattr(import_module(module), attribute)
    if not isinstance(entry, type):
        assert inspect.signature(entry).return_annotation is Architecture
        return
    promised = {n: f for n, f in vars(Architecture).items() if inspect.isfunction(f)}
    for method in (n for n in promised if not n.startswith("_")):
        ours, theirs = inspect.signature(promised[method]), getattr(entry, method)
        assert list(inspect.signature(theirs).parameters) == list(ours.parameters)
