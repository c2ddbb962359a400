"""Chakra traces, read back by a reader of protocol buffers that knows nothing of ours."""

import pytest

from paceline.errors import SpecError
from paceline.predict.answer import simulate
from paceline.predict.chakra import write_traces
from tests.predict.test_answers import asked


def varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value, at, shift = value | (byte & 0x7F) << shift, at + 1, shift + 7
        if byte < 0x80:
            return value, at


def fields(data: bytes) -> list[tuple[int, int | bytes]]:
    found, at = [], 0
    while at < len(data):
        key, at = varint(data, at)
        value, at = varint(data, at)
        if key & 7 == 2:
            found.append((key >> 3, data[at : at + value]))
            at += value
        else:
            assert key & 7 == 0
            found.append((key >> 3, value))
    return found


def messages(data: bytes) -> list[list[tuple[int, int | bytes]]]:
    found, at = [], 0
    while at < len(data):
        size, at = varint(data, at)
        found.append(fields(data[at : at + size]))
        at += size
    return found


def attributes(node) -> dict[str, int]:
    pairs = [dict(fields(content)) for number, content in node if number == 10]
    return {pair.pop(1).decode(): next(iter(pair.values())) for pair in pairs}


def test_a_trace_holds_the_step_that_was_predicted(tmp_path):
    experiment = asked(workers=3)
    files = write_traces(experiment, tmp_path)
    assert [file.name for file in files] == ["step.0.et", "step.1.et", "step.2.et"]
    metadata, *nodes = messages(files[0].read_bytes())
    assert metadata == [(1, b"0.0.4")]
    outcome = simulate(experiment)
    seconds = sum(value for node in nodes for number, value in node if number == 7) / 1e6
    computing = sum(outcome.phases[name] for name in ("forward", "backward", "update"))
    assert seconds == pytest.approx(computing, rel=0.01)
    sent = [attributes(node)["comm_size"] for node in nodes if (3, 7) in node]
    assert len(sent) > 2
    assert sum(sent) == pytest.approx(102e6, rel=0.01)  # ResNet-50's gradients
    numbers = [dict(node)[1] for node in nodes]
    for number, node in zip(numbers, nodes, strict=True):  # each waits for earlier ones only
        after = [value for field, value in node if field == 5]
        assert all(other in numbers and other < number for other in after)
        assert after or number == 1


def test_servers_are_refused(tmp_path):
    with pytest.raises(SpecError, match="server has no collective"):
        write_traces(asked("server", 2, 1), tmp_path)
