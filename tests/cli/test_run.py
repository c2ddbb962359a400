"""`paceline run` as a user types it: arguments, streams, endings, what is recorded."""

import json
import os
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline import spec
from paceline.cli import console
from paceline.cli.main import main
from paceline.record import RunFolder

TELL = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
print(json.dumps([sys.argv[1:], sys.path[0], [os.environ.get(n) for n in names]]))
"""

FEW_STEPS = """
import json, queue, torch, paceline
paceline.init()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = paceline.distribute(model, optimizer)
for step in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
model.state_dict()
print(json.__file__)
"""


@pytest.fixture
def run(in_empty_folder, capfdbinary):
    """`paceline run …` in this process: exit status, stdout, stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main(["run", *arguments])
        said = capfdbinary.readouterr()
        texts = (text.decode(errors="replace") for text in said)
        return int(stop.value.code or 0), *texts

    return call


def recorded() -> RunFolder:
    (path,) = Path("runs").iterdir()
    return RunFolder(path)


def write(name: str, text: str) -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text, encoding="utf-8")
    return name


def test_arguments_pass_untouched_and_the_folder_of_the_script_comes_first(run):
    given = ["--json", "-n", "7", "--", "-m", "--help", "", "a b", "ü"]
    status, out, err = run("--architecture", "single", write("scripts/tell.py", TELL), *given)
    assert status == 0, err
    arguments, first, variables = json.loads(out)
    assert arguments == given
    assert first == str(Path("scripts").absolute())
    assert variables[:4] == ["0", "1", "0", "1"]


def test_a_module_runs_as_with_python_m(run):
    write("package/__init__.py", "")
    write("package/tell.py", TELL)
    status, out, err = run("-n", "2", "--architecture", "ring", "-m", "package.tell", "--json", "x")
    assert status == 0, err
    plain, other = out.splitlines()
    if plain.startswith("worker1"):
        plain, other = other, plain
    arguments, first, variables = json.loads(plain)
    assert (arguments, first) == (["--json", "x"], os.getcwd())
    assert variables[:4] == ["0", "2", "0", "2"]
    assert other.startswith("worker1 | ")
    assert json.loads(other.removeprefix("worker1 | "))[2][:4] == ["1", "2", "1", "2"]
    assert tomllib.loads((recorded().path / "experiment.toml").read_text())["workload"] == {
        "script": {"module": "package.tell", "arguments": ["--json", "x"]}
    }


def test_nothing_in_the_current_folder_hides_a_library(run):
    write("json.py", "raise ImportError('the wrong json')")
    write("queue.py", "raise ImportError('the wrong queue')")
    server = ["-n", "1", "--servers", "1", "--architecture", "server"]
    status, out, err = run(*server, write("scripts/steps.py", FEW_STEPS))
    assert status == 0, err
    assert Path(out.strip()).parent.name == "json"
    assert [member.name for member in recorded().members()] == ["worker0", "server0"]


PRINTS = r"""
import sys
print("tab\there", "[bold]no markup[/bold]", "ünïcode", "x" * 300)
sys.stdout.buffer.write(b"\xff\r 10%\r 20%\n"); sys.stdout.flush()
print("an error", file=sys.stderr)
"""


def test_stdout_is_the_scripts_and_the_rest_goes_to_stderr(in_empty_folder, capfdbinary):
    write("prints.py", PRINTS)
    with pytest.raises(SystemExit, match="0"):
        main(["run", "prints.py"])
    said = capfdbinary.readouterr()
    text = f"tab\there [bold]no markup[/bold] ünïcode {'x' * 300}\n"
    assert said.out == text.encode() + b"\xff\r 10%\r 20%\n"
    assert b"an error\n" in said.err
    assert b"recorded in runs/" in said.err
    log = (recorded().path / "logs" / "worker0.log").read_bytes()
    assert log.startswith(said.out)
    assert log.endswith(b"an error\n")


def test_json_alone_is_on_stdout_and_nothing_in_it_is_invented(run):
    status, out, err = run("-n", "2", "--architecture", "ring", "--json", write("p.py", PRINTS))
    assert status == 0, err
    assert "tab\there" in err
    summary = json.loads(out)
    assert summary["script"] == "p.py"
    invented = {"model", "data", "global_batch", "seed", "optimizer", "samples_per_second"}
    assert not invented & summary.keys()
    assert summary["status"] == "finished"


