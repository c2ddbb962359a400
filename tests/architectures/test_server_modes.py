"""Asynchronous, bounded and quorum servers learn real digits, and count what they did."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import paceline
from paceline import data, models, spec
from paceline.errors import MemberError, SpecError
from paceline.testing import run_members
from tests.support.curves import loss_curve, whole

WORKERS, BATCH, EPOCHS = 4, 64, 4


def learn_digits(session, folder, slow_worker):
    """Train MNIST-DNN on this worker's quarter; accuracy on the test set, and the counters."""
    train = data.open("mnist", data_dir=Path(folder))
    model = models.build("mnist-dnn")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    model, optimizer = session.distribute(model, optimizer)
    own = np.arange(session.rank, len(train), session.workers)
    generator = np.random.default_rng(session.rank)
    steps = EPOCHS * len(own) // BATCH
    for step in range(steps // 2 if session.rank == slow_worker else steps):
        indices = generator.choice(own, BATCH, replace=False)
        inputs, targets = train.batch(indices)
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 3 * steps // 4:
            for group in optimizer.param_groups:
                group["lr"] *= 0.2
    session.architecture.settle()
    test = data.open("mnist", data_dir=Path(folder), train=False)
    inputs, targets = test.batch(np.arange(len(test)))
    with torch.no_grad():
        accuracy = (model(inputs).argmax(dim=1) == targets).float().mean().item()
    return accuracy, session.architecture.counters()


@pytest.mark.parametrize(
    ("text", "servers"),
    [
        ("mode=async,placement=colocated", 0),
        pytest.param("mode=bounded,staleness=2", 1, marks=pytest.mark.slow),
        pytest.param("mode=quorum,quorum=3,placement=colocated", 0, marks=pytest.mark.slow),
        pytest.param("mode=async,transport=tcp", 1, marks=pytest.mark.slow),
    ],
)
def test_learns_digits_with_four_workers(shared_data, text, servers):
    results = run_members(
        learn_digits,
        str(shared_data / "mnist"),
        2,
        workers=WORKERS,
        servers=servers,
        architecture=spec.parse_architecture(f"server:{text}"),
        timeout_seconds=110,
    )
    accuracies = [accuracy for accuracy, _ in results]
    assert accuracies[0] >= 0.96
    if not servers:
        counters = results[0][1]
        staleness = counters["staleness"]["worker0"]
        assert sum(staleness.values()) > 0
        if "quorum" in text:
            told = sum(c["late_chunks"] for _, c in results)
            counted = sum(sum(c["late_gradients"].values()) for _, c in results)
            assert told == counted > 0
        else:
            assert max(staleness) > 0, "nobody was ever behind: not asynchronous"


def record_counters(session):
    losses = loss_curve(session)
    return losses, session.architecture.counters()


def test_bounded_staleness_is_bounded_and_measured():
    architecture = spec.parse_architecture("server:mode=bounded,staleness=2,placement=colocated")
    results = run_members(record_counters, workers=2, architecture=architecture)
    measured = [s for _, c in results for worker in c["staleness"].values() for s in worker]
    assert max(measured) <= 2
    losses = whole([losses for losses, _ in results])
    assert losses[-5:].mean() < losses[:5].mean()


def follow_a_schedule(session, rates, last):
    """Gradients of one everywhere: what a weight loses is the sum of the rates its updates used."""
    model = nn.Linear(8, 4, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = session.distribute(model, optimizer)
    for step, rate in enumerate(rates):
        if step == 0 and session.rank == last:  # the other is as far ahead as it may be
            session.store.wait(["ahead"])
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        if step == 2 and session.rank != last:
            session.store.set("ahead", "yes")
    session.architecture.settle()
    return model.weight.flatten().tolist()


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("place", ["placement=colocated", "transport=tcp"])
def test_bounded_updates_each_step_by_its_own_settings(place, last):
    rates = [1.0, 10.0, 100.0, 1000.0]
    settled = [0.0] * 3  # what is updated last need not have come back
    for weights in run_members(
        follow_a_schedule,
        [*rates, *settled],
        last,
        workers=2,
        servers=int(place == "transport=tcp"),
        architecture=spec.parse_architecture(f"server:mode=bounded,staleness=2,{place}"),
    ):
        assert set(weights) == {-sum(rates)}


def step_late(session, optimizer_name):
    """Gradients of one everywhere: what a weight has lost in the end, and how old gradients were.

    Worker 1 makes its first gradient before worker 0's updates and sends it after them.
    """
    model = nn.Linear(8, 4, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = getattr(torch.optim, optimizer_name)(model.parameters(), lr=1.0)
    model, optimizer = session.distribute(model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 8)).sum()
        if step == 0 and session.rank == 1:
            session.store.wait(["ahead"])
        loss.backward()
        optimizer.step()
    session.architecture.settle()
    lost = -model.weight.flatten()[0].item()
    session.store.set("done" if session.rank else "ahead", "yes")
    session.store.wait(["done"])
    return lost, session.architecture.counters()


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_a_staleness_aware_rate_holds_for_optimizers_that_ignore_a_gradients_size(optimizer):
    """Each update of Adam moves a weight by the rate, however small its gradient is scaled."""
    kind = "server:mode=async,staleness_aware=true,placement=colocated"
    architecture = spec.parse_architecture(kind)
    results = run_members(step_late, optimizer, workers=2, architecture=architecture)
    behind = [
        (age, count)
        for _, counters in results
        for ages in counters["staleness"].values()
        for age, count in ages.items()
    ]
    assert max(age for age, _ in behind) >= 3
    lost = results[1][0]
    assert lost == pytest.approx(sum(count / (1 + age) for age, count in behind), rel=1e-3)


def test_shares_are_recorded_beside_what_was_summed():
    architecture = spec.parse_architecture("server:placement=colocated,chunk=1KiB")
    results = run_members(record_counters, workers=2, architecture=architecture)
    counters = [c for _, c in results]
    assert sum(c["served_fraction"] for c in counters) == pytest.approx(1)
    for c in counters:
        assert c["summed_bytes"] == 2 * 50 * c["served_bytes"]
        assert c["busy_seconds"] > 0
        assert c["queueing_seconds"] > 0


@pytest.mark.parametrize("compression", ["fp16", "bf16", "int8", "topk"])
def test_compressed_gradients_train(compression):
    text = f"server:transport=tcp,placement=colocated,chunk=1KiB,compression={compression}"
    text += ",topk_fraction=0.2" if compression == "topk" else ""
    results = run_members(record_counters, workers=2, architecture=spec.parse_architecture(text))
    losses = whole([losses for losses, _ in results])
    assert losses[-5:].mean() < 0.5 * losses[:5].mean()
    for _, counters in results:
        assert 0 < counters["compression_encoded_bytes"] < counters["compression_raw_bytes"]
        assert counters["compression_seconds"] > 0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("mode=async,update=worker,placement=colocated", "drift apart"),
        ("mode=quorum,quorum=5,placement=colocated", "quorum = 5 of 2"),
        ("compression=int8,placement=colocated", "transport=tcp"),
    ],
)
def test_options_that_contradict_each_other_are_refused(text, told):
    with pytest.raises((MemberError, SpecError), match=told):
        run_members(loss_curve, workers=2, architecture=spec.parse_architecture(f"server:{text}"))


