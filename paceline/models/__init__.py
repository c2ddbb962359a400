"""The papers' models by name; anything else as `module:function`.

One file per family beside this one, one table here. Data sets live in `paceline.data`; how a model
is trained does not live here.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module

from torch import nn

from paceline.errors import SpecError, suggest
from paceline.models import (
    alexnet,
    dense,
    googlenet,
    gpt,
    inception,
    resnet,
    small_cnn,
    tutorial,
    vgg,
)

__all__ = ["ModelInfo", "build", "info", "names"]

SMALL_SIDE = 32
"""Pictures up to this side have 10 classes unless told otherwise; larger ones ImageNet's 1000."""


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """What the table knows of a model besides how to build it."""

    name: str
    builder: Callable[..., nn.Module]

    data: str
    """The data set it trains on when none is named."""

    input_shape: tuple[int, ...]
    """Shape of one sample when none is given."""

    num_classes: int

    imagenet_shape: tuple[int, ...] | None = None
    """The ImageNet form's input, for models that have one."""

    channels_last: bool = False
    """Whether weights and pictures in channels-last order are faster (docs/experiments.md)."""

    tokens: bool = False
    """Whether samples are token ids instead of numbers."""


def _flat(
    name: str, data: str, shape: tuple[int, ...], classes: int, hidden: tuple[int, ...]
) -> ModelInfo:
    builder = partial(dense.Dense, hidden=hidden)
    return ModelInfo(name=name, builder=builder, data=data, input_shape=shape, num_classes=classes)


def _pictures(
    name: str, builder: Callable[..., nn.Module], data: str, shape: tuple[int, ...]
) -> ModelInfo:
    return ModelInfo(
        name=name, builder=builder, data=data, input_shape=shape, num_classes=10, channels_last=True
    )


def _imagenet(name: str, builder: Callable[..., nn.Module], side: int = 224) -> ModelInfo:
    shape = (3, side, side)
    return ModelInfo(
        name=name,
        builder=builder,
        data="synthetic",
        input_shape=shape,
        num_classes=1000,
        imagenet_shape=shape,
        channels_last=True,
    )


_TABLE = {
    entry.name: entry
    for entry in (
        _pictures("tutorial-cnn", tutorial.TutorialCNN, "shapes", (3, 32, 32)),
        _flat("adult-dnn", "adult", (123,), 2, dense.ADULT),
        _flat("acoustic-dnn", "acoustic", (50,), 3, dense.ACOUSTIC),
        _flat("mnist-dnn", "mnist", (1, 28, 28), 10, dense.MNIST),
        _pictures("mnist-cnn", small_cnn.SmallCNN, "mnist", (1, 28, 28)),
        _flat("cifar10-dnn", "cifar10", (3, 32, 32), 10, dense.CIFAR10),
        _pictures("cifar10-cnn", small_cnn.SmallCNN, "cifar10", (3, 32, 32)),
        _flat("higgs-dnn", "higgs", (28,), 2, dense.HIGGS),
        _imagenet("alexnet", alexnet.AlexNet),
        _imagenet("vgg16", partial(vgg.VGG, depths=vgg.VGG16)),
        _imagenet("vgg19", partial(vgg.VGG, depths=vgg.VGG19)),
        _imagenet("googlenet", googlenet.GoogLeNet),
        _imagenet("resnet50", partial(resnet.ResNet, depths=resnet.RESNET50)),
        _imagenet("resnet101", partial(resnet.ResNet, depths=resnet.RESNET101)),
        _imagenet("resnet152", partial(resnet.ResNet, depths=resnet.RESNET152)),
        _imagenet(
            "resnext50_32x4d",
            partial(resnet.ResNet, depths=resnet.RESNET50, groups=32, group_width=4),
        ),
        _imagenet(
            "resnext101_32x8d",
            partial(resnet.ResNet, depths=resnet.RESNET101, groups=32, group_width=8),
        ),
        _imagenet("inception3", inception.Inception3, side=299),
        ModelInfo(
            name="gpt-small",
            builder=gpt.GPT,
            data="text",
            input_shape=(128,),
            num_classes=256,
            tokens=True,
        ),
    )
}


def names() -> list[str]:
    """Every built-in model, as the user types it."""
    return list(_TABLE)


def info(name: str) -> ModelInfo | None:
    """The table's entry for a built-in model; None for a "module:function"."""
    if ":" in name:
        return None
    if name not in _TABLE:
        raise SpecError("model", f'"{name}" is not a built-in model.', suggest(name, names()))
    return _TABLE[name]


def build(
    name: str,
    *,
    input_shape: tuple[int, ...] | None = None,
    num_classes: int | None = None,
) -> nn.Module:
    """Return a freshly initialised model; the same one after the same `torch.manual_seed`.

    Left out, `input_shape` is the table's, and `num_classes` the table's except for ImageNet models
    on small pictures, which then have 10.
    """
    entry = info(name)
    if entry is None:
        return _import(name, input_shape=input_shape, num_classes=num_classes)
    shape = input_shape or entry.input_shape
    _check_shape(entry, shape)
    if num_classes is None:
        small = entry.imagenet_shape is not None and max(shape[1:]) <= SMALL_SIDE
        num_classes = 10 if small else entry.num_classes
    return entry.builder(input_shape=shape, num_classes=num_classes)


def _check_shape(entry: ModelInfo, shape: tuple[int, ...]) -> None:
    where, given = f"model {entry.name}", f"samples of shape {shape}"
    if entry.channels_last and (len(shape) != 3 or min(shape[1:]) < 16):
        problem = f"{given} are not pictures of (channels, height, width), 16x16 or larger."
        raise SpecError(where, problem, f"use a data set of pictures such as {entry.data}.")
    if entry.tokens and len(shape) != 1:
        raise SpecError(where, f"{given} are not rows of token ids.", f"use --data {entry.data}.")


def _import(
    name: str, *, input_shape: tuple[int, ...] | None, num_classes: int | None
) -> nn.Module:
    """Call `module:function`, with the shape and the classes where it has such parameters."""
    where = f'model "{name}"'
    module_name, _, function_name = name.partition(":")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        problem = f"there is no module {error.name} to import."
        fix = "check the spelling, and run where Python finds it (PYTHONPATH)."
        raise SpecError(where, problem, fix) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        callables = [key for key, value in vars(module).items() if callable(value)]
        problem = f"module {module_name} has no function {function_name}."
        raise SpecError(where, problem, suggest(function_name, callables))
    known = {"input_shape": input_shape, "num_classes": num_classes}
    parameters = inspect.signature(function).parameters
    model = function(**{key: value for key, value in known.items() if key in parameters})
    if not isinstance(model, nn.Module):
        problem = f"it returned {type(model).__name__}, not a torch.nn.Module."
        raise SpecError(where, problem, f"let {function_name} return the model.")
    return model
