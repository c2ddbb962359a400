"""`server` in its synchronous forms trains like one worker on the whole batch."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from paceline import spec
from paceline.errors import MemberError
from paceline.served import server as serving_side
from paceline.served.updates import ELEMENTWISE, NUMBERS
from paceline.served.weights import ServedWeights
from paceline.session import calls
from paceline.testing import run_members
from tests.support.curves import largest_difference, loss_curve, samples, whole

TIMEOUT_SECONDS = 100.0


def server(text=""):
    """Chunks far smaller than by default, so that even a tiny model has many."""
    return spec.parse_architecture(f"server:chunk=1KiB,{text}")


@pytest.fixture(scope="module")
def reference():
    return whole(run_members(loss_curve, workers=1, timeout_seconds=TIMEOUT_SECONDS))


def run(function, *arguments, workers, servers=0, architecture, timeout=TIMEOUT_SECONDS):
    return run_members(
        function,
        *arguments,
        workers=workers,
        servers=servers,
        architecture=architecture,
        timeout_seconds=timeout,
    )


@pytest.mark.parametrize(
    ("text", "workers", "servers"),
    [
        ("placement=colocated", 1, 0),
        ("placement=colocated", 2, 0),
        ("placement=colocated", 4, 0),
        ("placement=colocated,transport=tcp", 2, 0),
        ("placement=dedicated", 2, 1),
        ("placement=dedicated", 1, 4),
        ("placement=dedicated,transport=tcp", 3, 2),
        ("placement=optimal", 3, 1),
        ("placement=optimal,transport=tcp,window=1", 3, 2),
        ("placement=colocated,update=worker", 2, 0),
        ("placement=dedicated,update=worker,transport=tcp", 2, 1),
        ("mode=bounded,staleness=0", 2, 1),
        ("mode=bounded,staleness=0,placement=colocated,transport=tcp", 2, 0),
        ("mode=quorum,quorum=2", 2, 1),
    ],
)
def test_follows_single_on_the_same_global_batch(text, workers, servers, reference):
    parts = run(loss_curve, workers=workers, servers=servers, architecture=server(text))
    assert largest_difference(whole(parts), reference) < 1e-4


def test_uneven_shares_give_the_whole_batch_gradient(reference):
    parts = run(loss_curve, [3.0, 1.0], workers=2, architecture=server("placement=colocated"))
    assert largest_difference(whole(parts), reference) < 1e-4


def train_on_own_gradient(session):
    """What a broken server would do: use the first worker's gradient for the mean."""
    serving_side.mean = lambda parts, into: real_mean([(parts[0][0], 1.0)], into)
    return loss_curve(session)


real_mean = serving_side.mean


def test_the_comparison_notices_gradients_that_are_not_averaged(reference):
    parts = run(train_on_own_gradient, workers=2, architecture=server("placement=colocated"))
    assert largest_difference(whole(parts), reference) > 1e-3


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


def model_with_everything():
    """Batch norm, a frozen, an unused and a tied parameter, and channels-last convolutions."""
    torch.manual_seed(5)
    model = Everything()
    return model.to(memory_format=torch.channels_last)


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.mix = nn.Conv2d(8, 4, 1)
        self.frozen = nn.Linear(80, 20)
        self.frozen.requires_grad_(False)
        self.down, self.up = nn.Linear(20, 20), nn.Linear(20, 20)
        self.up.weight = self.down.weight
        self.unused = nn.Linear(30, 7)
        self.out = nn.Linear(20, 3)

    def forward(self, inputs):
        pictures = inputs.view(-1, 1, 4, 5).contiguous(memory_format=torch.channels_last)
        hidden = self.mix(torch.relu(self.norm(self.conv(pictures))))
        hidden = self.frozen(hidden.flatten(1))
        return self.out(self.up(torch.tanh(self.down(hidden))))


def every_optimizer(session, steps):
    """Losses and final weights of each optimizer, on the same whole batch on every worker."""
    inputs, targets = samples()
    results = {}
    for name, make in OPTIMIZERS.items():
        model = model_with_everything()
        weights = [p for n, p in model.named_parameters() if p.requires_grad and "bias" not in n]
        biases = [p for n, p in model.named_parameters() if p.requires_grad and "bias" in n]
        optimizer = make([{"params": weights}, {"params": biases, "weight_decay": 0.0}])
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        model, optimizer = session.distribute(model, optimizer)
        losses = []
        for _ in range(steps):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        state = plain(model.state_dict())
        moments = plain(optimizer.state_dict())
        results[name] = losses, state, moments
    return results