def one_never_pushes(session):
    model = nn.Linear(20, 3)
    model, optimizer = session.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        if step == 1:  # all have met, and have what they need: only now is anybody impatient
            session.architecture.settle()
            session.architecture._collective._worker._deadline_seconds = 3.0
        if session.rank == 1 and step == 1:
            time.sleep(60)
        model(torch.ones(4, 20)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("text", ["placement=colocated", "transport=tcp,placement=colocated"])
def test_a_hang_names_the_step_and_who_is_missing(text):
    with pytest.raises(MemberError) as caught:
        run_members(
            one_never_pushes, workers=2, architecture=spec.parse_architecture(f"server:{text}")
        )
    assert caught.value.member == "worker0"
    assert "missing: worker1" in str(caught.value)
    assert "step 2" in str(caught.value)


def compiled(session, before):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if before:
        model = torch.compile(model, backend="eager")
    model, optimizer = session.distribute(model, optimizer)
    if not before:
        model = torch.compile(model, backend="eager")
    losses = []
    for _ in range(5):
        loss = model(torch.ones(4, 20)).pow(2).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("before", [True, False])
def test_compiled_models_train_alike(before):
    architecture = spec.parse_architecture("server:placement=colocated,chunk=1KiB")
    expected = run_members(compiled, True, workers=1, architecture=spec.Single())[0]
    for losses in run_members(compiled, before, workers=2, architecture=architecture):
        np.testing.assert_allclose(losses, expected, rtol=1e-4)


def count_down(session):
    """Ten steps, each of which takes exactly one away."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = session.distribute(model, optimizer)
    for _ in range(10):
        optimizer.zero_grad()
        model.weight.sum().backward()
        optimizer.step()
    session.architecture.settle()
    own = model.weight.item()
    paceline.barrier()
    session.architecture.settle()
    return own, model.state_dict()["weight"].item()


@pytest.mark.parametrize("servers", [0, 1])
@pytest.mark.parametrize(
    ("mode", "all_steps"),
    [("bounded,staleness=2", -10), ("bounded,staleness=5", -10), ("async", -20)],
)
def test_what_is_settled_has_every_step_of_ones_own_and_then_of_all(mode, all_steps, servers):
    placement = "dedicated" if servers else "colocated"
    architecture = spec.parse_architecture(f"server:mode={mode},placement={placement}")
    results = run_members(count_down, workers=2, servers=servers, architecture=architecture)
    assert all(own <= -10 for own, _ in results)
    assert [last for _, last in results] == [all_steps] * 2
