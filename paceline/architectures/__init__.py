"""How members agree on the next weights: one file each, named as the user types it.

Which code an architecture is built by, its structure in `spec` says.
"""

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

import msgspec

from paceline import spec
from paceline.architectures.base import Architecture
from paceline.collectives.context import Context
from paceline.errors import SpecError


def build(options: spec.Architecture, context: Context) -> Architecture:
    """One worker's side of the architecture `options` describes."""
    made: Architecture = _code(options.built_by)(options, context)
    return made


def serve(options: spec.Architecture, context: Context) -> dict[str, object]:
    """Be a server member until the workers are done; returns its counters."""
    if not options.served_by:
        name = spec.architecture_name(options)
        problem = f"{name} has no servers, and this member is one."
        raise SpecError("--servers", problem, "leave servers out.")
    counters: dict[str, object] = _code(options.served_by)(options, context)
    return counters


def resolve(
    options: spec.Architecture, *, workers: int, hosts: int, gpus: int
) -> tuple[spec.Architecture, str]:
    """Replace `auto` by a choice, with the reason in words; anything else stays as it is."""
    if not options.is_undecided:
        return options, "as asked"
    if workers == 1:
        return spec.Single(), "one worker has nobody to agree with"
    if gpus >= workers:
        return spec.Ring(), "NCCL's all-reduce is the fastest between GPUs"
    if hosts == 1:
        reason = "workers on one host exchange through shared memory"
        return spec.Server(placement="colocated"), reason
    return spec.Ring(), "an all-reduce uses every link in both directions and needs no servers"


def _code(place: str) -> Callable[..., Any]:
    """What `built_by` or `served_by` names, loaded when asked for."""
    module, _, attribute = place.partition(":")
    code: Callable[..., Any] = getattr(import_module(module), attribute)
    return code


def to_environment(options: spec.Architecture) -> dict[str, str]:
    """How a launcher hands the architecture to its members."""
    return {"PACELINE_ARCHITECTURE": msgspec.json.encode(options).decode()}


def from_environment() -> spec.Architecture | None:
    text = os.environ.get("PACELINE_ARCHITECTURE")
    if text is None:
        return None
    if not text.startswith("{"):
        return spec.parse_architecture(text, "PACELINE_ARCHITECTURE")
    return spec.decode_architecture(msgspec.json.decode(text), "PACELINE_ARCHITECTURE")
