"""Start members inside containers: docker, podman, apptainer. One function per engine, one table.

A container changes the file system a member sees and nothing else: it keeps the host's network,
shared memory, process numbers and cores, so that the same job can be measured inside and outside.
"""

import os
import resource
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from paceline.errors import MissingError, SpecError, suggest
from paceline.launch.identity import TORCH_VARIABLES, from_paceline, to_environment
from paceline.launch.process import MemberCommand

PASSED_ON = (
    *("PACELINE_", "OMP_", "MKL_", "TORCH", "GLOO_", "NCCL_", "CUDA_", "PYTHONUNBUFFERED"),
    *TORCH_VARIABLES,
)
"""Prefixes of the variables that mean the same inside a container."""

REMOVE_SECONDS = 20.0
ASK_SECONDS = 10.0


class Container(msgspec.Struct, frozen=True, kw_only=True):
    """What `--container ENGINE:IMAGE` says."""

    engine: str
    image: str = ""
    rootfs: str = ""
    """A folder with a root file system, in place of an image; podman only."""

    mount_point: str = ""
    """An empty folder where "/" is mounted a second time, for podman cannot start from itself."""


def parse_container(text: str) -> Container:
    """Read "docker:IMAGE", "podman:IMAGE", "podman:rootfs=FOLDER" or "apptainer:IMAGE"."""
    where, form = "--container", "ENGINE:IMAGE, such as podman:localhost/paceline"
    engine, _, image = text.partition(":")
    if engine not in ENGINES:
        raise SpecError(where, f'"{engine}" is not a container engine.', suggest(engine, ENGINES))
    if not image:
        raise SpecError(where, f'"{text}" names no image.', f"write {form}.")
    if not image.startswith("rootfs="):
        return Container(engine=engine, image=image)
    folder = Path(image.removeprefix("rootfs="))
    if engine != "podman":
        problem = f"{engine} starts images, not folders."
        raise SpecError(where, problem, "write podman:rootfs=FOLDER.")
    if not folder.is_dir():
        problem = f"{folder} is not a folder."
        fix = "make one with debootstrap, or write podman:rootfs=/ for this machine's own files."
        raise SpecError(where, problem, fix)
    return Container(engine=engine, rootfs=str(folder.resolve()))


def check_container(text: str) -> None:
    """Raise where members cannot be started inside `text`; empty is no container."""
    if text:
        _require_engine(parse_container(text))


