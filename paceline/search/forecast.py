"""Predictions that leave out settings which cannot win, where the goal is speed or cost."""

import msgspec

from paceline import spec
from paceline.errors import PacelineError
from paceline.predict.answer import predict
from paceline.predict.stacks import find_stack
from paceline.search.values import cost_per_million
from paceline.spec.search import Goal, Search


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """A prediction in the unit of the goal: nine times in ten the truth lies between the ends."""

    low: float
    middle: float
    high: float

    def is_worse_than(self, value: float, goal: Goal) -> bool:
        """Return whether even the better end of the interval does not reach `value`."""
        return self.high < value if goal.maximizes else self.low > value

    def certain(self, goal: Goal) -> float:
        """Return the worse end of the interval: what the setting reaches at least."""
        return self.low if goal.maximizes else self.high


def forecast(experiment: spec.Experiment, goal: Goal, search: Search) -> Forecast | str:
    """Return the predicted value of an experiment, or the reason why there is none."""
    try:
        found = predict(experiment, find_stack(experiment.prediction.stack))
    except PacelineError as error:
        return str(error).splitlines()[0]
    rates = (found.low, found.samples_per_second, found.high)
    if goal.name == "throughput":
        return Forecast(low=rates[0], middle=rates[1], high=rates[2])
    hosts = (
        1 if experiment.engine == "here" else experiment.cluster.workers + experiment.num_servers
    )
    costs = [cost_per_million(rate, hosts, search.price_per_hour) for rate in rates]
    return Forecast(low=costs[2], middle=costs[1], high=costs[0])
