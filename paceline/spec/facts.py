"""What every architecture states about itself; the rest of the package asks, and never guesses.

Two facts must be stated (`MUST_STATE`). All others have a default that refuses ("it takes no
servers") or that says the fact is unknown (None), so that nothing is assumed of an architecture
that does not state it.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import msgspec

if TYPE_CHECKING:
    from paceline.spec.all_reduce import Average
    from paceline.spec.cluster import Cluster
    from paceline.spec.pipeline import Pipeline
    from paceline.spec.server import Server
    from paceline.spec.workload import Workload

MUST_STATE = ("waits_for_all", "exclusive")


class ArchitectureFacts:
    """Base of every architecture's structure. A subclass adds the options that a user may write."""

    __slots__ = ()

    built_by: ClassVar[str] = ""
    """Code that makes one worker's side from `(options, context)`, as "module:name"."""

    served_by: ClassVar[str] = ""
    """Main function `(options, context) -> counters` of its server members, as "module:name"."""

    predicted_by: ClassVar[str] = ""
    """The `paceline.predict.model.Model` of its step, as "module:name"; empty where none exists."""

    is_undecided: ClassVar[bool] = False
    """It stands for another architecture, which Paceline chooses before the job starts."""

    is_one_process: ClassVar[bool] = False
    """It is one worker, however many devices that worker has."""

    is_all_reduce: ClassVar[bool] = False
    """One collective over all workers sums each bucket of gradients, and each worker updates all
    weights."""

    takes_scripts: ClassVar[bool] = False
    """Any script may use it, not only the built-in loop."""

    takes_one_worker: ClassVar[bool] = True
    """A job of one worker may be written with it."""

    takes_recorded_passes: ClassVar[bool] = False
    """A GPU may replay both passes of a step: no code must run inside of backward."""

    takes_tensorflow: ClassVar[bool] = False
    """It serves Keras on TensorFlow too."""

    sums_in_host: ClassVar[bool] = False
    """Workers of a host sum in memory that they share, however many hosts there are."""

    divides_model: ClassVar[bool] = False
    """No worker trains the script's own model as it is: layers or copies of it are elsewhere."""

    piece_option: ClassVar[str] = ""
    """The option that sets how large the pieces are in which gradients travel."""

    @property
    def waits_for_all(self) -> bool:
        """A step ends when every worker has done its part: the slowest sets the pace."""
        raise NotImplementedError

    @property
    def exclusive(self) -> bool:
        """Weights stay unchanged until all workers have used them: it trains like `single`."""
        raise NotImplementedError

    @property
    def takes_servers(self) -> bool:
        """Server members have something to do in it."""
        return False

    @property
    def needs_servers(self) -> bool:
        """It starts one server where the user asks for no number of them."""
        return False

    @property
    def serving(self) -> "Server | None":
        """How servers, or workers in their place, serve what is exchanged; None without servers."""
        return None

    @property
    def is_served(self) -> bool:
        return self.serving is not None

    @property
    def serves_workers(self) -> "Server | None":
        """The same, where every worker exchanges with the servers itself."""
        return None if self.sums_in_host else self.serving

    @property
    def averaging(self) -> "Average | None":
        """How workers average weights after local steps; None where they do not."""
        return None

    @property
    def staging(self) -> "Pipeline | None":
        """How layers are split over workers; None where each worker has all of them."""
        return None

    @property
    def collective(self) -> str:
        """The library that sums over workers, or `auto`; empty where it uses no such library."""
        return ""

    @property
    def piece_bytes(self) -> int | None:
        """The size of pieces that the user asked for; None where Paceline chooses it."""
        return None

    @property
    def takes_newcomers(self) -> bool:
        """A worker may join a running job: with servers, or if it continues after a failure."""
        return False

    @property
    def survives(self) -> bool:
        """The other workers can continue in place when one failed (`on_loss = "continue"`)."""
        return False

    @property
    def regroups(self) -> bool:
        """The job's coordinator announces how they continue; otherwise the servers decide it."""
        return self.survives and not self.is_served

    def rounds(self, workers: int, hosts: int) -> float | None:
        """Messages of one step that must follow one another; None where that is unknown."""
        return None

    def copies_sent(self, workers: int, state_numbers: int) -> float | None:
        """Copies of all weights that a worker sends in a step without servers, and receives; None
        where that is unknown. `workers` exchange, and the optimizer keeps `state_numbers` numbers
        for each weight."""
        return None

    def check(self, workload: "Workload", cluster: "Cluster") -> None:
        """Raise SpecError for a job that this architecture cannot do."""

    def fix_for_workers(self, workers: int) -> str:
        """What to write where it is one process and `workers` are asked for."""
        return "write workers = 1, or choose ring or server."

    def changed(self, **options: Any) -> Self:
        """The same with other options, without those that have no effect with them."""
        assert isinstance(self, msgspec.Struct)
        return type(self)(**self.effective({**msgspec.structs.asdict(self), **options}))

    @classmethod
    def effective(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """`options` without those that have no effect with the others."""
        return dict(options)


def ring_copies(workers: int) -> float:
    """Copies of a tensor that each worker sends, and receives, in a ring all-reduce of it."""
    return 2 * (workers - 1) / workers
