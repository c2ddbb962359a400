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
from paceline.spec.experiment import (
    Experiment,
    Fault,
    Measurement,
    from_tables,
    load,
    replace,
    to_toml,
)
from paceline.spec.workload import Optimizer, Schedule, Workload

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "Auto",
    "Average",
    "Cluster",
    "Experiment",
    "Fault",
    "Host",
    "Hybrid",
    "Link",
    "Measurement",
    "Optimizer",
    "Pipeline",
    "Replicated",
    "Ring",
    "Schedule",
    "Server",
    "Single",
    "Workload",
    "architecture_name",
    "format_architecture",
    "from_tables",
    "load",
    "parse_architecture",
    "parse_link",
    "replace",
    "to_toml",
]
