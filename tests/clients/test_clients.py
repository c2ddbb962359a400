"""Public training scripts, with at most five changed lines, on every architecture.

Each test copies a script, makes the changes of `changes.py`, and runs it with `paceline run`. Where
the mode promises it, the result is compared with that of the script without Paceline.
"""

import difflib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.clients.changes import CLIENTS, MNIST, NANOGPT, Client

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"
STAND_INS = Path(__file__).parent / "stand_ins"
ARCHITECTURES = {
    "ring": (),
    "server:placement=colocated": (),
    "server": ("--servers", "1"),
    "server:mode=async": ("--servers", "1"),
    "average:every=2": (),
}
SYNCHRONOUS = ("ring", "server:placement=colocated", "server")
FAST = {
    ("mnist", "ring"),
    ("word_language_model", "server:placement=colocated"),
    ("dcgan", "server:placement=colocated"),
}
"""Clients and architectures that run always; the rest with `slow`."""

pytestmark = [
    pytest.mark.skipif(
        not (SHARED / "clients").is_dir() or not (SHARED / "data").is_dir(),
        reason="public scripts and data sets (shared/ beside the repository) are not here",
    ),
    pytest.mark.timeout(400),
]


def source(client: Client, *, changed: bool) -> str:
    """The script's text; every text to replace must be there once."""
    text = (SHARED / "clients" / client.name / client.script).read_text(encoding="utf-8")
    for old, new in {**client.fixed, **(client.changes if changed else {})}.items():
        assert text.count(old) == 1, f"{client.name}: {old!r} is there {text.count(old)} times"
        text = text.replace(old, new)
    return text


def prepare(client: Client, folder: Path, *, changed: bool) -> None:
    """A copy of the script in a folder of its own, with data to train on."""
    shutil.copytree(SHARED / "clients" / client.name, folder)
    (folder / client.script).write_text(source(client, changed=changed), encoding="utf-8")
    words = (ROOT / "README.md").read_text(encoding="utf-8").split()
    if client.name == "word_language_model":
        (folder / "text").mkdir()
        for name in ("train", "valid", "test"):
            (folder / "text" / f"{name}.txt").write_text(" ".join(words[:400]), encoding="utf-8")
    elif client.name == "nanoGPT":
        (folder / "data" / "text").mkdir(parents=True)
        characters = np.frombuffer(" ".join(words).encode(), np.uint8).astype(np.uint16)
        for name in ("train", "val"):
            characters.tofile(folder / "data" / "text" / f"{name}.bin")
    elif client.name == "time_sequence_prediction":
        waves = np.sin((np.arange(40) + np.arange(19)[:, None]) / 4)
        torch.save(waves, folder / "traindata.pt")


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{STAND_INS}",
        "SHARED_DATA": str(SHARED / "data"),
        "SAMPLES": "320",
        "OMP_NUM_THREADS": "1",
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1" if "sequence" in folder.name else "0",
    }
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=380,
    )


def plain(client: Client, folder: Path, *more: str) -> list[Any]:
    """What the script gives without Paceline."""
    if not folder.exists():
        prepare(client, folder, changed=False)
    done = run([sys.executable, client.script, *client.arguments, *more], folder)
    assert done.returncode == 0, done.stderr
    return results(client, folder, done.stdout)


@pytest.fixture(scope="module")
def single(tmp_path_factory) -> Callable[[Client], list[Any]]:
    """What each script gives without Paceline, whatever it is compared with."""
    folder, found = tmp_path_factory.mktemp("plain"), dict[str, list[Any]]()

    def once(client: Client) -> list[Any]:
        if client.name not in found:
            found[client.name] = plain(client, folder / client.name)
        return found[client.name]

    return once


def distributed(
    client: Client, folder: Path, architecture: str, *more: str
) -> subprocess.CompletedProcess[str]:
    if not folder.exists():
        prepare(client, folder, changed=True)
    flags = ["-n", "2", "--architecture", architecture, *ARCHITECTURES[architecture]]
    command = [sys.executable, "-m", "paceline", "run", *flags, client.script]
    return run([*command, *client.arguments, *more], folder)


