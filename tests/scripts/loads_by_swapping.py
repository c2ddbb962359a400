"""`load_state_dict` swaps tensors in place of copying, which torch has a switch for; parts of a
batch are uneven."""

import torch
import torch.nn.functional as F

import paceline
from tests.scripts.toy import Net, loader, numbers

EXPECTED = {"server:mode=*": "refused: changes weights outside the optimizer"}

paceline.init()
torch.__future__.set_swap_module_params_on_conversion(True)
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = paceline.distribute(model, optimizer)
for step, (x, y) in enumerate(paceline.shard(loader(batch=15), batch="global")):
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    if step in (4, 6):
        model.load_state_dict({name: 0.5 * value for name, value in model.state_dict().items()})
torch.__future__.set_swap_module_params_on_conversion(False)
result = {"weights": numbers(model)}
