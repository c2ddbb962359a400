"""Identities from environments as launchers really make them, and from generated ones."""

import platform
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import SpecError
from paceline.launch import Identity, identify, to_environment
from paceline.launch.slurm import expand_counts, expand_hosts

TORCHRUN = {
    "GROUP_RANK": "0",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "42151",
    "RANK": "1",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "TORCHELASTIC_RUN_ID": "d7daf2ab",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "WORLD_SIZE": "2",
}
OPENMPI = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "PMIX_HOSTNAME": "left",
    "PMIX_NAMESPACE": "prterun-left-10440@1",
    "PMIX_RANK": "1",
}
MPICH = {
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "11",
    "PMI_HOSTNAME": "left",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
SRUN = {
    "SLURMD_NODENAME": "node07",
    "SLURM_JOB_ID": "4711",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "5",
    "SLURM_PROCID": "4",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NODELIST": "node[01-02,07]",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "PACELINE_ADDRESS": "127.0.0.1",
}
SBATCH_SHELL = {
    "SLURM_JOB_ID": "4711",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "5",
    "SLURM_PROCID": "0",
    "SLURM_JOB_NODELIST": "node[01-02,07]",
    "SLURM_TASKS_PER_NODE": "2(x2),1",
}
KUBERNETES = {
    "JOB_COMPLETION_INDEX": "2",
    "PACELINE_WORKERS": "2",
    "PACELINE_SERVERS": "1",
    "PACELINE_COORDINATOR": "127.1.2.3.example:29400",
    "PACELINE_ADDRESS": "127.0.0.1",
}


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [(TORCHRUN, "torchrun"), (OPENMPI, "mpirun"), (MPICH, "mpirun")],
    ids=["torchrun", "openmpi", "mpich"],
)
def test_two_members_on_one_host(environ: Mapping[str, str], launcher: str) -> None:
    identity = identify(environ)
    assert (identity.launcher, identity.name) == (launcher, "worker1")
    assert (identity.workers, identity.local_index, identity.local_members) == (2, 1, 2)
    assert identity.address == "127.0.0.1"
    assert identity.on_one_host


def test_torchruns_agent_keeps_the_store_and_counts_restarts() -> None:
    identity = identify(TORCHRUN)
    assert identity.coordinator == "localhost:42151"
    assert identity.store_is_kept
    assert identity.attempt == 1


def test_mpirun_names_no_coordinator_before_the_meeting_unless_the_user_did() -> None:
    assert identify(OPENMPI).coordinator == ""
    named = {**OPENMPI, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "5000"}
    assert identify(named).coordinator == "127.0.0.1:5000"
    assert identify(OPENMPI).host == "left"


def test_srun_knows_every_host_and_the_first_coordinates() -> None:
    identity = identify(SRUN)
    assert (identity.launcher, identity.index, identity.workers) == ("srun", 4, 5)
    assert (identity.host, identity.local_members) == ("node07", 1)
    host, _, port = identity.coordinator.partition(":")
    assert host == "node01"
    assert 1024 < int(port) < 32768
    first = {**SRUN, "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURMD_NODENAME": "node01"}
    assert identify(first).coordinator == identity.coordinator
    assert identify(first).local_members == 2
    other_step = {**SRUN, "SLURM_STEP_ID": "4"}
    assert identify(other_step).coordinator != identity.coordinator


