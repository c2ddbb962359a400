"""The table of optimizers: what the loop, the servers and the predictor need to know of each.

A class is written as "module:name", because this package loads no torch.
"""

import msgspec


class OptimizerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer that the built-in loop offers, or that servers can run for a script."""

    torch_class: str
    state_numbers: int
    """Numbers that it keeps for each weight, without a momentum that the user asked for."""

    momentum_numbers: int = 0
    """Numbers that it keeps for each weight in addition, once a momentum is given."""

    takes_momentum: bool = False
    takes_nesterov: bool = False
    takes_trust: bool = False

    is_elementwise: bool = True
    """A weight's update reads nothing of other weights, so that a chunk may be updated alone."""

    is_fused: bool = False
    """Torch has a kernel for it that makes one pass over memory."""

    is_fused_on_gpu: bool = False

    @property
    def class_name(self) -> str:
        return self.torch_class.partition(":")[2]


OPTIMIZERS: dict[str, OptimizerFacts] = {
    "sgd": OptimizerFacts(
        torch_class="torch.optim:SGD",
        state_numbers=0,
        momentum_numbers=1,
        takes_momentum=True,
        takes_nesterov=True,
        is_fused=True,
        is_fused_on_gpu=True,
    ),
    "adam": OptimizerFacts(
        torch_class="torch.optim:Adam", state_numbers=2, is_fused=True, is_fused_on_gpu=True
    ),
    "adamw": OptimizerFacts(
        torch_class="torch.optim:AdamW", state_numbers=2, is_fused=True, is_fused_on_gpu=True
    ),
    "rmsprop": OptimizerFacts(
        torch_class="torch.optim:RMSprop",
        state_numbers=1,
        momentum_numbers=1,
        takes_momentum=True,
    ),
    "adagrad": OptimizerFacts(torch_class="torch.optim:Adagrad", state_numbers=1, is_fused=True),
    "lars": OptimizerFacts(
        torch_class="paceline.builtin.large_batch:Lars",
        state_numbers=1,  # its momentum buffer is there whatever the momentum
        takes_momentum=True,
        takes_trust=True,
        is_elementwise=False,
    ),
    "lamb": OptimizerFacts(
        torch_class="paceline.builtin.large_batch:Lamb", state_numbers=2, is_elementwise=False
    ),
    "adadelta": OptimizerFacts(torch_class="torch.optim:Adadelta", state_numbers=2),
    "adamax": OptimizerFacts(torch_class="torch.optim:Adamax", state_numbers=2),
    "nadam": OptimizerFacts(torch_class="torch.optim:NAdam", state_numbers=2),
    "radam": OptimizerFacts(torch_class="torch.optim:RAdam", state_numbers=2),
    "asgd": OptimizerFacts(torch_class="torch.optim:ASGD", state_numbers=1),
    "rprop": OptimizerFacts(torch_class="torch.optim:Rprop", state_numbers=2),
}
"""By name. The built-in loop offers those that `spec.Optimizer` names; servers run every
element-wise one for a script that brings it."""
