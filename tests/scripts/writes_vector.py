"""All weights are read as one vector and written back."""

import torch
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {
    "average:every=1": "equal",
    "server:mode=*": "refused: changes weights outside the optimizer",
}

paceline.init()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = paceline.distribute(model, optimizer)
for x, y in paceline.shard(loader(), batch="global"):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    vector = parameters_to_vector(model.parameters())
    vector_to_parameters(vector * 0.99, model.parameters())
result = {"weights": numbers(model)}
