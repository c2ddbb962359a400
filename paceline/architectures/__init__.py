"""How members agree on the next weights: one file each, named as the user types it; one table."""

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

import msgspec

from paceline import spec
from paceline.architectures.base import Architecture
from paceline.collectives.context import Context

TABLE: dict[str, str] = {
    "single": "paceline.architectures.single:SingleArchitecture",
    "ring": "paceline.architectures.ring:build",
    "server": "paceline.architectures.server:build",
    "average": "paceline.architectures.average:AverageArchitecture",
    "hybrid": "paceline.architectures.hybrid:HybridArchitecture",
    "replicated": "paceline.architectures.replicated:ReplicatedArchitecture",
    "pipeline": "paceline.architectures.pipeline:PipelineArchitecture",
}
"""Name -> what makes one from `(options, context)`, loaded when asked for."""

SERVERS: dict[str, str] = {
    "server": "paceline.architectures.server:serve",
    "hybrid": "paceline.architectures.hybrid:serve",
}
"""Name -> main function `(options, context) -> counters` of its server members."""


def build(options: spec.Architecture, context: Context) -> Architecture:
    """One worker's side of the architecture `options` describes."""
    made: Architecture = _entry(TABLE, options)(options, context)
    return made


def serve(options: spec.Architecture, context: Context) -> dict[str, object]:
    """Be a server member until the workers are done; returns its counters."""
    counters: dict[str, object] = _entry(SERVERS, options)(options, context)
    return counters


def resolve(
    options: spec.Architecture, *, workers: int, hosts: int, gpus: int
) -> tuple[spec.Architecture, str]:
    """Replace `auto` by a choice, with the reason in words; anything else stays as it is."""
    if not isinstance(options, spec.Auto):
        return options, "as asked"
    if workers == 1:
        return spec.Single(), "one worker has nobody to agree with"
    if gpus >= workers:
        return spec.Ring(), "NCCL's all-reduce is the fastest between GPUs"
    if hosts == 1 and "server" in TABLE:
        reason = "workers on one host exchange through shared memory"
        return spec.Server(placement="colocated"), reason
    return spec.Ring(), "an all-reduce uses every link in both directions and needs no servers"


def _entry(table: dict[str, str], options: spec.Architecture) -> Callable[..., Any]:
    module, _, attribute = table[spec.architecture_name(options)].partition(":")
    entry: Callable[..., Any] = getattr(import_module(module), attribute)
    return entry


def to_environment(options: spec.Architecture) -> dict[str, str]:
    """How a launcher hands the architecture to its members."""
    return {"PACELINE_ARCHITECTURE": msgspec.json.encode(options).decode()}


def from_environment() -> spec.Architecture | None:
    text = os.environ.get("PACELINE_ARCHITECTURE")
    if text is None:
        return None
    if not text.startswith("{"):
        return spec.parse_architecture(text, "PACELINE_ARCHITECTURE")
    options: spec.Architecture = msgspec.json.decode(text, type=spec.Architecture)
    return options
