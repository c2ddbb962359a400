"""The option `--on-loss`: what a job asks for when a worker fails, whether it can be had, and which
failures end the job.

What the members do about it is the architecture's affair: a launcher only does not end them.
"""

import re
from collections.abc import Callable, Collection, Iterable, Sequence

from paceline import spec
from paceline.errors import MemberError, SpecError
from paceline.launch.last_words import ECHO_SECONDS, Ending
from paceline.launch.process import MemberCommand
from paceline.protocol.placement import worker_of
from paceline.protocol.plan import check, why_no_second_homes, written_shape
from paceline.record import RecordedEvent, RunFolder

WHERE = "--on-loss"

BEGUN = "begun"
"""The kind of event that says that all members have met: before it no member can continue."""

LOST = re.compile(r"\b((?:worker|server)\d+) was (?:lost|ended by signal 9)\b")
"""Pattern of an error that names a failed member: said by those that missed it, or of its end
itself."""


class MemberFailures:
    """Decides which failures of members end the job; one for each life of a run."""

    def __init__(
        self,
        folder: RunFolder,
        say: Callable[[str], None],
        replacements: Iterable[MemberCommand] = (),
    ) -> None:
        """`replacements`: workers that may be started in place of failed ones."""
        self._folder, self._say = folder, say
        experiment = folder.experiment()
        self._initial_workers = experiment.cluster.workers
        self._servers = experiment.num_servers
        self._servers_have_backups = not why_servers_are_needed(experiment)
        self._replacements = iter(replacements)
        self.replacements_due: list[MemberCommand] = []
        """Workers for the launcher to start in place of failed ones."""
        self._lives = self._begun()
        self.outlived: dict[str, float] = {}
        """Failed members without which the others continue, and when each ended."""
        self._speakers_ending: Ending | None = None
        """The ending of the last failed member that spoke for all and failed by an error of its
        own."""

    def _begun(self) -> int:
        return sum(event.kind == BEGUN for event in self._folder.events())

    def fatal(self, failed: Sequence[Ending], others: Collection[str]) -> list[Ending]:
        """Return the failed members that end the job, with what may have been their cause.

        `others`: members that run, or have ended well.
        """
        workers = [name for name in others if name.startswith("worker")]
        news = [one for one in failed if one.name not in self.outlived]
        if not news:
            return []
        able = self._are_backed_up(news) and all(map(self._is_dispensable, news))
        if workers and able and self._begun() > self._lives:
            for one in sorted(news, key=lambda one: one.name):
                if one.status > 0 and worker_of(one.name) == self._speaker():
                    self._speakers_ending = one
                self.outlived[one.name] = one.time
                how = MemberError(one.name, one.status, one.lines).brief
                # Who comes later asks worker 0 for its place.
                is_worker = one.name.startswith("worker") and "worker0" not in self.outlived
                replacement = next(self._replacements, None) if is_worker else None
                starts = "" if replacement is None else f"{replacement.name} starts in its place"
                instead = f", and {starts}" if starts else ""
                left = f"{len(workers)} workers go" if len(workers) > 1 else "1 worker goes"
                self._say(f"{how}; {left} on without it{instead}")
                self.replacements_due += [] if replacement is None else [replacement]
            return []
        if any(map(_has_own_reason, news)):
            return news
        return [*self._last_outlived(failed, news), *news]

    def _speaker(self) -> int | None:
        """The worker that does what is done once for all."""
        ranks = range(self._initial_workers)
        return min((r for r in ranks if f"worker{r}" not in self.outlived), default=None)

    def _last_outlived(self, failed: Sequence[Ending], news: Sequence[Ending]) -> list[Ending]:
        """Return the last failed member that the job continued without, if those that failed now
        may have lost it and nothing else is known to have gone wrong. Without the failures before
        it they had continued."""
        first = min(one.time for one in news)
        lost = [one for one in failed if one.name in self.outlived]
        near = [one for one in lost if one.time >= first - ECHO_SECONDS]
        return [max(near, key=lambda one: one.time)] if near else []

    def _are_backed_up(self, news: Sequence[Ending]) -> bool:
        """Return whether the state of all failed servers has a backup, and one server remains."""
        names = [one.name for one in news if one.name.startswith("server")]
        gone = [name for name in self.outlived if name.startswith("server")]
        return not names or (self._servers_have_backups and len(gone) + len(names) < self._servers)

    def _is_dispensable(self, one: Ending) -> bool:
        """A worker, whatever it died of but what it was asked for: that all would die of."""
        rank = worker_of(one.name)
        return rank is None or rank >= self._initial_workers or one.status != SpecError.exit_status

    def record(self, dilation: float) -> None:
        """The others have ended well: have in the record whom they had no more steps to miss in.

        MemberError where it was the one that spoke for all, by an error behind its last step: what
        it does once for all, as saving the weights, nobody did.
        """
        told = {event.member for event in self._folder.events() if event.kind == "lost"}
        for name, moment in self.outlived.items():
            if name in told:
                continue
            text = f"{name} was lost when nobody needed it any more"
            event = RecordedEvent(
                time_seconds=moment / dilation, member=name, kind="lost", text=text
            )
            self._folder.add_event(event)
            for member in self._folder.members():
                if member.name == name:
                    member.status = "lost"
                    self._folder.write_member(member)
        last = self._speakers_ending
        if last is not None and self._has_done_all_steps(last.name):
            raise MemberError(last.name, last.status, last.lines)

    def _has_done_all_steps(self, name: str) -> bool:
        names = [f"worker{rank}" for rank in range(self._initial_workers)]
        last = {one: steps[-1].step for one in names if (steps := self._folder.steps(one))}
        return last.get(name, -1) >= max(last.values(), default=-1)


