"""The interval of a prediction: which constants it tries, and how often the same is asked."""

import math

import msgspec
import pytest

from paceline import spec
from paceline.predict import answer
from paceline.predict.stacks import expected, find_stack, ranges


def experiment(architecture, link, workers=4, servers=0):
    return spec.from_tables(
        {
            "engine": "predict",
            "workload": {"model": "tutorial-cnn", "data": "synthetic", "batch": 100},
            "architecture": architecture,
            "cluster": {"workers": workers, "servers": servers, "link": link, "device": "gtx980"},
        },
        "test",
    )


def one_by_one(asked):
    """The interval where each end of each constant is tried alone."""
    stack = find_stack("paceline")
    middle = answer.simulate(asked)
    base = answer.simulate(asked, coarse=True).samples_per_second
    waited = middle.phases["exchange_exposed"] / middle.step_seconds
    above = below = stack.model_fraction**2 + (stack.exposed_fraction * waited) ** 2
    tried = [name for name in ranges(stack) if answer._matters(name, asked)]
    for name, end in ((name, ranges(stack)[name][side]) for name in tried for side in (0, 2)):
        if end != getattr(expected(stack), name):
            constants = msgspec.structs.replace(expected(stack), **{name: end})
            found = answer.simulate(asked, None, constants, coarse=True).samples_per_second
            change = math.log(found / base)
            if abs(change) >= answer.CHANCE:
                above += change**2 if change > 0 else 0
                below += change**2 if change < 0 else 0
    best = middle.samples_per_second
    return best * math.exp(-math.sqrt(below)), best * math.exp(math.sqrt(above))


@pytest.mark.parametrize(
    ("architecture", "link", "servers"),
    [
        ("server", "10gbit", 1),  # computing hides all that is in doubt about the exchange
        ("server", "200mbit", 1),  # the link of the server decides
        ("server:mode=async", "500mbit", 1),
        ("ring", "100mbit", 0),
        ("average:every=2", "200mbit", 0),
    ],
)
def test_trying_constants_together_first_changes_no_interval(architecture, link, servers):
    asked = experiment(architecture, link, servers=servers)
    found = answer.predict(asked)
    assert (found.low, found.high) == pytest.approx(one_by_one(asked), rel=2e-3)


def test_the_same_question_is_simulated_once_and_another_again(monkeypatch):
    asked = experiment("server", "1gbit", servers=1)
    first = answer.predict(asked)
    monkeypatch.setattr(answer, "simulate", lambda *a, **k: pytest.fail("simulated again"))
    assert answer.predict(spec.replace(asked, name="again")) is first
    with pytest.raises(pytest.fail.Exception):
        answer.predict(spec.replace(asked, link="2gbit"))
    with pytest.raises(pytest.fail.Exception):
        answer.predict(asked, known=("tcp_fraction",))
