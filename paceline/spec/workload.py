"""What is trained: model, data, batch, length, optimizer; or a script that brings its own."""

import math
import shlex
from pathlib import PurePath
from typing import Literal

import msgspec

from paceline.spec.base import LARGEST, Spec, require
from paceline.spec.optimizers import OPTIMIZERS, OptimizerFacts


class Optimizer(Spec, frozen=True, kw_only=True):
    """A torch optimizer by name; values left out are torch's own defaults."""

    name: Literal["sgd", "adam", "adamw", "rmsprop", "adagrad", "lars", "lamb"] = "sgd"
    """`lars` and `lamb` scale each layer's step to its weights, for very large batches."""

    learning_rate: float = 0.05
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    trust: float = 0.001
    """`lars`: a layer's step is at most about this part of its weights' norm, times the rate."""

    def __post_init__(self) -> None:
        where = "[workload.optimizer]"
        problem = f"learning_rate = {self.learning_rate:g} is not above zero."
        require(self.learning_rate > 0, where, problem, "write a rate such as 0.05.")
        problem = f"learning_rate = {self.learning_rate:g} is larger than any weight."
        require(self.learning_rate <= 1e6, where, problem, "write a rate such as 0.05.")
        for name in ("momentum", "weight_decay"):
            value = getattr(self, name)
            require(value >= 0, where, f"{name} = {value:g} is negative.", "write 0 or more.")
        problem = f"trust = {self.trust:g} is not above zero."
        require(self.trust > 0, where, problem, "write 0.001.")
        takes_momentum = self.facts.takes_momentum
        problem = f"momentum does not apply to {self.name}."
        require(not self.momentum or takes_momentum, where, problem, "leave it out, or use sgd.")
        if self.nesterov:
            problem = f"nesterov does not apply to {self.name}."
            require(self.facts.takes_nesterov, where, problem, "leave it out, or use sgd.")
            problem = "nesterov looks ahead along a momentum, and there is none."
            require(self.momentum > 0, where, problem, "add momentum = 0.9.")
        problem = f"trust does not apply to {self.name}."
        applies = self.facts.takes_trust or self.trust == 0.001
        require(applies, where, problem, "leave it out, or use lars.")

    @property
    def facts(self) -> OptimizerFacts:
        """Its row of the table."""
        return OPTIMIZERS[self.name]

    @property
    def state_numbers(self) -> int:
        """Numbers that it keeps for each weight."""
        momentum = self.facts.momentum_numbers if self.momentum else 0
        return self.facts.state_numbers + momentum


class Schedule(Spec, frozen=True, kw_only=True):
    """How the learning rate moves."""

    name: Literal["constant", "step", "cosine"] = "constant"

    warmup_steps: int = 0
    """Rise linearly from a tenth of the rate over this many steps."""

    every_steps: int = 0
    """`step`: multiply by `factor` each time this many steps have passed."""

    factor: float = 0.1

    scale_with_workers: bool = False
    """Multiply the rate by the number of workers (the linear scaling rule)."""

    base_batch: int = 0
    """The same rule from the batch: the rate is for this many samples, and grows with the global
    batch; 0 leaves it alone. Add `warmup_steps`: a large rate needs a gentle start."""

    def __post_init__(self) -> None:
        where = "[workload.schedule]"
        needs = self.name != "step" or self.every_steps > 0
        require(needs, where, "a step schedule has no every_steps.", "add every_steps = 1000.")
        problem = f"warmup_steps = {self.warmup_steps} is negative."
        require(self.warmup_steps >= 0, where, problem, "write 0 or more.")
        problem = f"every_steps = {self.every_steps} is negative."
        require(self.every_steps >= 0, where, problem, "write 0 or more.")
        problem = f"factor = {self.factor:g} is not above zero."
        require(self.factor > 0, where, problem, "write 0.1.")
        problem = f"base_batch = {self.base_batch} is negative."
        require(self.base_batch >= 0, where, problem, "write the batch the rate was found for.")
        both = "scale_with_workers and base_batch both scale the rate."
        fix = "keep one: base_batch follows the global batch whatever the workers."
        require(not (self.scale_with_workers and self.base_batch), where, both, fix)


class Script(Spec, frozen=True, kw_only=True):
    """A user's own program, as every worker runs it: `python PATH …` or `python -m MODULE …`."""

    path: str = ""
    module: str = ""
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        where = "[workload.script]"
        given = f'path = "{self.path}" and module = "{self.module}"'
        one = bool(self.path) != bool(self.module)
        require(one, where, f"{given}: one of them names the program.", "write path or module.")

    @property
    def line(self) -> tuple[str, ...]:
        """What follows the interpreter on the command line."""
        program = (self.path,) if self.path else ("-m", self.module)
        return (*program, *self.arguments)

    @property
    def name(self) -> str:
        """A short name: the file's without its folder, or the module's."""
        return PurePath(self.path).name or self.module

    def __str__(self) -> str:
        program = self.name if self.path else f"-m {self.module}"
        return shlex.join([*program.split(" ", 1), *self.arguments])


