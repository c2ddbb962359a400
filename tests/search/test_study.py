"""The study: the same file asks for the same settings, also after a kill."""

import math

import pytest

pytest.importorskip("optuna", reason="the extra `search` is not installed")

from paceline import spec
from paceline.search.folder import SearchFolder, TrialEntry
from paceline.search.study import Study
from paceline.search.values import Course, final_loss
from paceline.spec.search import SearchQuestion, search_of

TRIED = {"learning_rate": "0.001..1:log", "batch": "8,16,32", "setting.hidden": "4..64"}


def folder(path, **search):
    asked = search_of({"try": TRIED, "trials": 12, **search}, "x")
    return SearchFolder.create(path, SearchQuestion(experiment=spec.Experiment(), search=asked))


def value(settings):
    """A smooth valley with its bottom at 0.03 and 32."""
    rate = math.log10(settings["learning_rate"] / 0.03) ** 2
    return rate + abs(settings["batch"] - 32) / 32 + settings["setting.hidden"] / 1000


def advance(study, first, count):
    asked = []
    for index in range(first, first + count):
        number, settings, _ = study.ask(index)
        study.tell(number, value(settings))
        asked.append(settings)
    return asked


def test_a_study_repeats_and_another_seed_tries_others(tmp_path):
    runs = [advance(Study(folder(tmp_path / str(n), seed=5), 2), 0, 8) for n in range(2)]
    assert runs[0] == runs[1]
    assert advance(Study(folder(tmp_path / "other", seed=6), 2), 0, 8) != runs[0]


def test_a_study_that_was_killed_goes_on_as_if_undisturbed(tmp_path):
    undisturbed = advance(Study(folder(tmp_path / "whole"), 2), 0, 10)
    place = folder(tmp_path / "killed")
    before = advance(Study(place, 2), 0, 4)
    interrupted = Study(place, 2).ask(4)  # and then the process is gone
    study = Study(place, 2)
    assert study.take_back_interrupted() == [interrupted[0]]
    number, settings, again = study.ask(4)
    assert (settings, again) == (interrupted[1], interrupted[0])
    study.tell(number, value(settings))
    assert [*before, settings, *advance(study, 5, 5)] == undisturbed


def test_a_study_finds_the_valley_and_names_what_matters(tmp_path):
    study = Study(folder(tmp_path / "s", trials=40), 2)
    asked = advance(study, 0, 40)
    best = min(asked, key=value)
    assert 0.01 < best["learning_rate"] < 0.1
    shares = study.importances()
    assert shares["learning_rate"] > shares["setting.hidden"]


def test_a_trial_behind_the_median_is_ended_and_one_ahead_is_not(tmp_path):
    study = Study(folder(tmp_path / "s"), 2)
    for index in range(5):
        number, _, _ = study.ask(index)
        assert not any(study.report(number, step, 1.0 / step) for step in (1, 2, 3, 4))
        study.tell(number, 0.25)
    behind, _, _ = study.ask(5)
    assert not study.report(behind, 1, 9.0)  # too early to tell
    assert study.report(behind, 3, 9.0)
    study.tell(behind, None, pruned=True)
    ahead, _, _ = study.ask(6)
    assert not study.report(ahead, 3, 0.1)


def test_where_more_is_better_a_lower_loss_still_stays(tmp_path):
    study = Study(folder(tmp_path / "s", goal="accuracy"), 0)
    for index in range(5):
        number, _, _ = study.ask(index)
        study.report(number, 3, 1.0)
        study.tell(number, 0.5)
    good, _, _ = study.ask(5)
    assert not study.report(good, 3, 0.5)
    bad, _, _ = study.ask(6)
    assert study.report(bad, 3, 2.0)


def test_losses_are_reported_at_fixed_steps_however_often_they_are_looked_at():
    losses = {step: float(step) for step in range(40)}
    once = Course(40).new_reports(losses)
    course, often = Course(40), []
    for known in range(41):
        often += course.new_reports({s: v for s, v in losses.items() if s < known})
    assert often == once
    assert once[:2] == [(2, 0.5), (4, 2.5)]
    assert final_loss(losses) == pytest.approx(37.5)
    assert final_loss({}) is None


def test_the_best_is_the_lowest_loss_or_the_highest_rate(tmp_path):
    entries = [
        TrialEntry(number=n, settings={}, state=state, value=found)
        for n, (state, found) in enumerate(
            [("complete", 2.0), ("pruned", None), ("complete", 1.0), ("failed", None)]
        )
    ]
    assert folder(tmp_path / "loss").best(entries).number == 2
    assert folder(tmp_path / "rate", goal="throughput").best(entries).number == 0
