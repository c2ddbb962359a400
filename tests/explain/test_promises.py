"""What `explain` promises is what the predictor, which runs the protocol's machines, then finds."""

import msgspec
import pytest

from paceline import engines, spec
from paceline.explain import explain

pytestmark = pytest.mark.quiet


def predicted(path, change=None, **cluster):
    tables = {
        "engine": "predict",
        "architecture": cluster.pop("architecture"),
        "workload": {"model": "resnet50", "data": "synthetic", "batch": 32, "steps": 12},
        "cluster": {"device": "k80", "link": "1gbit", **cluster},
    }
    experiment = spec.from_tables(tables, "test")
    return explain(engines.run(spec.replace(experiment, **(change or {})), path))


@pytest.mark.parametrize(
    ("question", "advice"),
    [
        ({"architecture": "ring", "workers": 2}, "raise the batch to 64"),
        ({"architecture": "ring", "workers": 4}, "raise the batch to 64"),
        pytest.param(
            {"architecture": "server", "workers": 2, "servers": 1},
            "use 2 servers",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"architecture": "server", "workers": 4, "servers": 1},
            "use 4 servers",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["batch-of-two", "batch-of-four", "second-server", "four-servers"],
)
def test_the_gain_is_in_its_range(tmp_path, question, advice):
    before = predicted(tmp_path / "before", **question)
    action = next(action for action in before.actions if advice in action.text)
    after = predicted(tmp_path / "after", msgspec.to_builtins(action.change), **question)
    gain = after.samples_per_second / before.samples_per_second - 1
    assert action.gain.low <= gain <= action.gain.high
