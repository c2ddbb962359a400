"""Give one object more methods: same object, same class name, copied and saved as its own class.

Scripts hold on to the model and the optimizer they made, and look at their class: neither is
wrapped or replaced. What is mixed in keeps its data in the new class, never in the object, so that
`copy.deepcopy` and `torch.save` see what the script put there and nothing of ours.
"""

import copyreg
from collections.abc import Callable
from typing import Any

ORIGINAL = "_class_before_paceline"


def mix_in(thing: Any, mixin: type, **data: Any) -> Callable[[], None]:
    """Let `thing` have `mixin`'s methods, which find `data` in their class; returns an undo."""
    kind = type(thing)
    original = getattr(kind, ORIGINAL, kind)
    facts = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, ORIGINAL: original}
    thing.__class__ = type(
        kind.__name__, (mixin, kind), {**facts, "__reduce_ex__": _reduce, **data}
    )

    def undo() -> None:
        if getattr(type(thing), ORIGINAL, None) is original:
            thing.__class__ = kind

    return undo


def _reduce(thing: Any, protocol: Any) -> Any:
    original = getattr(type(thing), ORIGINAL)
    made = original.__reduce_ex__(thing, protocol)
    if isinstance(made, str):
        return made
    function, arguments, *rest = made
    arguments = tuple(_own_class(argument) for argument in arguments)
    if function is vars(copyreg)["__newobj__"] and len(arguments) == 1:
        # Pickle insists that this one makes an object of the class it was asked of.
        return vars(copyreg)["_reconstructor"], (*arguments, object, None), *rest
    return _own_class(function), arguments, *rest


def _own_class(value: Any) -> Any:
    return getattr(value, ORIGINAL, value) if isinstance(value, type) else value