def results(client: Client, folder: Path, printed: str) -> list[Any]:
    """Weights in the files it left, of each worker where each left one, or numbers it printed."""
    if "(" in client.result:
        return [[float(number)] for number in re.findall(client.result, printed)]
    found = sorted(folder.glob(client.result))
    assert found, f"{client.name} left no {client.result}"
    with pytest.MonkeyPatch.context() as patch:  # whole models need the class they are of
        patch.syspath_prepend(folder)
        patch.delitem(sys.modules, "model", raising=False)
        return [_numbers(torch.load(path, weights_only=False)) for path in found]


def _numbers(thing: Any) -> list[float]:
    if isinstance(thing, torch.nn.Module):
        thing = thing.state_dict()
    thing = thing.get("model", thing)
    return [v for value in thing.values() for v in value.double().flatten().tolist()]


def check_followed(client: Client, single: list[Any], shared: list[Any]) -> None:
    if "(" in client.result:  # both workers print what one does
        shared, single = sorted(shared), sorted(single * 2)
    for one in shared:
        wanted = single[shared.index(one)] if "(" in client.result else single[0]
        assert one == pytest.approx(wanted, rel=1e-3, abs=1e-4)


def cases() -> list[Any]:
    return [
        pytest.param(
            client,
            architecture,
            id=f"{client.name}-{architecture}",
            marks=() if (client.name, architecture) in FAST else pytest.mark.slow,
        )
        for client in CLIENTS
        for architecture in ARCHITECTURES
    ]


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_at_most_five_lines_are_changed(client):
    before, after = source(client, changed=False), source(client, changed=True)
    differences = difflib.ndiff(before.splitlines(), after.splitlines())
    assert sum(line.startswith("+ ") for line in differences) <= 5


@pytest.mark.parametrize(("client", "architecture"), cases())
def test_a_public_script_follows_its_single_run(client, architecture, single, tmp_path):
    folder = tmp_path / f"{client.name}-distributed"
    done = distributed(client, folder, architecture)
    if architecture in client.refused:
        assert done.returncode != 0
        assert client.refused[architecture] in done.stderr
        return
    assert done.returncode == 0, done.stderr
    shared = results(client, folder, done.stdout + done.stderr)
    assert all(np.isfinite(numbers).all() for numbers in shared)
    if architecture in SYNCHRONOUS and client.follows:
        check_followed(client, single(client), shared)
    elif architecture in SYNCHRONOUS:
        assert all(numbers == pytest.approx(shared[0], abs=1e-5) for numbers in shared)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["ring", "server:placement=colocated"])
def test_nanogpt_resumes_from_its_checkpoint(architecture, tmp_path):
    folders = tmp_path / "plain", tmp_path / "distributed"
    single = plain(NANOGPT, folders[0])
    assert distributed(NANOGPT, folders[1], architecture).returncode == 0
    more = ("--init_from=resume", "--max_iters=9")
    single = plain(NANOGPT, folders[0], *more)
    done = distributed(NANOGPT, folders[1], architecture, *more)
    assert done.returncode == 0, done.stderr
    check_followed(NANOGPT, single, results(NANOGPT, folders[1], done.stdout))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("architecture", ["ring", "server:placement=colocated"])
def test_nanogpt_compiles(architecture, tmp_path):
    single = plain(NANOGPT, tmp_path / "plain")
    done = distributed(NANOGPT, tmp_path / "distributed", architecture, "--compile=True")
    assert done.returncode == 0, done.stderr
    shared = results(NANOGPT, tmp_path / "distributed", done.stdout)
    check_followed(NANOGPT, single, shared)


def test_mnist_on_one_worker_is_the_plain_script(single, tmp_path):
    prepare(MNIST, tmp_path / "changed", changed=True)
    done = run([sys.executable, MNIST.script, *MNIST.arguments], tmp_path / "changed")
    assert done.returncode == 0, done.stderr
    check_followed(MNIST, single(MNIST), results(MNIST, tmp_path / "changed", done.stdout))
