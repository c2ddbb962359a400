"""What a user may write, and what a mistake is answered with."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import spec
from paceline.errors import SpecError

EXPERIMENT = """
name = "two"
architecture = "server:mode=bounded,staleness=2"

[workload]
model = "mnist-dnn"
batch = 16

[cluster]
workers = 4
servers = 2
link = "1gbit,50us"
"""


def write(tmp_path, text):
    path = tmp_path / "e.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_is_read_and_written_back_the_same(tmp_path):
    experiment = spec.load(write(tmp_path, EXPERIMENT))
    assert experiment.architecture == spec.Server(mode="bounded", staleness=2)
    assert experiment.workload.global_batch_for(4) == 64
    assert spec.load(write(tmp_path, spec.to_toml(experiment))) == experiment


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[workload]\nbach = 3", r'\[workload\]: unknown key "bach"(.|\n)*did you mean "batch"'),
        ("[workload]\nbatch = 'x'", r'workload\.batch: "x" is no value of it(.|\n)*a whole number'),
        ("[workload]\nbatch = 8\nglobal_batch = 8", "keep one: batch is per worker"),
        ("[workload.script]\npath = 'a'\nmodule = 'b'", "write path or module"),
        ("[workload.script]\narguments = ['a']", "write path or module"),
        ("[workload.script]\npaht = 'a'", 'did you mean "path"'),
        ("[workload]\nbatch = 8\n[workload.script]\npath = 'a'", "batch is given beside a script"),
        ("[workload]\nsteps = 8\nepochs = 1.0", "both given"),
        ("[cluster]\nworkers = 0", "workers = 0 is not at least 1"),
        ("[cluster]\nlink = '10GB'", 'write "80gbit"'),
        ("[cluster]\nshares = [1.0]\nworkers = 2", "1 shares for 2 workers"),
        ("architecture = 'rnig'", 'did you mean "ring"'),
        ("architecture = 'server:mod=async'", 'did you mean "mode"'),
        (
            "architecture = 'server:mode=asink'",
            r'"asink" is no value of mode, an option of server\.\n  fix: write sync, async, ',
        ),
        ("[workload.optimizer]\nnesterov = true", "there is none"),
        ("[workload.optimizer]\nname = 'adam'\nnesterov = true", "does not apply to adam"),
        ("[workload.optimizer]\ntrust = 0.01", "trust does not apply to sgd"),
        ("architecture = 'server:mode'", "has no value"),
        ("architecture = 'server:mode=sync,mode=async'", '"mode" of server is given twice'),
        ("architecture = 'single'\n[cluster]\nworkers = 2", "single is one worker"),
        ("architecture = 'ring'\n[cluster]\nservers = 2", "ring has no servers"),
        (
            "architecture = 'server:mode=quorum,quorum=3'\n[cluster]\nworkers = 2",
            "quorum = 3 of 2 workers",
        ),
        ("architecture = 'server:window=x'", '"x" is no value of window(.|\\n)*a whole number'),
        ("[architecture]\nname = 'server'\nquorum = 0", "quorum = 0 is not at least 1"),
        ("architecture = 'server:mode=quorum,quorum=0'", "quorum = 0 is not at least 1"),
        ("architecture = 'server:quorum=1'", "quorum = 1 has no effect with mode = sync"),
        ("architecture = 'server:staleness=2'", "no effect with mode = sync(.|\\n)*mode=bounded"),
        ("architecture = 'server:mode=async,staleness=2'", "staleness = 2 has no effect"),
        ("architecture = 'server:staleness_aware=true'", "mode=async or mode=bounded"),
        (
            "architecture = 'server:mode=bounded,staleness=0,staleness_aware=true'",
            "no gradient is stale(.|\\n)*staleness=1 or more",
        ),
        ("architecture = 'server:topk_fraction=0.1'", "write compression=topk"),
        ("architecture = 'server:mode=async,update=worker'", "weights would drift apart"),
        ("architecture = 'server:chunk=3'", "chunk = 3 is less than 64 bytes"),
        ("architecture = 'server:chunk=0.01KiB'", "with its unit, as 256KiB"),
        (
            "architecture = 'pipeline'\n[cluster]\nworkers = 2\n[workload.script]\npath = 'a'",
            "a script cannot be pipeline",
        ),
        ("[cluster]\non_loss = 'never'", r"cluster\.on_loss: \"never\"(.|\n)*stop or continue"),
        ("[cluster]\nshares = ['x']", "cluster.shares"),
        ("[workload]\nglobal_batch = 1\n[cluster]\nworkers = 2", "cannot be split"),
        ("x = ", "this is not TOML"),
    ],
)
def test_a_mistake_is_named_with_its_fix(tmp_path, text, complaint):
    with pytest.raises(SpecError, match=complaint) as caught:
        spec.load(write(tmp_path, text))
    assert caught.value.fix


def test_a_missing_file_is_one_sentence(tmp_path):
    with pytest.raises(SpecError, match="there is no such file"):
        spec.load(tmp_path / "absent.toml")


architectures = st.one_of(
    st.just(spec.Single()),
    st.builds(spec.Ring, backend=st.sampled_from(["auto", "gloo", "mpi"])),
    st.builds(
        spec.Server,
        mode=st.sampled_from(["sync", "async", "quorum"]),
        placement=st.sampled_from(["dedicated", "colocated", "optimal"]),
        chunk=st.sampled_from(["auto", "256KiB", "1MiB"]),
    ),
    st.builds(spec.Server, mode=st.just("bounded"), staleness=st.integers(0, 9)),
    st.builds(spec.Server, mode=st.just("quorum"), quorum=st.integers(1, 9)),
    st.builds(spec.Average, every=st.integers(1, 99), state=st.booleans()),
)


@given(architectures)
def test_the_short_form_says_all(architecture):
    text = spec.format_architecture(architecture)
    assert spec.parse_architecture(text) == architecture


def test_another_mode_leaves_out_what_it_has_no_use_for():
    bounded = spec.Server(mode="bounded", staleness=2, staleness_aware=True, window=4)
    assert bounded.changed(mode="sync") == spec.Server(window=4)
    in_step = spec.Server(mode="bounded", staleness=0, window=4)
    assert bounded.changed(staleness=0) == in_step
    topk = spec.Server(compression="topk", topk_fraction=0.1)
    assert topk.changed(compression="none") == spec.Server()
    assert topk.changed(window=4).topk_fraction == 0.1


def test_replace_finds_the_part_and_checks_again():
    changed = spec.replace(spec.Experiment(), workers=3, batch=8, seed=5)
    assert (changed.cluster.workers, changed.workload.batch, changed.workload.seed) == (3, 8, 5)
    with pytest.raises(SpecError):
        spec.replace(changed, architecture=spec.Single())


def test_of_a_script_nothing_else_is_known(tmp_path):
    script = spec.Script(path="/a b/train.py", arguments=("--lr", "0.1", ""))
    experiment = spec.Experiment(workload=spec.Workload(script=script))
    text = spec.to_toml(experiment)
    assert spec.load(write(tmp_path, text)) == experiment
    assert set(text.split()) & {"model", "data", "batch", "seed"} == set()
    assert experiment.workload.model == ""
    assert script.line == ("/a b/train.py", "--lr", "0.1", "")
    assert str(script) == "train.py --lr 0.1 ''"
    module = spec.Script(module="package.train", arguments=("x",))
    assert module.line == ("-m", "package.train", "x")
    assert (module.name, str(module)) == ("package.train", "-m package.train x")


def test_a_recorded_experiment_may_have_options_that_had_no_effect(tmp_path):
    path = tmp_path / "experiment.toml"
    idle = 'name = "server"\nstaleness = 2\nquorum = 0\ntopk_fraction = 0.1\n'
    path.write_text(f"[cluster]\nworkers = 2\n[architecture]\n{idle}")
    with pytest.raises(SpecError):
        spec.load(path)
    assert spec.load(path, recorded=True).architecture == spec.Server()
