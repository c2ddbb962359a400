"""Constants of a machine, found from its runs and used by what is predicted beside them."""

import json

import msgspec
import pytest

from paceline import engines, spec
from paceline.cli import main
from paceline.errors import RecordError
from paceline.predict.answer import predict, simulate
from paceline.predict.calibration import FILE, calibrate, kept, stack_for
from paceline.predict.stacks import expected, find_stack
from tests.predict.test_answers import asked


def done(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(arguments)
    assert ended.value.code == 0


def measured(experiment: spec.Experiment, **constants: float) -> tuple[spec.Experiment, float]:
    """As a machine with these constants would run it."""
    stack = find_stack("paceline")
    odd = msgspec.structs.replace(expected(stack), **constants)
    return experiment, simulate(experiment, stack, odd).samples_per_second


def test_constants_that_runs_depend_on_are_found_and_the_rest_stays_as_expected():
    own = expected(find_stack("paceline"))
    found = calibrate([measured(asked(workers=n), tcp_fraction=0.88) for n in (2, 4)])
    assert found.constants["tcp_fraction"] == 0.88
    assert found.constants["message_seconds"] == own.message_seconds  # a ring sends no chunks
    assert max(abs(error) for error in found.errors) < 0.01


def test_a_calibrated_prediction_meets_what_it_was_calibrated_on():
    experiment, rate = measured(asked(workers=6), tcp_fraction=0.85)
    stack = calibrate([measured(asked(workers=4), tcp_fraction=0.85)]).stack()
    before, after = predict(experiment), predict(experiment, stack)
    assert rate < before.low
    assert after.low < rate < after.high


def test_the_command_keeps_a_dated_file_and_uses_it(tmp_path, capsys):
    folder = engines.run(asked(), tmp_path / "run")
    folder.write("experiment.toml", spec.to_toml(spec.replace(asked(), engine="tunnel")).encode())
    _, rate = measured(asked(), tcp_fraction=0.88)
    summary = folder.summary()
    summary.samples_per_second = rate
    folder.write_summary(summary)
    runs = ["--runs", str(tmp_path)]
    curve = ["predict", "--model", "resnet50", "--device", "k80", "--batch", "32", "--link",
             "1gbit", "--architecture", "ring", "--workers", "4", "--json", *runs]  # fmt: skip
    done(curve)
    before = json.loads(capsys.readouterr().out)["points"][0]
    done(["predict", "--calibrate", str(folder.path), *runs])
    found = kept(tmp_path)
    assert found is not None
    assert found.date in capsys.readouterr().out
    done(curve)
    printed = capsys.readouterr()
    after = json.loads(printed.out)["points"][0]
    assert f"calibrated on {found.date}" in printed.err
    assert after["samples_per_second"] == pytest.approx(rate, rel=0.01)
    assert before["samples_per_second"] > 1.03 * rate


def test_another_software_is_not_calibrated_and_a_broken_file_is_named(tmp_path):
    (tmp_path / FILE).write_text("{}")
    with pytest.raises(RecordError, match=r"calibration\.json is not a calibration"):
        stack_for(asked(), tmp_path)
    horovod = spec.replace(asked(), stack="horovod")
    assert stack_for(horovod, tmp_path) == (find_stack("horovod"), "")
