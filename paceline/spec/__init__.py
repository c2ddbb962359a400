"""Everything a user may write: experiment, workload, cluster, architecture. Loads no torch."""

from paceline.spec.all_reduce import Average, Hybrid, Ring
from paceline.spec.architecture import (
    ARCHITECTURES,
    Architecture,
    architecture_name,
    decode_architecture,
    decode_hook,
    format_architecture,
    known_architectures,
    parse_architecture,
)
from paceline.spec.base import Spec
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
from paceline.spec.facts import ArchitectureFacts
from paceline.spec.faults import Fault, parse_fault
from paceline.spec.one_process import Auto, Replicated, Single
from paceline.spec.optimizers import OPTIMIZERS, OptimizerFacts
from paceline.spec.pipeline import Pipeline
from paceline.spec.prediction import Prediction
from paceline.spec.search import (
    Goal,
    Search,
    SearchQuestion,
    load_search,
    parse_goal,
    search_to_toml,
)
from paceline.spec.server import Server
from paceline.spec.workload import Optimizer, Schedule, Script, Workload

__all__ = [
    "ARCHITECTURES",
    "OPTIMIZERS",
    "Architecture",
    "ArchitectureFacts",
    "Auto",
    "Average",
    "Axes",
    "Cluster",
    "Comparison",
    "Experiment",
    "Fault",
    "Goal",
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
    "Search",
    "SearchQuestion",
    "Server",
    "Single",
    "Spec",
    "Workload",
    "architecture_name",
    "comparison_to_toml",
    "decode_architecture",
    "decode_hook",
    "format_architecture",
    "from_tables",
    "known_architectures",
    "load",
    "load_comparison",
    "load_search",
    "parse_architecture",
    "parse_fault",
    "parse_goal",
    "parse_link",
    "replace",
    "search_to_toml",
    "to_toml",
    "vary",
]
