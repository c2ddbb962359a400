"""distribute is given no optimizer."""

import paceline
from tests.scripts.toy import Net, numbers

EXPECTED = {
    "*": "refused: without an optimizer",
}

paceline.init()
model = Net()
paceline.distribute(model)
result = {"weights": numbers(model)}
