"""What a search takes, and how it refuses what it cannot."""

import pytest

from paceline import spec
from paceline.errors import SpecError
from paceline.spec.search import (
    Range,
    SearchQuestion,
    ValueList,
    apply,
    check_names,
    load_search,
    parse_dimension,
    parse_goal,
    parse_tried,
    search_of,
    search_to_toml,
)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("batch", "16..256", Range(low=16, high=256)),
        ("learning_rate", "0.001..1:log", Range(low=0.001, high=1.0, log=True)),
        ("batch", "16, 32,64", ValueList(values=(16, 32, 64))),
        ("compile", "true,false", ValueList(values=(True, False))),
        (
            "architecture",
            "ring,server:mode=bounded,staleness=2,single",
            ValueList(values=("ring", "server:mode=bounded,staleness=2", "single")),
        ),
    ],
)
def test_values_are_ranges_or_lists(name, text, expected):
    assert parse_dimension(name, text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1..0.1", "1 is not below 0.1"),
        ("0..1:log", "must start above zero"),
        ("0.1..1:cubic", '":cubic" is not a scale'),
        ("a..b", '"a" is not a number'),
        ("1..inf", '"inf" is not a number'),
        ("1..2..3", "not a number"),
        (",", "lists no values"),
        ("8,8", "names a value twice"),
        ("..", "is not a range"),
    ],
)
def test_values_that_make_no_sense_are_refused(text, message):
    with pytest.raises(SpecError, match=message):
        parse_dimension("learning_rate", text)


def test_a_try_keeps_the_dashes_of_a_scripts_option():
    assert parse_tried(["--lr=0.1..1", "batch = 2,4"]) == {"--lr": "0.1..1", "batch": "2,4"}


@pytest.mark.parametrize("text", ["batch", "=3", "batch=", "--=1"])
def test_a_try_without_a_name_or_values_is_refused(text):
    with pytest.raises(SpecError, match="NAME=VALUES"):
        parse_tried([text])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("speed", "is not a goal"),
        ("time", "needs the loss to reach"),
        ("loss:loss=1", "takes no option"),
        ("time:loss=low", '"low" is not a loss'),
    ],
)
def test_unknown_goals_are_refused(text, message):
    with pytest.raises(SpecError, match=message):
        parse_goal(text)


def question(tried, script=None, **search):
    workload = spec.Workload(script=script) if script else spec.Workload()
    experiment = spec.Experiment(workload=workload)
    return SearchQuestion(experiment=experiment, search=search_of({"try": tried, **search}, "x"))


SCRIPT = spec.Script(path="train.py")


@pytest.mark.parametrize(
    ("tried", "script", "message"),
    [
        ({}, None, "nothing to try"),
        ({"learning_rat": "1,2"}, None, "learning_rate"),
        ({"--lr": "1,2"}, None, "no command-line options of its own"),
        ({"batch": "1,2"}, SCRIPT, "a script has its own"),
        ({"setting.": "1,2"}, SCRIPT, "has no name"),
    ],
)
def test_a_setting_that_reaches_nobody_is_refused(tried, script, message):
    with pytest.raises(SpecError, match=message):
        check_names(question(tried, script))


def test_a_grid_needs_lists_and_a_cost_needs_a_price():
    with pytest.raises(SpecError, match="needs a list of values for batch"):
        question({"batch": "1..2"}, sampler="grid")
    with pytest.raises(SpecError, match="needs a price"):
        question({"batch": "1,2"}, goal="cost")
    with pytest.raises(SpecError, match="trials must be at least 1"):
        question({"batch": "1,2"}, trials=0)


def test_settings_become_fields_options_and_the_codes_own_settings():
    built_in = apply(
        spec.Experiment(workload=spec.Workload(global_batch=8)),
        {"learning_rate": 0.5, "batch": 4, "architecture": "ring", "workers": 2, "setting.h": 3},
    )
    assert built_in.workload.optimizer.learning_rate == 0.5
    assert (built_in.workload.batch, built_in.workload.global_batch) == (4, 0)
    assert (built_in.cluster.workers, built_in.settings) == (2, {"h": 3})
    own = spec.Experiment(workload=spec.Workload(script=SCRIPT))
    assert apply(own, {"--lr": 0.1}).workload.script.arguments == ("--lr", "0.1")


def test_a_search_file_is_read_back_as_it_was_written(tmp_path):
    asked = question({"learning_rate": "0.1..1:log", "batch": "2,4"}, goal="time:loss=0.5", seed=3)
    path = tmp_path / "search.toml"
    path.write_text(search_to_toml(asked), encoding="utf-8")
    assert load_search(path) == asked
    path.write_text("[search]\ngaol = 'loss'\n", encoding="utf-8")
    with pytest.raises(SpecError, match='unknown key "gaol"'):
        load_search(path)
