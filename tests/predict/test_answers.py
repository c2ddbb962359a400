"""Predictions as runs, curves, advice, what-if and scores: what the commands show."""

import json

import pytest

from paceline import engines, record, spec
from paceline.cli import main
from paceline.cli.job import with_choice
from paceline.errors import SpecError
from paceline.predict.advice import advise, candidates, choose
from paceline.predict.answer import predict, simulate
from paceline.predict.changes import vary
from paceline.predict.curve import scaling_curve
from paceline.predict.fitting import fit
from paceline.predict.scorecard import keep, read, score
from paceline.predict.what_if import what_if
from paceline.report import members


def asked(
    architecture: str = "ring",
    workers: int = 4,
    servers: int = 0,
    clip_norm: float = 0.0,
    **cluster,
):
    trained = {"model": "resnet50", "data": "synthetic", "batch": 32, "steps": 8}
    return spec.from_tables(
        {
            "engine": "predict",
            "workload": {**trained, "clip_norm": clip_norm},
            "architecture": architecture,
            "cluster": {
                "workers": workers, "servers": servers, "device": "k80", "link": "1gbit", **cluster,
            },
        },
        "test",
    )  # fmt: skip


@pytest.fixture
def as_if_measured(tmp_path):
    """A predicted run whose record says that it was measured."""

    def make(experiment: spec.Experiment, name: str = "run") -> record.RunFolder:
        folder = engines.run(experiment, tmp_path / name)
        measured = spec.replace(experiment, engine="tunnel")
        folder.write("experiment.toml", spec.to_toml(measured).encode())
        return folder

    return make


def test_a_predicted_run_is_a_run_like_any_other(tmp_path):
    folder = engines.run(asked(workers=100), tmp_path / "run")
    summary = record.open_folder(tmp_path / "run").summary()
    assert summary.status == "finished"
    assert summary.workers == 100
    assert summary.interval["low"] < summary.samples_per_second < summary.interval["high"]
    step = summary.step_seconds.median
    assert sum(summary.breakdown_seconds.values()) == pytest.approx(step)
    assert len(folder.steps("worker0")) == 8
    assert any("68 more workers" in note for note in summary.notes)
    fewer = engines.run(asked(workers=25), tmp_path / "fewer").summary()
    assert summary.bytes_per_step == pytest.approx(99 / 24 * fewer.bytes_per_step), "of all"


@pytest.mark.slow
def test_workers_that_update_or_clip_wait_behind_backward():
    """All weights come after all gradients where servers hold a step back: a link full both ways
    in turn. Where workers update no layer's forward pass hides the last means."""
    plain, updating, clipping = (
        simulate(asked(architecture, 4, 4, **more)).step_seconds
        for architecture, more in (
            ("server", {}),
            ("server:update=worker", {}),
            ("server", {"clip_norm": 1.0}),
        )
    )
    link_seconds = 25_557_032 * 4 * 8 / 1e9
    assert plain < 1.3 * link_seconds
    assert plain + 0.15 < updating < 1.5 * link_seconds
    assert clipping > 2 * link_seconds
    own = simulate(asked("server:mode=async", 4, 4)).step_seconds
    own_clipped = simulate(asked("server:mode=async", 4, 4, clip_norm=1.0)).step_seconds
    assert own_clipped == own, "a worker clips its own gradient there"


def test_a_predicted_worker_sends_what_compression_leaves(tmp_path):
    run = engines.run(asked("server:compression=fp16", 2, 1), tmp_path / "run")
    worker, server = (run.members()[i] for i in (0, 2))
    assert worker.bytes_sent == pytest.approx(worker.bytes_received / 2)
    assert server.bytes_received == pytest.approx(2 * worker.bytes_sent, rel=1e-6)
    rates = [value["sent"] for value in members.series(run) if value["series"] == "server0"]
    assert max(rates) == pytest.approx(min(rates))
    assert max(rates) < 125, "no more than its link"


@pytest.mark.parametrize(
    ("between", "servers", "sent"),
    [("ring", 0, [102, 0, 102, 0]), ("server", 2, [102, 0, 102, 0, 102, 102])],
)
def test_of_a_host_that_sums_inside_one_member_sends(tmp_path, between, servers, sent):
    hosts = [{"count": 2, "workers": 2}, {"count": servers, "workers": 0, "servers": 1}]
    hosts = hosts if servers else hosts[:1]
    experiment = asked(f"hybrid:between={between}", 4, servers, hosts=hosts)
    run = engines.run(experiment, tmp_path / "run")
    steps = run.summary().steps
    assert [round(m.bytes_sent / steps / 1e6) for m in run.members()] == sent