def test_slurms_variables_without_srun_are_ignored() -> None:
    assert identify(SBATCH_SHELL).launcher == "none"
    one_task_shell = {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    assert identify(one_task_shell).launcher == "none"


@pytest.mark.parametrize("own", [TORCHRUN, OPENMPI, MPICH], ids=["torchrun", "openmpi", "mpich"])
def test_the_launchers_own_variables_come_before_slurms(own: Mapping[str, str]) -> None:
    inside_slurm = {**SRUN, **SBATCH_SHELL, **own}
    assert identify(inside_slurm).launcher == identify(own).launcher
    assert identify(inside_slurm).workers == 2


def test_kubernetes_pods_know_their_roles() -> None:
    identity = identify(KUBERNETES)
    assert (identity.launcher, identity.name, identity.local_members) == (
        "kubernetes",
        "server0",
        1,
    )
    assert identity.coordinator == KUBERNETES["PACELINE_COORDINATOR"]


def test_pods_without_a_coordinator_are_refused() -> None:
    unnamed = {name: KUBERNETES[name] for name in KUBERNETES if "COORDINATOR" not in name}
    with pytest.raises(SpecError, match="PACELINE_COORDINATOR is not set"):
        identify(unnamed)


def test_our_own_variables_come_first_and_alone_is_one_worker() -> None:
    mine = Identity(index=3, workers=2, servers=2, launcher="local", key="secret")
    assert identify({**TORCHRUN, **SRUN, **to_environment(mine)}) == mine
    alone = identify({"PACELINE_RUN": "runs/x"})
    assert (alone.members, alone.coordinator, alone.run) == (1, "", "runs/x")


@given(members=st.integers(2, 64), data=st.data())
def test_the_last_members_are_the_servers(members: int, data: st.DataObject) -> None:
    servers = data.draw(st.integers(0, members - 1))
    index = data.draw(st.integers(0, members - 1))
    changed = {"RANK": f"{index}", "WORLD_SIZE": f"{members}", "LOCAL_WORLD_SIZE": f"{members}"}
    identity = identify({**TORCHRUN, **changed}, servers)
    assert (identity.workers, identity.servers) == (members - servers, servers)
    assert identity.role == ("server" if index >= members - servers else "worker")
    assert identity.rank == (index if identity.role == "worker" else index - identity.workers)
    told_by_environment = identify({**TORCHRUN, **changed, "PACELINE_SERVERS": f"{servers}"})
    assert told_by_environment == identity


def test_more_servers_than_members_is_refused() -> None:
    with pytest.raises(SpecError, match="2 servers among the 2 members that torchrun started"):
        identify(TORCHRUN, 2)


def test_localhost_is_refused_when_members_are_elsewhere() -> None:
    spread = {**TORCHRUN, "WORLD_SIZE": "4"}
    with pytest.raises(SpecError, match="2 of 4 members run on other hosts"):
        identify(spread)
    spread = {**OPENMPI, "OMPI_COMM_WORLD_SIZE": "4", "PACELINE_COORDINATOR": "127.0.1.1:80"}
    with pytest.raises(SpecError, match="only its own host can reach"):
        identify(spread)


def test_a_number_that_is_none_is_named() -> None:
    with pytest.raises(SpecError, match='RANK = "first" is not a whole number'):
        identify({**TORCHRUN, "RANK": "first"})
    with pytest.raises(SpecError, match="OMPI_COMM_WORLD_SIZE is not set"):
        identify({"OMPI_COMM_WORLD_RANK": "0"})
    with pytest.raises(SpecError, match="not a host and a port"):
        identify({**OPENMPI, "PACELINE_COORDINATOR": "node01"})
    with pytest.raises(SpecError, match="not a member's identity"):
        identify({"PACELINE_MEMBER": "3"})


def test_host_is_this_machines_name_where_the_launcher_says_none() -> None:
    assert identify(TORCHRUN).host == platform.node()


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("alone", ["alone"]),
        ("a,b", ["a", "b"]),
        ("node[08-11]", ["node08", "node09", "node10", "node11"]),
        ("n[1,3-4]x,y", ["n1x", "n3x", "n4x", "y"]),
        ("r[1-2]c[0-1]", ["r1c0", "r1c1", "r2c0", "r2c1"]),
    ],
)
def test_slurms_host_lists(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


def test_slurms_task_counts() -> None:
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    assert expand_counts("4") == [4]


def test_a_worker_is_told_what_torchrun_would_tell_and_a_server_is_not() -> None:
    worker = Identity(
        index=1,
        workers=2,
        servers=1,
        local_index=1,
        local_members=3,
        local_workers=2,
        launcher="paceline",
        master="127.0.0.1:4321",
    )
    told = to_environment(worker)
    assert {name: value for name, value in told.items() if name != "PACELINE_MEMBER"} == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "4321",
    }
    assert identify(told) == worker, "ours is asked before torchrun's"
    server = Identity(index=2, workers=2, servers=1, master="127.0.0.1:4321")
    assert list(to_environment(server)) == ["PACELINE_MEMBER"]
