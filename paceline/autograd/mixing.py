"""Give one object more methods: same object, same class name, copied and saved as its own class.

Scripts hold on to the model and the optimizer they made, and look at their class: neither is
wrapped or replaced. What is mixed in keeps its data in the new class, never in the object, so that
`copy.deepcopy` and `torch.save` see what the script put there and nothing of ours. A model's
`__class__` is the script's own: pickle asks it, and a script may make another model with it.
"""

import copyreg
from collections.abc import Callable
from typing import Any

import torch

ORIGINAL = "_class_before_paceline"
MIXED = "_mixed_in_by_paceline"
CLASS = vars(object)["__class__"]
"""How to set the class itself, whatever the object says its class is."""


def mix_in(thing: Any, mixin: type, **data: Any) -> Callable[[], None]:
    """Let `thing` have `mixin`'s methods, which find `data` in their class; returns an undo."""
    kind = type(thing)
    original = getattr(kind, ORIGINAL, kind)
    facts = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__reduce_ex__": _reduce,
        ORIGINAL: original,
        MIXED: [*getattr(kind, MIXED, ()), (mixin, data)],
    }
    if isinstance(thing, torch.nn.Module):  # an optimizer changes the methods of its __class__
        facts["__class__"] = property(_own_class_of, _set_class)
    CLASS.__set__(thing, type(kind.__name__, (mixin, kind), {**facts, **data}))

    def undo() -> None:
        if getattr(type(thing), ORIGINAL, None) is original:
            CLASS.__set__(thing, kind)

    return undo


def _own_class_of(thing: Any) -> type:
    return _own_class(type(thing))  # type: ignore[no-any-return]


def _set_class(thing: Any, kind: type) -> None:
    """Somebody else changes the class (parametrizations do): what is mixed in stays."""
    mixed = getattr(type(thing), MIXED)
    CLASS.__set__(thing, kind)
    for mixin, data in mixed:
        mix_in(thing, mixin, **data)


def _reduce(thing: Any, protocol: Any) -> Any:
    original = getattr(type(thing), ORIGINAL)
    made = original.__reduce_ex__(thing, protocol)
    if isinstance(made, str):
        return made
    function, arguments, *rest = made
    arguments = tuple(_own_class(argument) for argument in arguments)
    is_new = function is vars(copyreg)["__newobj__"] and len(arguments) == 1
    if is_new and thing.__class__ is not original:
        # Pickle insists that this one makes an object of the class it was asked of.
        return vars(copyreg)["_reconstructor"], (*arguments, object, None), *rest
    return _own_class(function), arguments, *rest


def _own_class(value: Any) -> Any:
    return getattr(value, ORIGINAL, value) if isinstance(value, type) else value