def test_workers_of_uneven_hosts_go_at_their_own_pace_or_wait(tmp_path):
    hosts = [{"count": 3}, {"slowdown": 2.0}, {"count": 2, "workers": 0, "servers": 1}]
    paces = {}
    for mode in ("sync", "async"):
        uneven = asked(f"server:mode={mode}", servers=2, link="10gbit", hosts=hosts)
        folder = engines.run(uneven, tmp_path / mode)
        first, last = (folder.steps(name)[0] for name in ("worker0", "worker3"))
        assert last.breakdown_seconds["forward"] == pytest.approx(
            2 * first.breakdown_seconds["forward"]
        )
        paces[mode] = (first.seconds, last.seconds, first.breakdown_seconds["wait"])
    assert paces["sync"][0] == pytest.approx(paces["sync"][1])
    assert paces["sync"][2] > 0.4 * paces["sync"][0]
    assert paces["async"][1] > 1.8 * paces["async"][0]
    assert paces["async"][2] == 0


def test_a_script_is_refused(tmp_path):
    workload = {"script": {"path": "train.py"}}
    tables = {"engine": "predict", "architecture": "ring", "workload": workload}
    script = spec.from_tables(tables, "test")
    with pytest.raises(SpecError, match="a script can be run, not predicted"):
        engines.run(script, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_curve_says_where_more_workers_do_not_help():
    found = scaling_curve(asked("server", 2, 1), [1, 2, 4, 8])
    assert [point.workers for point in found.points] == [1, 2, 4, 8]
    assert found.points[-1].limited_by == "links of hosts that serve"
    assert found.enough_workers < 8


def test_advice_ranks_what_trains_like_one_worker_and_says_why():
    found = advise(asked(link="3gbit"), 3)
    rates = [row.samples_per_second for row in found.ranked]
    assert rates == sorted(rates, reverse=True)
    assert not found.ranked[0].why
    assert all("slower" in row.why or "as fast" in row.why for row in found.ranked[1:])
    assert not any("async" in row.architecture for row in found.ranked)
    assert any("dedicated servers" in text for text in found.remarks)


def test_advice_goes_by_what_an_architecture_says_of_itself(monkeypatch):
    tried = ["server:mode=bounded,staleness=0", "server:mode=bounded,staleness=1"]
    found = [asked(kind, 2, 1) for kind in tried]
    monkeypatch.setattr("paceline.predict.advice.candidates", lambda experiment, hosts: found)
    (ranked,) = advise(asked(), 3).ranked
    assert ranked.architecture == tried[0], "no worker is ever ahead: it trains like one"


def test_auto_between_hosts_is_the_fastest_of_those_that_fit():
    slow, _ = choose(asked("auto", link="1gbit"))
    assert slow == spec.Server(placement="colocated")  # hides the exchange behind forward too
    placed, reason = choose(asked("auto", 4, 1))
    assert placed == spec.Server(placement="optimal")
    assert "% more than server" in reason
    assert choose(asked("auto", device="cpu")) is None  # no profile: nothing is known


def test_train_says_what_auto_is_between_hosts(capsys):
    chosen = with_choice(asked("auto"))
    assert chosen.architecture == spec.Server(placement="colocated")
    assert "colocated, because it is predicted to give" in capsys.readouterr().err


def test_a_faster_network_helps_a_run_that_the_network_limits(as_if_measured):
    found = what_if(as_if_measured(asked()), link="10gbit")
    assert found.gain_fraction > 0.5
    assert found.low < found.expected < found.high


def test_a_straggler_taken_away_gives_its_share_back(as_if_measured):
    hosts = [{"count": 3}, {"slowdown": 2.0}]
    slow = as_if_measured(asked(link="100gbit", hosts=hosts))
    assert what_if(slow, slowdown=1.0).gain_fraction > 0.3


def test_other_hosts_are_another_cluster(as_if_measured):
    hosts = [spec.Host(count=3), spec.Host(slowdown=2.0)]
    slow = as_if_measured(asked(link="100gbit", hosts=[{"count": 3}, {"slowdown": 2.0}]))
    assert what_if(slow, hosts=(spec.Host(count=4),)).gain_fraction > 0.3
    assert what_if(slow, hosts=(*hosts, *hosts)).gain_fraction > 0.8
    assert what_if(slow, hosts=tuple(hosts)).gain_fraction == pytest.approx(0.0)


def test_hosts_follow_workers_and_servers():
    base = asked("server", 8, 1, hosts=[{"workers": 8}, {"workers": 0, "servers": 1}])
    more = vary(base, workers=20, servers=3)
    assert [(h.count, h.workers, h.servers) for h in more.cluster.hosts] == [
        (2, 8, 0), (1, 4, 0), (3, 0, 1),
    ]  # fmt: skip


UNEVEN = [{"count": 3}, {"slowdown": 4.0}]


def test_hosts_that_differ_stay_in_a_curve():
    """A curve once took every host for one like the first, and said nothing."""
    uneven = asked(link="100gbit", hosts=UNEVEN)
    found = scaling_curve(uneven, [3, 4, 5]).points
    assert found[1].samples_per_second == simulate(uneven).samples_per_second
    assert found[1].samples_per_second < found[0].samples_per_second < 3 * 52
    kinds = [(h.count, h.slowdown) for h in vary(uneven, workers=6).cluster.hosts]
    assert kinds == [(3, 1.0), (1, 4.0), (2, 1.0)]


def test_advice_knows_that_hosts_differ():
    """The slowest serve, or stay out."""
    found = list(candidates(asked(hosts=UNEVEN), 4))
    by_ring = [e for e in found if isinstance(e.architecture, spec.Ring)]
    assert [e.cluster.workers for e in by_ring] == [4, 3]
    assert max(h.slowdown for h in by_ring[0].cluster.hosts) == 4.0
    assert max(h.slowdown for h in by_ring[1].cluster.hosts) == 1.0
    served = [e for e in found if e.num_servers == 1]
    assert served
    assert all(h.slowdown == 1.0 for e in served for h in e.cluster.hosts)


def test_advice_on_the_hosts_of_a_file_takes_them_as_written(tmp_path, capsys):
    file = tmp_path / "slow.toml"
    uneven = asked(link="1000gbit", hosts=[{"count": 1}, {"slowdown": 8.0}], workers=2)
    file.write_text(spec.to_toml(uneven))
    with pytest.raises(SystemExit) as ended:
        main.main(["advise", str(file), "--json"])
    assert not ended.value.code
    ranked = json.loads(capsys.readouterr().out)["ranked"]
    assert (ranked[0]["workers"], ranked[0]["servers"]) in ((1, 0), (1, 1))
    two = next(row for row in ranked if row["workers"] == 2)
    assert two["samples_per_second"] < 0.3 * 2 * 52


MIXED = [{"count": 2}, {"count": 2, "device": "v100"}]


@pytest.mark.slow
def test_advice_leaves_out_hosts_that_hold_the_others_up():
    devices = advise(asked(link="10gbit", hosts=MIXED), 4).ranked
    assert (devices[0].workers, devices[0].left_out) == (2, "2 of k80, 10gbit")
    assert devices[0].samples_per_second > 2 * 52 * 5, "and computes on the others"
    cables = advise(asked(link="10gbit", hosts=[{"count": 3}, {"link": "100mbit"}]), 4).ranked
    assert (cables[0].workers, cables[0].left_out) == (3, "1 of k80, 100mbit")


def test_advice_takes_a_file_that_has_servers(tmp_path, capsys):
    file = tmp_path / "served.toml"
    file.write_text(spec.to_toml(asked("server", 1, 1, hosts=[{}, {"workers": 0, "servers": 1}])))
    with pytest.raises(SystemExit) as ended:
        main.main(["advise", str(file), "--json"])
    assert not ended.value.code
    ranked = json.loads(capsys.readouterr().out)["ranked"]
    assert max(row["workers"] for row in ranked) == 2, "its host is one of the budget"


def test_efficiency_is_of_all_devices_as_they_are():
    """By `ring` the quick devices wait for the slow ones; it was once said to be no loss."""
    (point,) = scaling_curve(asked(link="100gbit", hosts=MIXED), [4]).points
    assert point.speedup == pytest.approx(4, rel=0.05)
    assert point.efficiency < 0.3


@pytest.mark.parametrize("architecture", ["ring", "hybrid", "average:every=4"])
def test_one_worker_alone_exchanges_nothing(architecture):
    single = simulate(asked("single", workers=1)).samples_per_second
    alone = simulate(asked(architecture, workers=1)).samples_per_second
    assert alone == pytest.approx(single, rel=0.002)


@pytest.mark.parametrize(
    ("architecture", "servers"),
    [("ring", 0), ("server", 2), ("server:placement=colocated", 0), ("average:every=4", 0)],
)
def test_links_that_cost_nothing_are_the_most_there_is(architecture, servers):
    """No prediction exceeds what so many devices alone would give."""
    single = simulate(asked("single", workers=1)).samples_per_second
    rates = [
        simulate(asked(architecture, 3, servers, link=link), coarse=True).samples_per_second
        for link in ("1gbit", "10gbit", "100000gbit")
    ]
    assert rates == sorted(rates)
    assert rates[-1] <= 3 * single


def test_uneven_shares_are_refused():
    with pytest.raises(SpecError, match="uneven shares of a batch cannot be predicted yet"):
        simulate(asked(workers=2, shares=[3, 1]))


def test_a_known_figure_fixes_the_rate_of_a_cable():
    truth = asked(link="500mbit")
    known = simulate(truth).samples_per_second
    found = fit(asked(link="10gbit"), known, "link")
    rate = spec.parse_link(found.cluster.link, "test").bandwidth_bits_per_second
    assert rate == pytest.approx(5e8, rel=0.02)


def test_what_was_fitted_is_not_in_doubt():
    experiment = asked("server", 2, 1)
    wide, narrow = predict(experiment), predict(experiment, known=("tcp_fraction",))
    assert narrow.samples_per_second == wide.samples_per_second
    assert wide.low < narrow.low < narrow.high < wide.high


def test_a_coarser_simulation_is_good_for_ratios():
    experiment = asked("server", 4, 2)
    faster = spec.replace(experiment, link="2gbit")
    fine = simulate(faster).step_seconds / simulate(experiment).step_seconds
    coarse = [simulate(e, coarse=True).step_seconds for e in (faster, experiment)]
    assert coarse[0] / coarse[1] == pytest.approx(fine, rel=0.02)


def test_scores_are_kept_and_read_back(as_if_measured, tmp_path):
    entry = score(as_if_measured(asked()))
    assert entry.error_fraction == pytest.approx(0.0, abs=1e-6)
    assert entry.inside
    keep(entry, tmp_path / "runs")
    keep(entry, tmp_path / "runs")
    assert read(tmp_path / "runs") == [entry, entry]


def test_a_prediction_is_no_measurement(tmp_path):
    with pytest.raises(SpecError, match="it was not measured"):
        score(engines.run(asked(), tmp_path / "run"))


def test_predict_prints_one_object(capsys):
    line = "predict --model resnet50 --device k80 --batch 32 -a ring --workers 1,4 --json"
    with pytest.raises(SystemExit) as ended:
        main.main(line.split())
    assert ended.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert [point["workers"] for point in found["points"]] == [1, 4]


def test_a_papers_experiment_is_predicted_where_that_is_asked_for(capsys):
    line = "reproduce p4-throughput --quick --on predict --dry-run"
    with pytest.raises(SystemExit) as ended:
        main.main(line.split())
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert 'engine = "predict"' in printed
    assert "where the experiment is made for tunnel" in " ".join(printed.split())


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("predict --workers 1,x", "is not a list of numbers"),
        ("predict --workers 1,²", "is not a list of numbers"),
        ("predict --workers 0,2", "0 workers train nothing"),
        (f"compare --batch {'9' * 5000}", "is not a list of numbers"),
        ("predict --device k80 --link fast", "neither a rate such as 10gbit nor a known link"),
        ("advise --device k80 --goal cheap", '"cheap" is not a goal'),
        ("advise --device k80 --goal cost --samples 5", "a cost needs a price"),
        ("reproduce p1-fig8 --on moon", '"moon" is not an engine'),
        ("run --profile mine.txt examples/train_plain.py", "is not named as a profile"),
        ("run --profile mine.json -n 2 examples/train_plain.py", "one worker is timed"),
    ],
)
def test_bad_flags_are_a_sentence_and_status_2(capsys, line, sentence):
    with pytest.raises(SystemExit) as ended:
        main.main(line.split())
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err
