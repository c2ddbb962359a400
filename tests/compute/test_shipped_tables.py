"""Tables that predictions read say of each built-in model what the model itself says.

A failing test shows the line that the table needs.
"""

import msgspec
import pytest

from paceline import models
from paceline.predict.devices import NETWORKS
from paceline.predict.pipeline_step import UNITS
from tests.support.shipped import network_of, units_of_model


def table(path):
    return msgspec.json.decode(path.read_bytes())


@pytest.mark.parametrize("model", [name for name in models.names() if name != "gpt-small"])
def test_layers_and_operations_are_the_models(model):
    expected = msgspec.json.encode(network_of(model))
    assert table(NETWORKS)[model] == msgspec.json.decode(expected), expected.decode()


@pytest.mark.parametrize("model", models.names())
def test_a_pipeline_may_be_cut_where_the_model_has_units(model):
    expected = msgspec.json.encode(units_of_model(model))
    assert table(UNITS)[model] == msgspec.json.decode(expected), expected.decode()


def test_the_tables_know_no_other_model():
    assert set(table(UNITS)) == set(models.names())
    assert set(table(NETWORKS)) == set(models.names()) - {"gpt-small"}
