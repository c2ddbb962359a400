"""What people use today, run beside us: same model, same samples, same links, same records.

A table of peers, and whether an interpreter has what one needs. Each peer is a script beside this
file, named as the user types it; `runner` starts it. Imports no framework.
"""

import functools
import subprocess
import sys

import msgspec

from paceline import spec
from paceline.errors import MissingError, SpecError, suggest


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """One framework's way of training."""

    name: str
    title: str
    module: str
    """The script, run with `python -m`."""

    packages: tuple[str, ...]
    """What it imports, the framework itself first."""

    install: str
    """The command that provides it."""

    like: spec.Architecture
    """Our architecture that does the same, for the record and the closed forms."""

    takes_servers: bool = False
    one_worker_only: bool = False
    by_horovodrun: bool = False
    """Horovod starts its workers by itself, on this machine."""

    is_ours: bool = False
    """Another framework, exchanged by Paceline."""


_OURS = ("msgspec", "psutil", "tomli_w", "numpy")
_TENSORFLOW = 'pip install "paceline[tensorflow]"'
_HOROVOD = (
    "build horovod 0.28.1 from its source package with CMAKE_CXX_STANDARD 17 "
    "(docs/peers.md), in another environment, and name it with --peer-python horovod=PYTHON"
)

PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(
            name="ddp",
            title="PyTorch DDP, gloo",
            module="paceline.bench.peers.ddp",
            packages=("torch",),
            install="pip install torch",
            like=spec.Ring(),
        ),
        Peer(
            name="tensorflow-single",
            title="TensorFlow, one plain process",
            module="paceline.bench.peers.tensorflow_single",
            packages=("tensorflow",),
            install=_TENSORFLOW,
            like=spec.Single(),
            one_worker_only=True,
        ),
        Peer(
            name="tensorflow-collective",
            title="TensorFlow MultiWorkerMirroredStrategy",
            module="paceline.bench.peers.tensorflow_collective",
            packages=("tensorflow",),
            install=_TENSORFLOW,
            like=spec.Ring(),
        ),
        Peer(
            name="tensorflow-server",
            title="TensorFlow ParameterServerStrategy",
            module="paceline.bench.peers.tensorflow_server",
            packages=("tensorflow",),
            install=_TENSORFLOW,
            like=spec.Server(mode="async"),
            takes_servers=True,
        ),
        *(
            Peer(
                name=f"keras-{name}",
                title=f"Keras on TensorFlow, exchanged by Paceline ({name})",
                module="paceline.bench.peers.keras_ours",
                packages=("tensorflow", "torch"),
                install=_TENSORFLOW,
                like=like,
                is_ours=True,
            )
            for name, like in (
                ("ring", spec.Ring()),
                ("colocated", spec.Server(placement="colocated")),
                ("average", spec.Average()),
            )
        ),
        Peer(
            name="horovod",
            title="Horovod, gloo",
            module="paceline.bench.peers.horovod",
            packages=("horovod", "torch"),
            install=_HOROVOD,
            like=spec.Ring(),
            by_horovodrun=True,
        ),
        Peer(
            name="horovod-tensorflow",
            title="Horovod under TensorFlow, gloo",
            module="paceline.bench.peers.horovod_tensorflow",
            packages=("horovod", "tensorflow"),
            install=_HOROVOD,
            like=spec.Ring(),
            by_horovodrun=True,
        ),
    )
}


def peer(name: str, where: str = "--peers") -> Peer:
    """The peer of that name; a misspelt one gets a suggestion."""
    if name not in PEERS:
        raise SpecError(where, f'"{name}" is not a peer.', suggest(name, PEERS))
    return PEERS[name]


@functools.cache
def versions(peer: Peer, python: str = sys.executable) -> dict[str, str]:
    """Versions of what the peer needs in that interpreter; MissingError says how to install it."""
    listing = (
        "import importlib.util as u, sys; "
        "print('missing', *[n for n in sys.argv[1:] if u.find_spec(n) is None])"
    )
    absent = _ask(peer, python, listing, (*peer.packages, *_OURS))[1:]
    foreign = python != sys.executable
    if set(absent) & set(peer.packages):
        problem = f"{peer.title} is not installed for {python if foreign else 'this Python'}."
        raise MissingError(problem, f"{peer.install}.")
    if absent:
        problem = f"{python} lacks {', '.join(absent)}, with which a peer's record is written."
        fix = f"{python} -m pip install {' '.join(absent).replace('_', '-')}"
        raise MissingError(problem, fix)
    reading = (
        "import sys, importlib.metadata as m; found = m.packages_distributions(); "
        "print('versions', *[f'{n}={m.version(found[n][0])}' for n in sys.argv[1:]])"
    )
    answer = _ask(peer, python, reading, peer.packages)[1:]
    return dict(item.split("=", 1) for item in answer)


def _ask(peer: Peer, python: str, code: str, names: tuple[str, ...]) -> list[str]:
    command = [python, "-c", code, *names]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        problem = f"{python} cannot run: {error}."
        raise MissingError(problem, f"name {peer.name}'s interpreter with --peer-python.") from None
    return done.stdout.splitlines()[-1].split()
