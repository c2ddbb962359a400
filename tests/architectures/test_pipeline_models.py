"""`pipeline` trains whatever model it takes as one worker does, and refuses the others at once.

All models go through one job: its workers build and train them one after the other.
"""

import re
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional

from paceline import spec
from paceline.architectures import pipeline
from paceline.architectures.pipeline import PipelineArchitecture, PipelineJob, cuts
from paceline.architectures.pipeline.measuring import measure
from paceline.compute.deferred import build_whole
from paceline.compute.units import units_of
from paceline.errors import MemberError, SpecError
from paceline.protocol.partition import too_few
from paceline.session.session import Session
from paceline.testing import run_members
from tests.support import stage_models

CPU = torch.device("cpu")
STEPS, BATCH, MICROBATCHES = 6, 16, 4


def job_of(build) -> PipelineJob:
    sample = torch.empty((BATCH // MICROBATCHES, 3, 4, 4), device="meta")
    return PipelineJob(build, sample, functional.cross_entropy, nullcontext, False, 3.0)


def batches():
    random = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        inputs = torch.randn((BATCH, 3, 4, 4), generator=random)
        yield inputs, torch.randint(10, (BATCH,), generator=random)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def alone(build) -> list[float]:
    torch.manual_seed(1)
    model = build().train()
    optimizer, losses = optimizer_of(model), []
    for inputs, targets in batches():
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_in_stages(session: Session, builds, small_bytes: int) -> list[list[float] | str]:
    """The losses of each model, or why it was refused."""
    torch.set_num_threads(1)
    cuts.SMALL_BYTES = small_bytes
    told: list[list[float] | str] = []
    options = spec.Pipeline(microbatches=MICROBATCHES)
    for number, build in enumerate(builds):
        torch.manual_seed(1)
        context = session.context(CPU, 100 + number)
        try:
            model = pipeline.build(options, context, job_of(build)).train()
        except SpecError as error:
            told.append(str(error))
        else:
            told.append(losses_of(model))
        PipelineArchitecture(options, context).close(failed=False)
    return told


def losses_of(model: pipeline.PipelineModel) -> list[float]:
    optimizer, losses = optimizer_of(model), []
    for inputs, targets in batches():
        optimizer.zero_grad()
        loss = model(inputs[:0], inputs, targets)
        model.settle()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("small_bytes", [2**28, 0], ids=["built whole", "built in parts"])
def test_every_kind_of_model_follows_one_worker(small_bytes):
    builds = stage_models.FOLLOW
    members = run_members(
        train_in_stages, builds, small_bytes, workers=2, architecture=spec.Pipeline()
    )
    for told in members:
        for build, losses in zip(builds, told, strict=True):
            assert losses == pytest.approx(alone(build), rel=1e-4), build.__name__


def test_what_cannot_be_cut_is_refused_by_all_workers_alike():
    builds = tuple(stage_models.REFUSED)
    members = run_members(train_in_stages, builds, 2**28, workers=2, architecture=spec.Pipeline())
    for told in members:
        for (build, words), reason in zip(stage_models.REFUSED.items(), told, strict=True):
            assert isinstance(reason, str), build.__name__
            assert re.search(words, reason.replace("\n", " ")), reason
            assert "fix: " in reason


def train_varying(session: Session) -> list[list[float] | str]:
    return train_in_stages(session, (stage_models.varying,), 2**28)


def test_a_stage_whose_output_changes_its_shape_is_refused():
    with pytest.raises(MemberError, match="one shape in every step"):
        run_members(train_varying, workers=2, architecture=spec.Pipeline())


def measured(build):
    torch.manual_seed(1)
    deferred = build_whole(build)
    units = units_of(deferred.model)
    return measure(deferred, units, job_of(build), CPU, None)


class LessTheMean(nn.Module):
    def forward(self, features):
        return features - features.mean(0, keepdim=True)


@pytest.mark.parametrize(
    ("layer", "sees_batch"),
    [
        (nn.ReLU(), False),
        (nn.LayerNorm(8), False),
        (nn.BatchNorm1d(8), True),
        (nn.Dropout(0.5), True),
        (LessTheMean(), True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_layers_that_see_more_than_a_sample_are_found(layer, sees_batch):
    def build() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(48, 8), layer, nn.Linear(8, 10))

    assert any(one.sees_batch for one in measured(build)) == sees_batch


class Detaches(nn.Module):
    def forward(self, features):
        return features.detach()


def test_who_hands_no_gradient_back_is_among_those_named():
    def build() -> nn.Module:
        layers = nn.Linear(48, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), Detaches()
        return nn.Sequential(nn.Flatten(), *layers, nn.Linear(8, 10))

    with pytest.raises(SpecError, match="3 to 5 hands no gradient back"):
        measured(build)


def test_a_measured_model_keeps_its_random_numbers():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    deferred = build_whole(stage_models.plain)
    after = torch.get_rng_state()
    measure(deferred, units_of(deferred.model), job_of(stage_models.plain), CPU, None)
    assert torch.equal(torch.get_rng_state(), after)
    assert not torch.equal(state, after)


@pytest.mark.parametrize(
    ("units", "workers", "loops", "replicas", "fix"),
    [
        (3, 2, 2, 1, "schedule=1f1b"),
        (7, 2, 9, 1, "loops=3"),
        (3, 5, 1, 2, "use at most 6 workers"),
        (1, 2, 1, 1, "choose ring"),
    ],
)
def test_too_few_units_get_a_fix_that_helps(units, workers, loops, replicas, fix):
    assert fix in too_few(units, workers, loops, replicas).fix
