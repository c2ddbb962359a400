"""LARS and LAMB against their formulas, and the rules that go with large batches."""

import copy

import pytest
import torch

from paceline import spec
from paceline.builtin import optimizers
from paceline.builtin.large_batch import Lamb, Lars
from paceline.builtin.schedule import learning_rate
from paceline.errors import SpecError


def one_weight(values: torch.Tensor) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(values.clone())
    weight.grad = torch.full_like(weight, 0.5)
    return weight


def test_lars_scales_the_step_to_the_weights():
    start = torch.tensor([[3.0, 4.0]])
    weight = one_weight(start)
    Lars([weight], lr=0.1, momentum=0.9, weight_decay=0.01, trust=0.02).step()
    decayed = 0.5 + 0.01 * start
    ratio = 0.02 * start.norm() / (torch.full((2,), 0.5).norm() + 0.01 * start.norm())
    assert torch.allclose(weight, start - 0.1 * ratio * decayed)


def test_lars_leaves_biases_alone():
    weight = one_weight(torch.tensor([3.0, 4.0]))
    Lars([weight], lr=0.1, weight_decay=0.01).step()
    assert torch.allclose(weight, torch.tensor([2.95, 3.95]))


def test_lamb_is_adam_scaled_to_the_weights():
    start = torch.tensor([[3.0, 4.0]])
    weight, plain = one_weight(start), one_weight(start)
    ours = Lamb([weight], lr=0.1, eps=1e-8)
    adam = torch.optim.Adam([plain], lr=1.0, eps=1e-8)
    for _ in range(3):
        before, adam_before = weight.detach().clone(), plain.detach().clone()
        ours.step()
        adam.step()
        step = adam_before - plain.detach()
        expected = 0.1 * before.norm() / step.norm() * step
        assert torch.allclose(before - weight.detach(), expected, rtol=1e-4)


def test_a_layer_of_zeros_still_learns():
    for kind in (Lars, Lamb):
        weight = one_weight(torch.zeros(2, 2))
        kind([weight], lr=0.1).step()
        assert (weight != 0).all()


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_the_table_builds_them_and_their_state_is_kept(name):
    weight = one_weight(torch.ones(2, 2))
    built = optimizers.build(spec.Optimizer(name=name, learning_rate=0.1), [weight])
    built.step()
    again = one_weight(weight.detach())
    other = optimizers.build(spec.Optimizer(name=name, learning_rate=0.1), [again])
    other.load_state_dict(copy.deepcopy(built.state_dict()))
    built.step()
    other.step()
    assert torch.equal(weight, again)


def test_the_rate_grows_with_the_global_batch():
    schedule = spec.Schedule(base_batch=256, warmup_steps=4)
    workload = spec.Workload(batch=128, optimizer=spec.Optimizer(learning_rate=0.1))
    workload = spec.Workload(
        batch=128, optimizer=workload.optimizer, schedule=schedule, label_smoothing=0.1
    )
    rates = [learning_rate(workload, step=s, num_steps=10, workers=8) for s in (0, 4)]
    assert rates == pytest.approx([0.04, 0.4])
    with pytest.raises(SpecError, match="both scale"):
        spec.Schedule(base_batch=256, scale_with_workers=True)


def test_stages_of_a_pipeline_do_not_raise_the_rate():
    workload = spec.Workload(
        optimizer=spec.Optimizer(learning_rate=0.1),
        schedule=spec.Schedule(scale_with_workers=True),
    )
    step = {"step": 0, "num_steps": 10, "workers": 4}
    assert learning_rate(workload, **step) == pytest.approx(0.4)
    assert learning_rate(workload, **step, replicas=2) == pytest.approx(0.2)
