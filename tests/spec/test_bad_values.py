"""Every field of an experiment file with values it cannot mean: a SpecError or a meaning."""

from collections.abc import Iterator

import msgspec
import pytest

from paceline import spec
from paceline.errors import SpecError

VALUES = {
    "text": "no such thing",
    "nothing": "",
    "negative": -1,
    "negative fraction": -0.5,
    "zero": 0,
    "infinite": float("inf"),
    "no number": float("nan"),
    "huge": 10**30,
    "a list": [1, "x", None],
    "a table": {"x": 1},
    "truth": True,
}
PARTS = {
    "workload": spec.Workload,
    "cluster": spec.Cluster,
    "measurement": spec.Measurement,
    "prediction": spec.Prediction,
}


def tables() -> Iterator[tuple[str, str, dict[str, object]]]:
    for what, value in VALUES.items():
        for name in spec.Experiment.__struct_fields__:
            nested = what == "a table" and name == "settings"  # which is a table of plain values
            yield name, what, {name: {"x": value} if nested else value}
        for part, kind in PARTS.items():
            for field in kind.__struct_fields__:
                yield f"{part}.{field}", what, {part: {field: value}}
        for field in ("name", "learning_rate", "momentum", "nesterov", "weight_decay", "trust"):
            yield f"optimizer.{field}", what, {"workload": {"optimizer": {field: value}}}
        for field in ("name", "warmup_steps", "every_steps", "factor", "base_batch"):
            yield f"schedule.{field}", what, {"workload": {"schedule": {field: value}}}
        for field in ("count", "workers", "servers", "link", "slowdown", "jitter_fraction"):
            yield f"hosts.{field}", what, {"cluster": {"hosts": [{field: value}]}}
        fault = {"member": "worker0", "at_step": 1, "kind": "pause"}
        for field in ("member", "at_step", "kind", "seconds", "factor"):
            yield f"faults.{field}", what, {"faults": [{**fault, field: value}]}


def refusal(table: dict[str, object]) -> str:
    try:
        spec.from_tables(table, "e.toml")
    except SpecError as error:
        return str(error) if error.problem and error.fix else ""
    return ""


def test_no_value_of_any_field_is_a_traceback():
    refused = sum(bool(refusal(table)) for _, _, table in tables())
    assert refused > 300


@pytest.mark.parametrize("what", ["infinite", "no number", "huge", "a table"])
def test_what_no_field_can_mean_is_always_refused(what):
    taken = [name for name, kind, table in tables() if kind == what and not refusal(table)]
    assert taken == []


def test_negative_numbers_are_refused_where_they_mean_nothing():
    taken = [name for name, kind, table in tables() if kind == "negative" and not refusal(table)]
    assert taken == ["workload.seed"]


OPTIONS = [
    (name, field) for name, kind in spec.ARCHITECTURES.items() for field in kind.__struct_fields__
]


def is_text(name: str, field: str) -> bool:
    """Left empty such an option means what leaving it out means."""
    fields = msgspec.structs.fields(spec.ARCHITECTURES[name])
    return next(known.type for known in fields if known.name == field) is str


@pytest.mark.parametrize(("name", "field"), OPTIONS)
def test_options_of_architectures(name, field):
    for value in ("inf", "nan", "-1", str(10**30), "", "no such thing"):
        text = f"{name}:{field}={value}"
        try:
            spec.parse_architecture(text)
        except SpecError:
            continue
        assert value == "", f"{text} is taken"
        assert is_text(name, field), f"{text} is taken"


@pytest.mark.parametrize("how", ["a folder", "missing", "below a file", "not text", "not TOML"])
def test_a_file_that_is_none_is_one_sentence(tmp_path, how):
    path = tmp_path / "e.toml"
    if how == "a folder":
        path.mkdir()
    elif how == "below a file":
        path.write_text("")
        path = path / "x"
    elif how != "missing":
        path.write_bytes(b"\xff\xfe" if how == "not text" else b"[workload")
    for load in (spec.load, spec.load_comparison):
        with pytest.raises(SpecError):
            load(path)
