"""Changes to an experiment that several causes advise, and what a step would need with them."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from paceline import spec
from paceline.explain.evidence import Evidence
from paceline.explain.facts import Facts
from paceline.explain.findings import Action, Gain
from paceline.explain.needs import Needs, gain, scaled_links

WORTH_GAIN = 0.05
"""Less is not worth the change."""

FIXED_COMPUTE, FIXED_OF_FEW = 0.4, 0.8
"""Share of forward and backward that may not grow with the batch, on real cores: small matrices
use them badly, those of a few samples hardly at all."""

FEW_SAMPLES = 8
"""Fewer samples do not fill a core's registers."""


def server_of(evidence: Evidence) -> spec.Server | None:
    return evidence.facts.architecture.serves_workers


def architecture_of(architecture: spec.Architecture) -> dict[str, object]:
    return {"architecture": spec.format_architecture(architecture)}


def with_hosts(
    facts: Facts, members: Sequence[str], fields: dict[str, object]
) -> dict[str, object]:
    hosts = facts.experiment.cluster.hosts
    alike = [msgspec.structs.replace(h, count=1) for h in hosts for _ in range(h.count)]
    workers = servers = 0
    for index, host in enumerate(alike):
        names = [f"worker{workers + n}" for n in range(host.workers)]
        names += [f"server{servers + n}" for n in range(host.servers)]
        workers, servers = workers + host.workers, servers + host.servers
        if set(members) & set(names):
            alike[index] = msgspec.structs.replace(host, **fields)
    return {"hosts": [msgspec.to_builtins(one) for one in alike]} if alike else {}


def without_cable(facts: Facts, members: Sequence[str]) -> dict[str, object]:
    """The experiment's hosts with these members' cables like the others'."""
    return with_hosts(facts, members, {"link": ""})


def with_exchange(needs: Needs, factor: float) -> Needs:
    """The busiest link or server, and all others with it, needed `factor` times as long."""
    servers = {name: factor * seconds for name, seconds in needs.serving.items()}
    return replace(scaled_links(needs, factor), serving=servers)


def served_by_more(needs: Needs, factor: int) -> Needs:
    """`factor` times as many servers: each carries that much less."""

    def shared(wire: dict[str, float]) -> dict[str, float]:
        return {n: s / factor if n.startswith("server") else s for n, s in wire.items()}

    out, into = shared(needs.out), shared(needs.into)
    return replace(needs, out=out, into=into, serving=shared(needs.serving))


def all_own(needs: Needs, seconds: float) -> Needs:
    return replace(needs, own={n: max(1e-6, s + seconds) for n, s in needs.own.items()})


def without_slowdown(facts: Facts, workers: Sequence[str]) -> dict[str, object]:
    """The experiment's hosts with these workers' like the others, where they are written out."""
    return with_hosts(facts, workers, {"slowdown": 1.0, "jitter_fraction": 0.0, "device": ""})


def larger_batch(evidence: Evidence, factor: int) -> Action:
    """Each step does `factor` times the samples for the same fixed cost."""
    facts, needs = evidence.facts, evidence.needs
    grows = {w.name: w.phases["forward"] + w.phases["backward"] for w in facts.workers}
    inputs = {w.name: w.phases["input"] for w in facts.workers}

    def with_fixed(fixed: float) -> Gain:
        more = factor - 1
        own = {n: s + more * ((1 - fixed) * grows[n] + inputs[n]) for n, s in needs.own.items()}
        return gain(needs, replace(needs, own=own), factor)

    fixed = FIXED_COMPUTE if facts.typical.samples >= FEW_SAMPLES else FIXED_OF_FEW
    high = with_fixed(fixed if facts.computes_here else 0.05).high
    workload, workers = facts.experiment.workload, facts.summary.workers
    own_batch = facts.typical.samples  # a script's batch is its own; the experiment knows none
    if workload.script is None:
        own_batch = workload.global_batch_for(workers) / workers
    each = round(own_batch * factor)
    text = f"raise the batch to {each} a worker, where the optimizer allows it"
    sizes: dict[str, object] = {} if workload.script else {"batch": each, "global_batch": 0}
    return Action(
        text=text, gain=Gain(low=with_fixed(0.0).low, high=high), change=sizes, effort="script"
    )