def why_unusable(engine: str) -> str:
    """Empty when containers can be started with `engine` here, else what is in the way."""
    if shutil.which(engine) is None:
        return f"{engine} is not installed here."
    if engine == "docker":  # a client, which is nothing without its daemon
        ask = ["docker", "version", "--format={{.Server.Version}}"]
        try:
            done = subprocess.run(
                ask, capture_output=True, text=True, timeout=ASK_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return f"docker's daemon does not answer within {ASK_SECONDS:g} s."
        if done.returncode != 0:
            return f"docker's daemon does not answer: {done.stderr.strip()}"
    return ""


def _require_engine(container: Container) -> None:
    problem = why_unusable(container.engine)
    if problem:
        fix = f"install and start {container.engine}, or leave --container out."
        raise MissingError(problem, fix)
    if container.rootfs == "/" and os.geteuid() != 0:
        problem = "rootfs=/ mounts this machine's files a second time, which only root may do."
        raise MissingError(problem, "run as root, or name an image.")


@contextmanager
def inside(
    text: str, commands: Sequence[MemberCommand], folders: Sequence[Path]
) -> Iterator[list[MemberCommand]]:
    """The same members as commands that start them inside; afterwards no container is left.

    An empty `text` leaves them as they are.

    `folders` are seen inside at the same place, beside the current one. The caller closes its
    coordinator socket first: engines do not pass open files on, so worker 0 opens the port itself.
    """
    if not text:
        yield list(commands)
        return
    container = parse_container(text)
    _require_engine(container)
    job = f"paceline-{os.getpid()}-{secrets.token_hex(4)}"
    mount_point = Path(tempfile.mkdtemp(prefix="paceline-root-"))
    container = msgspec.structs.replace(container, mount_point=str(mount_point))
    wrapped = [wrap(command, container, f"{job}-{command.name}", folders) for command in commands]
    try:
        yield wrapped
    finally:
        _remove(container, [f"{job}-{command.name}" for command in commands])
        mount_point.rmdir()


def wrap(
    command: MemberCommand, container: Container, name: str, folders: Sequence[Path]
) -> MemberCommand:
    """`command` as one that runs inside a container called `name`."""
    environment = dict(command.environment)
    identity = from_paceline(environment)
    if identity is not None:
        own_port = msgspec.structs.replace(identity, coordinator_descriptor=-1)
        environment |= to_environment(own_port)
    # A root file system that holds this very interpreter is a copy of this machine; else the
    # image has its own, with its own Paceline.
    is_copy = container.rootfs and Path(container.rootfs + sys.executable).exists()
    python = sys.executable if is_copy else "python3"
    program, *arguments = command.argv
    inner = [python if program == sys.executable else program, *arguments]
    if container.engine != "apptainer":  # whose containers are child processes, and end with us
        inner = [python, "-m", "paceline.launch.lifeline", str(os.getpid()), *inner]
    passed = sorted(n for n in environment if n.startswith(PASSED_ON))
    seen = [str(path) for path in (Path.cwd(), Path(tempfile.gettempdir()), *folders)]
    if container.rootfs and "PYTHONPATH" in environment:
        passed.append("PYTHONPATH")
    line = ENGINES[container.engine](
        container, name, command.cores, passed, list(dict.fromkeys(seen))
    )
    return msgspec.structs.replace(
        command, argv=(*line, *inner), environment=environment, descriptors=()
    )


def _docker(
    container: Container, name: str, cores: tuple[int, ...], passed: list[str], seen: list[str]
) -> list[str]:
    line = ["docker", "run", *_shared_options(name, cores, passed, seen)]
    # The daemon runs as root; what members write must still belong to the user.
    line += [f"--user={os.getuid()}:{os.getgid()}", "--env=HOME=/tmp"]
    line += ["--gpus=all"] if _has_nvidia() else []
    return [*line, container.image]


def _podman(
    container: Container, name: str, cores: tuple[int, ...], passed: list[str], seen: list[str]
) -> list[str]:
    line = ["podman"]
    if Path("/sys/fs/cgroup/unified").exists() and shutil.which("runc"):
        line.append("--runtime=runc")  # crun refuses a machine that has both kinds of cgroups
    if not Path("/run/systemd/system").exists():
        line.append("--cgroup-manager=cgroupfs")
    line += ["run", *_shared_options(name, cores, passed, seen)]
    line += ["--userns=keep-id"] if os.geteuid() else []
    line += ["--device=nvidia.com/gpu=all"] if _has_nvidia() else []
    if container.rootfs != "/":
        return [*line, *(["--rootfs", container.rootfs] if container.rootfs else [container.image])]
    # In a mount namespace of its own: the second "/" ends with the process, whatever ends it.
    mount = ["unshare", "--mount", "sh", "-c", 'mount --bind / "$0" && exec "$@"']
    return [*mount, container.mount_point, *line, "--rootfs", container.mount_point]


def _apptainer(
    container: Container, name: str, cores: tuple[int, ...], passed: list[str], seen: list[str]
) -> list[str]:
    # Network, shared memory, environment and cores are the caller's by default.
    line = ["apptainer", "exec", f"--pwd={seen[0]}"]
    line += [f"--bind={folder}" for folder in seen]
    line += ["--nv"] if _has_nvidia() else []
    return [*line, container.image]


Engine = Callable[[Container, str, tuple[int, ...], list[str], list[str]], list[str]]
ENGINES: dict[str, Engine] = {"docker": _docker, "podman": _podman, "apptainer": _apptainer}


def _shared_options(
    name: str, cores: tuple[int, ...], passed: list[str], seen: list[str]
) -> list[str]:
    """The arguments that docker and podman share."""
    # Without --pid=host a member would be process 1, which no SIGTERM ends.
    options = ["--rm", f"--name={name}", "--network=host", "--ipc=host", "--pid=host"]
    options += [f"--workdir={seen[0]}", *(f"--volume={folder}:{folder}" for folder in seen)]
    # By name only: values come from the engine's own environment, where `ps` does not show keys.
    options += [f"--env={variable}" for variable in passed]
    # Engines ask for limits of their own otherwise, which a caller without CAP_SYS_RESOURCE may not
    # have. podman lowers the number of processes for itself first: so much is left everywhere.
    files = _hard_limit(resource.RLIMIT_NOFILE, at_most=2**20)
    processes = _hard_limit(resource.RLIMIT_NPROC, at_most=2**15)
    options += [f"--ulimit=nofile={files}:{files}", f"--ulimit=nproc={processes}:{processes}"]
    if cores:
        options.append(f"--cpuset-cpus={','.join(map(str, cores))}")
    return options


def _hard_limit(number: int, at_most: int) -> int:
    hard = resource.getrlimit(number)[1]
    return at_most if hard == resource.RLIM_INFINITY else min(hard, at_most)


def _has_nvidia() -> bool:
    return Path("/dev/nvidiactl").exists()


def _remove(container: Container, names: Sequence[str]) -> None:
    """Ended members remove their own container; this is for those whose engine was killed."""
    if container.engine == "apptainer":
        return  # its containers are ordinary child processes
    line = [container.engine, "rm", "--force", *names]
    # docker complains about names that are gone already, which is what is wanted.
    subprocess.run(line, capture_output=True, timeout=REMOVE_SECONDS, check=False)
