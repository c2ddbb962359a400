"""Everything a user may write: experiment, workload, cluster, architecture. Loads no torch."""

from paceline.spec.architecture import (
    ARCHITECTURES,
    Architecture,
    Auto,
    Average,
    Hybrid,
    Pipeline,
    Replicated,
    Ring,
    Server,
    Single,
    architecture_name,
    format_architecture,
    parse_architecture,
)
from paceline.spec.cluster import Cluster, Host, Link, parse_link
from paceline.spec.compare import Axes, Comparison, Paper, comparison_to_toml, load_comparison, vary
from paceline.spec.experiment import (
    Experiment,
    Measurement,
    from_tables,
    load,
    replace,
    to_toml,
)
from paceline.spec.faults import Fault, parse_fault
from paceline.spec.optimizers import OPTIMIZERS, OptimizerFacts
from paceline.spec.prediction import Prediction
from paceline.spec.workload import Optimizer, Schedule, Script, Workload

__all__ = [
    "ARCHITECTURES",
    "OPTIMIZERS",
    "Architecture",
    "Auto",
    "Average",
    "Axes",
    "Cluster",
    "Comparison",
    "Experiment",
    "Fault",
    "Host",
    "Hybrid",
    "Link",
    "Measurement",
    "Optimizer",
    "OptimizerFacts",
    "Paper",
    "Pipeline",
    "Prediction",
    "Replicated",
    "Ring",
    "Schedule",
    "Script",
    "Server",
    "Single",
    "Workload",
    "architecture_name",
    "comparison_to_toml",
    "format_architecture",
    "from_tables",
    "load",
    "load_comparison",
    "parse_architecture",
    "parse_fault",
    "parse_link",
    "replace",
    "to_toml",
    "vary",
]
