"""A predicted step as a timeline."""

import json
from itertools import pairwise

import pytest

from paceline.predict.answer import simulate
from paceline.predict.timeline import Timeline
from tests.predict.test_answers import asked


@pytest.mark.parametrize(("architecture", "servers"), [("server", 1), ("ring", 0)])
def test_a_timeline_holds_the_computing_and_the_messages_of_a_step(tmp_path, architecture, servers):
    drawn = Timeline()
    found = simulate(asked(architecture, 2, servers, link="1gbit"), timeline=drawn)
    drawn.write(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [event for event in events if event["ph"] == "X"]
    devices = [event for event in spans if lanes[event["pid"], event["tid"]] == "device"]
    carried = [event for event in spans if event not in devices]
    assert {"forward", "backward"} <= {event["name"] for event in devices}
    assert carried
    steps = (len(drawn.step_ends) and 2) or 1
    worker = min(event["pid"] for event in devices)
    passes = [e["dur"] for e in devices if e["name"] == "backward" and e["pid"] == worker]
    backward = sum(passes) / steps
    assert backward == pytest.approx(found.phases["backward"] * 1e6, rel=0.01)
    for lane in set(lanes):  # a device and a connection do one thing at a time
        own = sorted((e["ts"], e["dur"]) for e in spans if (e["pid"], e["tid"]) == lane)
        assert all(a + b <= later + 1 for (a, b), (later, _) in pairwise(own))


def test_nothing_changes_when_somebody_looks():
    experiment = asked("server", 3, 1)
    assert simulate(experiment, timeline=Timeline()) == simulate(experiment)
