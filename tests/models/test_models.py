"""What the table of models promises: known sizes, both forms, one start per seed."""

import pytest
import torch
from torch.nn import functional

from paceline import models
from paceline.errors import SpecError

IMAGENET_PARAMETERS = {
    "alexnet": 61_100_840,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
    "googlenet": 6_624_904,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "resnext50_32x4d": 25_028_904,
    "resnext101_32x8d": 88_791_336,
    "inception3": 23_834_568,
}
DENSE_WIDTHS = {
    "adult-dnn": (123, 200, 100, 2),
    "acoustic-dnn": (50, 200, 100, 3),
    "mnist-dnn": (784, 200, 100, 10),
    "cifar10-dnn": (3072, 200, 100, 10),
    "higgs-dnn": (28, 1024, 2),
}


def num_parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def batch_for(entry: models.ModelInfo, shape: tuple[int, ...], size: int = 2) -> torch.Tensor:
    if entry.tokens:
        return torch.randint(entry.num_classes, (size, *shape))
    return torch.randn(size, *shape)


def small_shape(entry: models.ModelInfo) -> tuple[int, ...]:
    return (3, 32, 32) if entry.imagenet_shape else entry.input_shape


@pytest.mark.parametrize("name", IMAGENET_PARAMETERS)
def test_imagenet_form_has_the_parameters_everybody_knows(name):
    with torch.device("meta"):
        assert num_parameters(models.build(name)) == IMAGENET_PARAMETERS[name]


def test_every_imagenet_model_has_a_known_count():
    with_form = {name for name in models.names() if models.info(name).imagenet_shape}
    assert with_form == set(IMAGENET_PARAMETERS)


@pytest.mark.parametrize("name", DENSE_WIDTHS)
def test_dense_networks_have_the_widths_of_the_paper(name):
    layers = [m for m in models.build(name).modules() if isinstance(m, torch.nn.Linear)]
    widths = (layers[0].in_features, *(layer.out_features for layer in layers))
    assert widths == DENSE_WIDTHS[name]


@pytest.mark.parametrize("name", models.names())
def test_small_form_gives_one_logit_per_class_and_a_gradient_everywhere(name):
    entry = models.info(name)
    with torch.device("meta"):  # shapes and reachability, without the arithmetic
        model = models.build(name, input_shape=small_shape(entry))
        logits = model(batch_for(entry, small_shape(entry)))
        logits.sum().backward()
    num_classes = 10 if entry.imagenet_shape else entry.num_classes
    assert logits.shape[:2] == (2, num_classes)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_alexnet_keeps_its_parameters_at_64_pixels():
    with torch.device("meta"):
        model = models.build("alexnet", input_shape=(3, 64, 64), num_classes=1000)
        assert model(torch.randn(2, 3, 64, 64)).shape == (2, 1000)
    assert num_parameters(model) == IMAGENET_PARAMETERS["alexnet"]


@pytest.mark.parametrize(
    "name", ["tutorial-cnn", "adult-dnn", "cifar10-cnn", "googlenet", "gpt-small"]
)
def test_same_seed_gives_the_same_weights(name):
    def start() -> list[torch.Tensor]:
        torch.manual_seed(7)
        return [parameter.detach() for parameter in models.build(name).parameters()]

    assert all(map(torch.equal, start(), start()))
    torch.manual_seed(8)
    other = [parameter.detach() for parameter in models.build(name).parameters()]
    assert not all(map(torch.equal, start(), other))


@pytest.mark.parametrize(
    "name",
    ["tutorial-cnn", "mnist-cnn", "mnist-dnn", pytest.param("gpt-small", marks=pytest.mark.slow)],
)
def test_a_few_steps_learn_one_batch_by_heart(name):
    torch.manual_seed(0)
    entry, model = models.info(name), models.build(name)
    inputs = batch_for(entry, entry.input_shape, size=4)
    shape = inputs.shape if entry.tokens else (4,)
    targets = torch.randint(entry.num_classes, shape)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(12):
        loss = functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_tutorial_network_equals_relu_before_pooling():
    torch.manual_seed(0)
    model = models.build("tutorial-cnn")
    first, pool, relu = model.features[:3]
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(model.features[:3](images), pool(relu(first(images))))


def test_gpt_sees_no_token_of_the_future():
    torch.manual_seed(0)
    model = models.build("gpt-small", input_shape=(16,)).eval()
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 10:] = (changed[0, 10:] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.allclose(before[..., :10], after[..., :10], atol=1e-5)
    assert not torch.allclose(before[..., 10:], after[..., 10:], atol=1e-5)


def test_gpt_ties_its_embedding_unless_told_otherwise():
    with torch.device("meta"):
        tied = models.build("gpt-small")
        free = models.gpt.GPT(input_shape=(128,), num_classes=256, tied=False)
    assert num_parameters(free) - num_parameters(tied) == 256 * models.gpt.WIDTH


def test_module_and_function_are_imported_and_given_what_they_ask_for():
    model = models.build(f"{__name__}:a_linear_model", input_shape=(5,), num_classes=3)
    assert model(torch.zeros(1, 5)).shape == (1, 3)


def a_linear_model(num_classes: int) -> torch.nn.Module:
    return torch.nn.Linear(5, num_classes)


def not_a_model() -> int:
    return 3


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("resnet5", 'did you mean "resnet50"'),
        ("no_such_module_here:f", "no module no_such_module_here"),
        ("math:squirt", 'did you mean "sqrt"'),
        (f"{__name__}:not_a_model", "it returned int"),
    ],
)
def test_a_wrong_name_says_what_is_wrong_and_the_fix(name, says):
    with pytest.raises(SpecError, match=says):
        models.build(name)


def test_a_model_of_pictures_refuses_rows():
    with pytest.raises(SpecError, match="not pictures"):
        models.build("resnet50", input_shape=(123,))