def plain(value):
    """The same without tensors, which do not outlive the process that made them."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    return value.tolist() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("text", ["placement=colocated", "placement=colocated,transport=tcp"])
def test_every_optimizer_group_schedule_and_kind_of_parameter(text):
    expected = run(every_optimizer, 6, workers=1, architecture=spec.Single())[0]
    for results in run(every_optimizer, 6, workers=2, architecture=server(text)):
        for name, (losses, state, moments) in expected.items():
            found, found_state, found_moments = results[name]
            np.testing.assert_allclose(found, losses, rtol=2e-4, err_msg=name)
            for key, value in state.items():
                np.testing.assert_allclose(found_state[key], value, rtol=1e-3, atol=1e-5)
            assert found_moments["param_groups"] == moments["param_groups"]
            for index, entry in moments["state"].items():
                for key, value in entry.items():
                    if value == 0:  # steps of a parameter that is never used
                        continue
                    there = found_moments["state"][index][key]
                    np.testing.assert_allclose(there, value, rtol=2e-3, atol=1e-5, err_msg=key)


def clipped(session, max_norm, accumulate):
    """Clipping and gradient accumulation in one loop, through the public calls."""
    inputs, targets = samples()
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model, optimizer = session.distribute(model, optimizer)
    losses = []
    for step in range(8):
        batch = torch.arange(24) + 24 * step
        own = batch[session.rank :: session.workers]
        optimizer.zero_grad()
        parts = own.chunk(accumulate)
        for number, part in enumerate(parts):
            loss = nn.functional.cross_entropy(model(inputs[part]), targets[part]) / accumulate
            if number < len(parts) - 1:
                with calls.no_sync():
                    loss.backward()
            else:
                loss.backward()
        if max_norm and step % 3 == 0:  # in step 1, 4 … nothing is clipped
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        elif max_norm and step % 3 == 2:
            calls.clip_grad_norm_(max_norm)
        optimizer.step()
        session.architecture.settle()
        with torch.no_grad():
            losses.append(nn.functional.cross_entropy(model(inputs), targets).item())
    return losses


@pytest.mark.parametrize(
    "text", ["placement=colocated", "transport=tcp", "placement=colocated,update=worker"]
)
@pytest.mark.parametrize(("max_norm", "accumulate"), [(0.05, 1), (0.05, 3), (0.0, 2)])
def test_clipping_and_accumulation(text, max_norm, accumulate, plain_losses):
    servers = 0 if "colocated" in text else 1
    found = run(
        clipped, max_norm, accumulate, workers=2, servers=servers, architecture=server(text)
    )
    expected = plain_losses[max_norm, accumulate]
    np.testing.assert_allclose(found[0], expected, rtol=1e-4)
    np.testing.assert_allclose(found[1], expected, rtol=1e-4)


@pytest.fixture(scope="module")
def plain_losses():
    cases = [(0.05, 1), (0.05, 3), (0.0, 2)]
    losses = {case: run(clipped, *case, workers=1, architecture=spec.Single())[0] for case in cases}
    assert losses[0.05, 1] != losses[0.0, 2], "the bound is so large that nothing is clipped"
    return losses


def save_and_resume(session):
    """Train, save, train on; then load into a fresh start of the same and train on again."""
    inputs, targets = samples()
    model = nn.Linear(20, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    model, optimizer = session.distribute(model, optimizer)

    def train(steps):
        losses = []
        for _ in range(steps):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    train(3)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    first = train(3)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    return first, train(3)


@pytest.mark.parametrize("update", ["worker", "server"])
@pytest.mark.parametrize("text", ["placement=colocated", "placement=colocated,transport=tcp"])
def test_saved_weights_and_state_resume_the_same_curve(text, update):
    architecture = server(f"{text},update={update}")
    for first, again in run(save_and_resume, workers=2, architecture=architecture):
        np.testing.assert_allclose(again, first, rtol=1e-5)


def half_precision(session):
    inputs, targets = samples()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 3).to(torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = session.distribute(model, optimizer)
    losses = []
    for _ in range(20):
        hidden = model[1](model[0](inputs)).to(torch.bfloat16)
        loss = nn.functional.cross_entropy(model[2](hidden).float(), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.architecture.settle()
        losses.append(loss.item())
    return losses


def test_mixed_kinds_of_numbers_train():
    expected = run(half_precision, workers=1, architecture=spec.Single())[0]
    found = run(half_precision, workers=2, architecture=server("placement=colocated"))[0]
    np.testing.assert_allclose(found, expected, rtol=0.02)
    assert found[-1] < found[0]


def with_sparse_gradients(session):
    model = nn.Embedding(10, 3, sparse=True)
    session.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))


def with_different_models(session):
    model = nn.Linear(20, 3 + session.rank)
    session.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))


def take_steps(session, before_second_step):
    """Take a plain first step, and something else in the second; return the weights."""
    torch.manual_seed(1)
    model = nn.Linear(20, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.distribute(model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 20)).sum().backward()
        if step == 1:
            before_second_step(model, optimizer)
        optimizer.step()
    session.architecture.settle()
    return model.weight.tolist()


def with_a_second_backward(session):
    return take_steps(session, lambda model, _: model(torch.ones(4, 20)).sum().backward())


def with_gradients_read(session):
    return take_steps(session, lambda model, _: model.weight.grad.abs().mean())


def with_gradients_scaled(session):
    return take_steps(session, lambda model, _: model.weight.grad.mul_(0.5))


def with_gradients_replaced(session):
    return take_steps(session, lambda model, _: setattr(model.weight, "grad", torch.ones(3, 20)))


def with_gradients_cleared(session):
    return take_steps(session, lambda _, optimizer: optimizer.zero_grad())


def with_a_rate_changed_late(session):
    return take_steps(session, lambda _, optimizer: optimizer.param_groups[0].update(lr=0.01))


def with_weights_read_early(session):
    return take_steps(session, lambda model, _: model.weight.norm())


def with_weights_changed_by_one(session):
    def change(model, optimizer):
        if session.rank == 1:
            optimizer.step()
            model.weight.data.mul_(0.5)
            optimizer.zero_grad()
            model(torch.ones(4, 20)).sum().backward()
        else:
            optimizer.step()
            optimizer.zero_grad()
            model(torch.ones(4, 20)).sum().backward()

    return take_steps(session, change)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("function", "told"),
    [
        (with_a_second_backward, "no_sync"),
        (with_gradients_read, "update=worker"),
        (with_gradients_scaled, "update=worker"),
        (with_gradients_replaced, "update=worker"),
        (with_gradients_cleared, "update=worker"),
        (with_a_rate_changed_late, "as schedulers do"),
        (with_weights_changed_by_one, "changes weights outside the optimizer"),
        (with_sparse_gradients, "sparse=False"),
        (with_different_models, "differs from worker 0's"),
    ],
)
def test_what_servers_that_update_cannot_serve_is_refused(function, told, transport):
    text = f"placement=colocated,update=server,transport={transport}"
    with pytest.raises(MemberError, match=told):
        run(function, workers=2, architecture=server(text))


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (with_weights_changed_by_one, "weights have become different"),
        (with_sparse_gradients, "sparse=False"),
        (with_different_models, "differs from worker 0's"),
    ],
)
def test_what_no_exchange_can_serve_is_refused(function, told):
    with pytest.raises(MemberError, match=told):
        run(function, workers=2, architecture=server("placement=colocated"))


@pytest.mark.parametrize(
    "function",
    [
        with_a_second_backward,
        with_gradients_read,
        with_gradients_scaled,
        with_gradients_replaced,
        with_gradients_cleared,
        with_a_rate_changed_late,
        with_weights_read_early,
    ],
)
def test_where_workers_update_such_scripts_train_as_alone(function):
    alone = run(function, workers=1, architecture=spec.Single())[0]
    found = run(function, workers=2, architecture=server("placement=colocated,update=worker"))
    for weights in found:
        np.testing.assert_allclose(weights, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ELEMENTWISE.values(), ids=ELEMENTWISE)
def test_the_names_of_numbers_tell_state_of_elements_apart(kind):
    parameter = nn.Parameter(torch.ones(3))
    optimizer = kind([parameter], lr=0.1)
    parameter.grad = torch.ones(3)
    optimizer.step()
    sizes = {name: t.numel() for name, t in optimizer.state[parameter].items() if t is not None}
    assert sizes == {name: 1 if name in NUMBERS else 3 for name in sizes}


@pytest.mark.parametrize("kept", [lambda weights: weights, lambda weights: weights.data])
@pytest.mark.parametrize("use", [copy.deepcopy, pickle.dumps, torch.clone])
def test_who_copies_weights_or_what_was_kept_of_them_waits_for_their_values(use, kept):
    weights, read = nn.Parameter(torch.zeros(3)), []
    served = ServedWeights([weights], before_read=read.append, before_write=lambda: None)
    served.install([torch.ones(3)])
    held = kept(weights)
    read.clear()
    use(held)
    assert read[0] == 0