def test_a_script_that_never_calls_init_on_two_workers_is_told(run):
    status, out, err = run("-n", "2", "--architecture", "ring", write("apart.py", "print(1)"))
    assert status == 0
    warning = "apart.py never called paceline.init(): 2 workers ran all of it"
    assert f"warning: {warning}" in err
    assert out.count("1\n") == 2
    (note,) = recorded().summary().notes
    assert note.startswith(warning)


def test_one_worker_is_told_nothing(run):
    status, out, err = run(write("alone.py", "print(1)"))
    assert (status, out) == (0, "1\n")
    assert "warning" not in err


@pytest.mark.parametrize(
    ("script", "status", "words"),
    [
        ("import sys; sys.exit(3)", 3, "worker0 exited 3"),
        ("import os; os.kill(os.getpid(), 11)", 139, "worker0 was ended by signal 11"),
        ("raise ValueError('mine')", 1, "ValueError: mine"),
        ("import atexit, os; atexit.register(os._exit, 5)", 5, "worker0 exited 5"),
        ("import sys; sys.exit('no data')", 1, "no data"),
        ("def broken(:", 1, "SyntaxError"),
    ],
)
def test_the_exit_status_is_the_scripts(run, script, status, words):
    found, _, err = run(write("ends.py", script))
    assert found == status
    assert words in err
    assert err.count("Traceback") <= 1, "what was printed is not said twice"
    assert "recorded in runs/" in err
    assert recorded().summary().status == "failed"


def test_the_message_is_that_of_the_worker_that_failed(run):
    script = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit("the reason")
time.sleep(60)
"""
    status, _, err = run("-n", "2", "--architecture", "ring", write("one.py", script))
    assert status == 1
    assert err.partition("error: ")[2].startswith("worker1 exited 1")
    assert "the reason" in err.partition("error: ")[2]
    (note,) = recorded().summary().notes
    assert note == "worker1 exited 1: the reason"


def test_the_record_can_be_run_again_from_anywhere(run, tmp_path, monkeypatch):
    write("again.py", "import sys; print('ran', sys.argv[1:])")
    assert run("-n", "2", "--architecture", "ring", "--out", "first", "again.py", "-x", "1")[0] == 0
    file = str(Path("first/experiment.toml").absolute())
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    status, out, err = run("--out", "second", file)
    assert status == 0, err
    assert out.count("ran ['-x', '1']") == 2
    with pytest.raises(SystemExit, match="0"):
        main(["train", file, "--out", "third"])
    experiments = [RunFolder(Path(path)).experiment() for path in ("../first", "second", "third")]
    assert experiments[0] == experiments[1] == experiments[2]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["-m", "no_such_module.at_all"], "there is no module no_such_module.at_all"),
        (["no/such.py"], "no/such.py"),
        (["no.toml"], "there is no such file"),
        (["built-in.toml"], "has no [workload.script]"),
        (["script.toml", "--more"], "holds its own"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(run, arguments, complaint):
    write("built-in.toml", "[workload]\nsteps = 1")
    write("script.toml", "[workload.script]\nmodule = 'this'")
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert complaint in err
    assert "fix:" in err
    assert not Path("runs").exists()


def test_a_script_needs_no_other_python_path(run, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/one/of/mine", *sys.path[:1]]))
    status, out, _ = run(write("path.py", "import sys; print(*sys.path[:4], sep='\\n')"))
    assert status == 0
    found = out.splitlines()
    assert found[0] == os.getcwd()
    assert "/one/of/mine" in found


def test_jobs_that_start_in_one_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(8) as threads:
        paths = list(threads.map(lambda _: console.new_run_path("job", None), range(8)))
    assert len(set(paths)) == 8
    folder = RunFolder.create(paths[0], spec.Experiment())
    assert folder.summary().status == "running"
    for path in paths:
        console._remove_empty(path)
    assert [path.exists() for path in paths] == [True] + [False] * 7