def _has_own_reason(one: Ending) -> bool:
    """Return whether it was a signal from outside, or an error that does not come from another
    failure."""
    return one.status < 0 or bool(one.complaint and not one.is_echo)


def check_on_loss(experiment: spec.Experiment) -> None:
    """Raise SpecError where `continue` is asked for and nobody could."""
    cluster, kind = experiment.cluster, experiment.architecture
    if not cluster.goes_on:
        return
    if cluster.workers == 1:
        problem = "there is one worker, and nobody to go on without it."
        raise SpecError(WHERE, problem, "write stop, and --restarts to start again.")
    check_survives(kind)
    if kind.serves_workers is not None:
        check(kind.serves_workers, written_shape(experiment))
    for name, needs_all in {
        "reading": experiment.workload.reading != "each",
        "balance": cluster.balance,
    }.items():
        if needs_all:
            problem = f"{name} does not go with it: it takes every worker that began."
            raise SpecError(WHERE, problem, "leave it out, or write stop.")
    if cluster.launcher == "ray":
        problem = "members that Ray starts end together."
        raise SpecError(WHERE, problem, "leave --launcher out, or write stop.")


def why_servers_are_needed(experiment: spec.Experiment) -> str:
    """Why the others cannot go on without a lost server; empty where they can."""
    served = experiment.architecture.serves_workers
    if served is None:
        return "there are no servers"
    return why_no_second_homes(served, written_shape(experiment))


def check_survives(kind: spec.Architecture) -> None:
    """Raise SpecError for an architecture whose workers need each other."""
    if not kind.survives:
        name = spec.format_architecture(kind)
        problem = f"the workers of {name} cannot go on without one of them."
        again = "to start again"
        if kind.staging is not None:
            again = "to begin anew: a pipeline has no checkpoints"
        raise SpecError(WHERE, problem, f"write stop, and --restarts {again}.")


def way_out(error: MemberError, folder: RunFolder) -> str:
    """The fix of an error that tells of a loss: the flags with which the job would have outlived
    it; empty where there are none, or it tells of something else."""
    experiment = folder.experiment()
    lost = set(LOST.findall(str(error).partition("\n")[0]))
    ways = []
    if lost and _could_go_on(experiment, lost, folder):
        ways.append("--on-loss continue goes on without it")
    if lost and not experiment.cluster.restarts:
        ways.append("--restarts 3 starts all again")
    return f"\n  fix: {'; '.join(ways)}." if ways else ""


def _could_go_on(experiment: spec.Experiment, lost: Collection[str], folder: RunFolder) -> bool:
    """Return whether the remaining workers could have continued, had they been asked to."""
    if experiment.cluster.goes_on or not any(folder.steps(one.name) for one in folder.members()):
        return False  # it was asked for and did not help, or came before all had met
    asked = spec.replace(experiment, on_loss="continue")
    try:
        check_on_loss(asked)
    except SpecError:
        return False
    num_servers = sum(name.startswith("server") for name in lost)
    serves = not num_servers or (
        num_servers < asked.num_servers and not why_servers_are_needed(asked)
    )
    return serves and len(lost) - num_servers < asked.cluster.workers
