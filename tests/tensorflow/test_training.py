"""Keras on every architecture trains as one worker does on the whole batch, or as its name says."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from paceline import spec
from paceline.testing import run_members

CASES = ["fit:clipped", "fit:momentum", "loop:adam"]
ONES_OWN = ["fit:momentum"]
"""What local steps and one average after each do as one worker: no clipping, no Adam."""

WORKERS = "tests.tensorflow.workers"


def member(name: str) -> Any:
    """Found by the member: this process imports no Keras."""
    return Named(name)


def mean_of_own(session: Any) -> tuple[list[float], list[float]]:
    own = torch.full((1,), float(session.rank), dtype=torch.float64)
    mean = session.group.mean(own)
    return own.tolist(), mean.tolist()


class Named:
    """A function of `workers`, by name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, session: Any, *arguments: Any) -> Any:
        from importlib import import_module

        return getattr(import_module(WORKERS), self._name)(session, *arguments)


@cache
def alone() -> dict[str, Any]:
    cases = [*CASES, "fit:nesterov", "fit:adam"]
    (result,) = run_members(member("train"), cases, workers=1, timeout_seconds=110)
    return result


def apart(case: str, result: dict[str, Any]) -> float:
    """How far the weights of one worker are from those of the plain run, relative to them."""
    pairs = zip(result["weights"], alone()[case]["weights"], strict=True)
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


@pytest.mark.parametrize(
    ("architecture", "servers", "cases"),
    [
        ("ring", 0, CASES),
        ("server", 1, ["fit:clipped"]),
        ("server:placement=colocated", 0, ["fit:clipped", "loop:adam"]),
        ("average", 0, ONES_OWN),
        ("server:placement=colocated,update=server", 0, ["fit:nesterov", "fit:adam"]),
        pytest.param("hybrid", 0, CASES, marks=pytest.mark.slow),
        pytest.param("server:transport=tcp", 2, CASES, marks=pytest.mark.slow),
        pytest.param("server:mode=bounded,staleness=0", 1, ["fit:adam"], marks=pytest.mark.slow),
    ],
)
def test_trains_like_one_worker(architecture, servers, cases):
    results = run_members(
        member("train"),
        cases,
        workers=2,
        servers=servers,
        architecture=spec.parse_architecture(architecture),
        timeout_seconds=110,
    )
    for case in cases:
        for result in results:
            assert apart(case, result[case]) < 1e-4, case
            for name in ("loss", "accuracy"):
                if name in result[case]:
                    assert result[case][name] == pytest.approx(alone()[case][name], rel=1e-4)


def test_a_dropped_gradient_is_noticed():
    """What the test above compares is no longer the same when one worker's part is missing."""
    results = run_members(member("train_without_one"), ["fit:momentum"], workers=2)
    assert min(apart("fit:momentum", result["fit:momentum"]) for result in results) > 1e-2


def test_gradients_leave_while_the_others_are_computed():
    for told in run_members(member("leave"), workers=2):
        assert told == ["taken [2, 3]", "goes on to the first layer", "taken [0, 1]"]


@pytest.mark.parametrize(
    ("architecture", "servers"),
    [
        ("server:mode=async", 1),
        pytest.param("server:mode=bounded,staleness=2", 1, marks=pytest.mark.slow),
        pytest.param("server:mode=quorum,placement=colocated", 0, marks=pytest.mark.slow),
        pytest.param(
            "average:every=4,outer=nesterov,outer_momentum=0.3", 0, marks=pytest.mark.slow
        ),
        pytest.param("average:every=3,overlap=true", 0, marks=pytest.mark.slow),
    ],
)
def test_learns_at_its_own_pace(architecture, servers):
    options = spec.parse_architecture(architecture)
    losses = run_members(
        member("learn"), "adam", 4, workers=2, servers=servers, architecture=options
    )
    for loss in losses:
        assert np.isfinite(loss).all()
        assert loss[-1] < 0.8 * loss[0]
    assert losses[0] == losses[1]  # of all samples, so early stopping decides alike


def test_rules_of_servers_are_keras_own():
    names = ["momentum", "nesterov", "adam", "adamw", "rmsprop", "adagrad"]
    (apart,) = run_members(member("rules"), names, workers=1)
    assert {name: far for name, far in apart.items() if far > 2e-6} == {}


def test_what_servers_cannot_run_is_refused():
    options = spec.parse_architecture("server:mode=async")
    said = run_members(member("refuse"), "lion", workers=2, servers=1, architecture=options)
    assert all("SpecError" in one and "Lion" in one and "mode=sync" in one for one in said)


def test_what_is_done_once_and_what_all_agree_on(tmp_path):
    first, second = run_members(member("callbacks"), str(tmp_path), workers=2)
    assert first["history"] == second["history"]
    assert {"val_loss", "val_accuracy", "loss", "accuracy"} <= set(first["history"])
    assert first["rate"] == pytest.approx(0.02)
    assert first["saved"] == second["saved"] == ["worker0.keras"]


def test_mixed_precision_skips_steps_alike():
    first, second = run_members(member("half_precision"), workers=2)
    assert first["optimizer"] == "LossScaleOptimizer"
    for ours, theirs in zip(first["weights"], second["weights"], strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert np.isfinite(ours).all()


def test_the_mean_of_a_tensor_leaves_it_as_it_was():
    own, mean = run_members(mean_of_own, workers=2)[1]
    assert own == [1.0]
    assert mean == [0.5]


@pytest.mark.parametrize(
    ("how", "architecture"),
    [
        ("kernel", "ring"),
        pytest.param("weights", "server:placement=colocated", marks=pytest.mark.slow),
        pytest.param("weights", "hybrid", marks=pytest.mark.slow),
        pytest.param("kernel", "server:placement=colocated,update=server", marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_changes_its_weights_alone_is_named(how, architecture):
    options = spec.parse_architecture(architecture)
    said = run_members(member("change_alone"), how, workers=2, architecture=options)
    if "update=server" in architecture:
        assert "sequential/dense_1/kernel was assigned to before step 6" in said[1]
        return
    assert said[0] == said[1]
    assert "weights have become different" in said[0]
    assert "by worker1 before step 6" in said[0]


@pytest.mark.parametrize("how", ["unseen", pytest.param("rate", marks=pytest.mark.slow)])
def test_what_no_assignment_tells_is_seen_in_the_weights(how):
    said = run_members(member("change_alone"), how, workers=2)
    assert said[0] == said[1]
    assert "weights have become different" in said[0]


@pytest.mark.slow
def test_what_all_workers_change_alike_is_theirs_to_change():
    assert run_members(member("change_alone"), "all", workers=2) == ["", ""]
