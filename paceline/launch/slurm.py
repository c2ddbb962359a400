"""Members started by srun, and the batch script that starts them.

Only a job step counts: inside sbatch's and salloc's shells Slurm's variables describe the
allocation, not this process.
"""

import re
import shlex
from collections.abc import Mapping

import msgspec

from paceline.errors import SpecError
from paceline.launch.identity import Identity, from_launcher, integer

FIRST_PORT, PORTS = 16384, 16000
"""Below 32768, where Linux begins to hand out ports by itself."""

STEP_VARIABLES = ("SLURM_PROCID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS")


MOST = 1_000_000
WORDS = {
    "name": r"[A-Za-z0-9][\w.+-]{0,63}",
    "partition": r"[\w.,-]*",
    "time": r"(\d+(-\d+)?(:\d+){0,2})?",
}
"""Pattern of a value in a batch script: it can neither end its line nor begin another."""

FIXES = {
    "name": "use letters, digits, dots and dashes.",
    "partition": "write its name, or several with commas.",
    "time": "write it as Slurm does: 30 (minutes), 2:00:00 or 1-12.",
}


class BatchJob(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a batch script."""

    command: tuple[str, ...]
    """What every member runs: `paceline train …`, `paceline run …` or a script of the user's."""

    workers: int
    servers: int = 0
    hosts: int = 1
    cores: int = 1
    """Cores of each member."""

    gpus: int = 0
    """GPUs of each member."""

    name: str = "paceline"
    partition: str = ""
    time: str = ""
    """Longest time it may take, as Slurm writes it: "30" (minutes), "2:00:00", "1-12"."""


def batch_script(job: BatchJob) -> str:
    """The script for `sbatch`: one task per member, the last ones servers."""
    members = job.workers + job.servers
    if not job.command:
        fix = "write it after two dashes: `paceline slurm --workers 2 -- paceline train …`."
        raise SpecError("paceline slurm", "there is no command to run.", fix)
    if job.workers < 1 or job.servers < 0 or not 1 <= job.hosts <= members:
        given = f"{job.workers} workers and {job.servers} servers on {job.hosts} hosts"
        fix = "ask for at least one worker, and at most as many hosts as members."
        raise SpecError("paceline slurm", f"{given} cannot be placed.", fix)
    if job.cores < 1 or job.gpus < 0 or members > MOST or max(job.cores, job.gpus) > MOST:
        given = f"{members} members with {job.cores} cores and {job.gpus} GPUs each"
        raise SpecError("paceline slurm", f"{given} make no job.", "ask for one core or more.")
    for name, pattern in WORDS.items():
        if not re.fullmatch(pattern, getattr(job, name)):
            problem = f"{getattr(job, name)!r} is no {name} that Slurm takes."
            raise SpecError(f"--{name}", problem, FIXES[name])
    asked = {
        "job-name": job.name,
        "nodes": job.hosts,
        "ntasks": members,
        "cpus-per-task": job.cores,
        "gpus-per-task": job.gpus,
        "partition": job.partition,
        "time": job.time,
        "output": "%x-%j.out",
    }
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH --{option}={value}" for option, value in asked.items() if value]
    lines += [
        "set -euo pipefail",
        "# The job's secret: members that do not know it are refused.",
        "PACELINE_KEY=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')",
        f"export PACELINE_KEY PACELINE_SERVERS={job.servers} OMP_NUM_THREADS={job.cores}",
        "# A lost member ends the step, so that nobody waits for it until the time is up.",
        f"srun --kill-on-bad-exit=1 --cpus-per-task={job.cores} {shlex.join(job.command)}",
    ]
    return "\n".join(lines) + "\n"


def identify(environ: Mapping[str, str]) -> Identity | None:
    if not all(name in environ for name in STEP_VARIABLES):
        return None
    members = integer(environ, "SLURM_STEP_NUM_TASKS")
    if members == 1:  # `srun --pty bash`: a shell, from which other launchers are started
        return None
    hosts = expand_hosts(environ["SLURM_STEP_NODELIST"])
    tasks = expand_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", f"{members}"))
    node = integer(environ, "SLURM_NODEID", 0)
    if node >= len(tasks):
        problem = f"host number {node} is not among {environ['SLURM_STEP_TASKS_PER_NODE']}."
        raise SpecError("SLURM_NODEID", problem, "start members with one srun.")
    # Task 0 is on the first host of a step, whatever the distribution. A host's name need not mean
    # anything outside Slurm, so it is not used where loopback does.
    first = "127.0.0.1" if tasks[node] == members else hosts[0]
    return from_launcher(
        environ,
        "srun",
        index=integer(environ, "SLURM_PROCID"),
        members=members,
        local_index=integer(environ, "SLURM_LOCALID", 0),
        local_members=tasks[node],
        coordinator=f"{first}:{_port(environ)}",
        host=environ.get("SLURMD_NODENAME", hosts[min(node, len(hosts) - 1)]),
    )


def expand_hosts(text: str) -> list[str]:
    """Return the hosts of Slurm's list: "node[01-03,07],login" -> node01 node02 node03 node07
    login."""
    hosts: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        names = [""]
        for literal, listed in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", part):
            pieces = [literal] if literal else _expand_range(listed)
            names = [name + piece for name in names for piece in pieces]
        hosts += names
    return hosts


def expand_counts(text: str) -> list[int]:
    """ "2(x3),1" -> 2 2 2 1: tasks on each host."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts


def _expand_range(listed: str) -> list[str]:
    names: list[str] = []
    for item in listed.split(","):
        first, dash, last = item.partition("-")
        if dash:
            names += [f"{n:0{len(first)}d}" for n in range(int(first), int(last) + 1)]
        else:
            names.append(item)
    return names


def _port(environ: Mapping[str, str]) -> int:
    """A port that all members of the step compute alike and other jobs do not use.

    Slurm hands out no ports by default. Where this one is taken, worker 0 says so, and
    PACELINE_COORDINATOR overrides it.
    """
    job, step = integer(environ, "SLURM_JOB_ID", 0), integer(environ, "SLURM_STEP_ID", 0)
    return FIRST_PORT + (job * 31 + step) % PORTS
