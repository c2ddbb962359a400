"""`--on-loss continue`: what it is refused for, before anything is written."""

import pytest

from paceline import spec
from paceline.errors import SpecError
from paceline.launch.losses import check_on_loss


def asked(architecture, workers=2, **cluster):
    return spec.Experiment(
        architecture=spec.parse_architecture(architecture),
        cluster=spec.Cluster(workers=workers, on_loss="continue", **cluster),
    )


@pytest.mark.parametrize(
    ("experiment", "complaint"),
    [
        (asked("pipeline"), "pipeline cannot go on without one of them"),
        (asked("single", workers=1), "one worker, and nobody to go on"),
    ],
)
def test_what_nobody_could_do_is_refused_with_the_way_out(experiment, complaint):
    with pytest.raises(SpecError, match=complaint) as caught:
        check_on_loss(experiment)
    assert "--restarts" in caught.value.fix


def test_it_is_stop_unless_asked_otherwise():
    check_on_loss(spec.Experiment(architecture=spec.Pipeline(), cluster=spec.Cluster(workers=2)))
    assert not spec.Cluster().goes_on


def test_a_word_that_means_nothing_is_refused():
    with pytest.raises(SpecError, match="on_loss: Invalid enum value 'carry-on'"):
        spec.from_tables({"cluster": {"on_loss": "carry-on"}}, "e.toml")
