"""How many samples a step has, as the record tells."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline import spec
from paceline.record import RunFolder
from paceline.testing import run_members


def train_by_parts(session):
    """Two passes of three batches; the model is never called as a whole."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = paceline.distribute(model, optimizer)
    data = DataLoader(TensorDataset(torch.randn(27, 4), torch.randn(27, 1)), batch_size=9)
    loader = paceline.shard(data, batch="global")
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            functional.mse_loss(model[2](torch.tanh(model[0](x))), y).backward()
            optimizer.step()
        model.eval()
        for x, _ in loader:
            model[0](x)
        model.train()


@pytest.mark.parametrize(("workers", "own"), [(1, [9]), (2, [5, 4])])
def test_of_a_model_that_is_called_in_parts_they_are_those_of_the_batch(tmp_path, workers, own):
    experiment = spec.Experiment(cluster=spec.Cluster(workers=workers), architecture=spec.Ring())
    experiment = experiment if workers > 1 else spec.Experiment()
    folder = RunFolder.create(tmp_path / "run", experiment)
    run_members(train_by_parts, workers=workers, folder=folder)
    for rank, samples in enumerate(own):
        assert [step.samples for step in folder.steps(f"worker{rank}")] == [samples] * 6