GradientUse = Literal["nothing", "clip"]
"""What a training loop does with gradients between backward and `optimizer.step()`."""


class Workload(Spec, frozen=True, kw_only=True):
    """One model on one data set; or a script, and then nothing else is known of it."""

    script: Script | None = None
    """The user's own program, in place of all that follows."""

    model: str = "tutorial-cnn"
    """A built-in name, or "module:function" that returns a torch module."""

    data: str = "shapes"
    data_dir: str = ""
    """Where copies of the data already lie; nothing is downloaded then."""

    input_shape: tuple[int, ...] = ()
    """Shape of one synthetic sample; the model's own when left out."""

    batch: int = 0
    """Samples per worker and step."""

    global_batch: int = 0
    """Samples of all workers together per step; split over them."""

    steps: int = 0
    epochs: float = 0.0

    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    seed: int = 0
    accumulate: int = 1
    """Backward passes per optimizer step; each takes its share of the batch."""

    clip_norm: float = 0.0
    """Bound on the norm of the whole gradient; 0 for none."""

    label_smoothing: float = 0.0
    """Share of each target that is spread over all classes."""

    reading: Literal["each", "scatter"] = "each"
    """`each`: every worker reads its own part; `scatter`: worker 0 reads and sends (P2)."""

    cache: bool = False
    """Keep photographs decoded in memory after their first use; for sets that fit there."""

    precision: Literal["float32", "tf32", "bfloat16"] = "float32"
    """`bfloat16` computes under autocast; weights stay float32. `tf32` lets a GPU's matrix units
    round products of float32 numbers to 10 bits; `float32` never does."""

    layout: Literal["auto", "channels-first", "channels-last"] = "auto"
    compile: bool = False
    graph: Literal["auto", "on", "off"] = "auto"
    """Record a GPU's forward and backward pass once and replay it, which frees the host of starting
    every kernel. `auto`: for built-in models on one worker."""

    evaluate: bool = False
    """Measure accuracy on the test part after training."""

    checkpoint_every: int = 0
    """Steps between checkpoints; 0 for none."""

    resume: str = ""
    """A run folder whose last checkpoint is continued."""

    def __post_init__(self) -> None:
        where = "[workload]"
        if self.script is not None:
            self._leave_unset()
            return
        for name in ("batch", "global_batch", "steps", "epochs", "checkpoint_every", "clip_norm"):
            value = getattr(self, name)
            problem = f"{name} = {value:g} is negative."
            require(value >= 0, where, problem, f"write a {name} above zero.")
        both = f"batch = {self.batch} and global_batch = {self.global_batch} are both given."
        fix = "keep one: batch is per worker, global_batch is the total."
        require(not (self.batch and self.global_batch), where, both, fix)
        both = f"steps = {self.steps} and epochs = {self.epochs:g} are both given."
        require(not (self.steps and self.epochs), where, both, "keep one of them.")
        problem = f"label_smoothing = {self.label_smoothing:g} is not in [0, 1)."
        require(0 <= self.label_smoothing < 1, where, problem, "write 0.1 for ten percent.")
        problem = f"epochs = {self.epochs:g} are more than can be counted."
        require(not self.epochs > LARGEST, where, problem, "write how often the data is seen.")
        problem = f"seed = {self.seed} is not within 64 bits."
        require(-(2**63) <= self.seed < 2**63, where, problem, "write a smaller one.")
        positive = all(size >= 1 for size in self.input_shape)
        fits = positive and math.prod(self.input_shape) <= LARGEST
        problem = f"input_shape = {list(self.input_shape)} is no shape of a sample."
        require(fits, where, problem, "write sizes above zero, such as [3, 32, 32].")
        problem = f"accumulate = {self.accumulate} is not at least 1."
        require(self.accumulate >= 1, where, problem, "write 1 for no accumulation.")

    def _leave_unset(self) -> None:
        """A script's model, data and the rest are its own: a default here would be invented."""
        for field in msgspec.structs.fields(type(self)):
            own, left_out = getattr(self, field.name), ("", field.default)
            problem = f"{field.name} is given beside a script, which has its own."
            fix = "leave it out, and pass it to the script as an argument."
            require(field.name == "script" or own in left_out, "[workload]", problem, fix)
        for name in ("model", "data"):
            msgspec.structs.force_setattr(self, name, "")

    @property
    def gradient_use(self) -> GradientUse | None:
        """What the loop does with gradients. None with a script, which may do anything, and with an
        optimizer that cannot run on servers."""
        if self.script is not None or not self.optimizer.facts.is_elementwise:
            return None
        return "clip" if self.clip_norm else "nothing"

    def global_batch_for(self, workers: int) -> int:
        """Samples per step over all workers: 32 each unless the user says otherwise."""
        assert self.script is None, "a script's batch is its own"
        return self.global_batch or workers * (self.batch or 32)

    def num_steps(self, workers: int, num_samples: int) -> int:
        """Steps to train: as given, or from epochs over `num_samples`; 50 when neither is given."""
        if not self.epochs:
            return self.steps or 50
        per_epoch = max(1, num_samples // self.global_batch_for(workers))
        return max(1, round(self.epochs * per_epoch))
