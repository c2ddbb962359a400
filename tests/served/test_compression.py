"""What a codec leaves out comes later; what it sends is smaller."""

import pytest
import torch

from paceline.served.compression import make_codec

ELEMENTS = 5120


@pytest.mark.parametrize(
    ("name", "ratio", "error"),
    [("none", 1, 0), ("fp16", 2, 1e-3), ("bf16", 2, 1e-2), ("int8", 3.9, 2e-2), ("topk", 4, None)],
)
def test_size_and_error_of_one_gradient(name, ratio, error):
    codec = make_codec(name, topk_fraction=0.1)
    values = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(0))
    payload = codec.encode(0, values)
    decoded = codec.decode(payload, ELEMENTS, torch.float32)
    assert payload.nbytes <= 4 * ELEMENTS / ratio
    if error is not None:
        assert (decoded - values).abs().max() <= error * values.abs().max()
    else:
        kept = decoded != 0
        assert kept.sum() == ELEMENTS // 10
        assert torch.equal(decoded[kept], values[kept])
        assert values[kept].abs().min() >= values[~kept].abs().max()


@pytest.mark.parametrize("name", ["fp16", "bf16", "int8", "topk"])
def test_error_feedback_makes_sums_right_in_the_end(name):
    codec = make_codec(name, topk_fraction=0.1)
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(ELEMENTS, generator=generator) for _ in range(30)]
    received = torch.zeros(ELEMENTS)
    for gradient in gradients:
        received += codec.decode(codec.encode(3, gradient), ELEMENTS, torch.float32)
    left_out = (sum(gradients) - received).abs().max()
    single = make_codec(name, topk_fraction=0.1)
    once = [
        single.decode(single.encode(n, g), ELEMENTS, torch.float32) for n, g in enumerate(gradients)
    ]
    without_feedback = (sum(gradients) - sum(once)).abs().max()
    assert left_out < without_feedback


def test_chunks_do_not_share_what_was_left_out():
    codec = make_codec("topk", topk_fraction=0.1)
    codec.encode(0, torch.ones(100))
    decoded = codec.decode(codec.encode(1, torch.zeros(100)), 100, torch.float32)
    assert not decoded.any()
