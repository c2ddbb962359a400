"""Answer ../shared/sealed.toml: published clusters, predicted from their figures for few devices.

    python benchmarks/sealed.py --json
    python benchmarks/sealed.py --only ddp-v100
    python benchmarks/sealed.py --given    # a case's second figure, predicted from its first alone

Every case becomes an experiment, as data: the tables below say which link a sentence of the file
means, and whose software ran. What is not written down (the speed of one device, the rate of a
cable, of a bus) is fitted to the figures the case gives. The engine is that of `paceline predict`.
docs/predict.md says what is assumed about each case.
"""

import argparse
import json
import os
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from paceline import spec
from paceline.predict.answer import predict, simulate
from paceline.predict.fitting import Unknown, fit

SEALED = Path(__file__).resolve().parents[2] / "shared" / "sealed.toml"

NETWORKS: dict[str, dict[str, str]] = {
    "one GPU per node, Cray Aries, about 80 Gbit/s per node": {"link": "aries"},
    "one GPU per host, rate not stated: infer it from the figure given for 64": {"link": ""},
    "eight GPUs per host, 10 Gbit/s per host": {"link": "ethernet", "inside": "pcie3"},
    "sixteen GPUs per host (PCIe inside), 20 Gbit/s per host": {
        "link": "20gbit,30us",
        "inside": "pcie3",
    },
    "eight V100 (NVLink) per host, one 100 Gbit/s EDR InfiniBand port per host": {
        "link": "infiniband-edr",
        "inside": "nvlink",
    },
    "eight V100 (NVLink) per host, four 100 Gbit/s InfiniBand ports per host": {
        "link": "infiniband-edr-x4",
        "inside": "nvlink",
    },
    "four A100 (PCIe) per host, one 100 Gbit/s EDR port per host": {
        "link": "infiniband-edr",
        "inside": "pcie4",
    },
    "four A100 (PCIe) per host, one 100 Gbit/s Omni-Path port per host": {
        "link": "omni-path",
        "inside": "pcie4",
    },
    "four V100 per host, 40 Gbit/s per host": {"link": "40gbit,30us", "inside": "pcie3"},
    "four P100 per host, 25 Gbit/s RoCE per host": {"link": "roce", "inside": "pcie3"},
}
"""The file's sentence -> links by name or rate."""

SAME_CLUSTER = "as above"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="", help="cases whose id begins so")
    parser.add_argument("--given", action="store_true", help="check against figures the file gives")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="cases at the same time")
    options = parser.parse_args()
    if not SEALED.exists():
        sys.exit(f"error: {SEALED} is missing\n  fix: put the sealed cases there.")
    cases = [case for case in sealed_cases() if case["id"].startswith(options.only)]
    if options.given:
        for case in cases:
            show_given(case, case["network"])
        return
    answers: dict[str, dict[str, float]] = {}
    with ProcessPoolExecutor(options.jobs) as pool:
        for case, found in zip(cases, pool.map(answers_of, cases), strict=True):
            for index, answer in enumerate(found):
                answers[f"{case['id']}/{index}"] = answer
                show(case, index, answer)
    if options.json:
        print(json.dumps(answers, indent=1))


def sealed_cases() -> list[dict[str, Any]]:
    """The file's cases, each with its network in words."""
    found: list[dict[str, Any]] = []
    for case in tomllib.loads(SEALED.read_text(encoding="utf-8"))["case"]:
        same = case["network"] == SAME_CLUSTER
        found.append({**case, "network": found[-1]["network"] if same else case["network"]})
    return found


def answers_of(case: dict[str, Any]) -> list[dict[str, float]]:
    return list(answer_case(case, case["network"]))


def show(case: dict[str, Any], index: int, answer: dict[str, float]) -> None:
    point, rate = case["predict"][index], answer["images_per_second"]
    given = case["given"][0]
    linear = given["images_per_second"] / given["devices"] * point["devices"]
    low, high = answer["low"] / rate - 1, answer["high"] / rate - 1
    name = f"{case['id']}/{index}"
    text = f"{name:42} {point['devices']:4} devices {rate:10.1f} images/s ({low:+.1%} {high:+.1%})"
    print(f"{text}  {rate / linear:.1%} of linear", file=sys.stderr, flush=True)


def show_given(case: dict[str, Any], network: str) -> None:
    """What the first figure of a case says of its others, with nothing fitted to those."""
    first, *others = case["given"]
    if not others or not NETWORKS[network]["link"]:
        return  # the rate of its cables is known from the second figure only
    fitted = fitted_case({**case, "given": [first]}, network)
    for point in others:
        found = predict(with_known(experiment_of(case, network, point), fitted))
        truth, rate = point["images_per_second"], found.samples_per_second
        low, high = found.low, found.high
        text = f"{case['id']:28} {point['devices']:4} devices: {truth:8.1f} given, {rate:8.1f}"
        print(f"{text} ({low:.1f} to {high:.1f}) predicted, {rate / truth - 1:+.1%}", flush=True)


def answer_case(case: dict[str, Any], network: str) -> Iterator[dict[str, float]]:
    """One answer per point of the case, from what the case gives."""
    if " and " in case["model"]:
        for point in case["predict"]:
            yield answer_efficiency(case, network, point)
        return
    fitted = fitted_case(case, network)
    for point in case["predict"]:
        experiment = with_known(experiment_of(case, network, point), fitted)
        yield answer_of(predict(experiment, known=known_of(case)), 1.0)


def answer_efficiency(
    case: dict[str, Any], network: str, point: dict[str, Any]
) -> dict[str, float]:
    """Where the case gives no speed, the shipped profile's: what is asked is the ratio."""
    experiment = experiment_of(case, network, point)
    alone = experiment_of(case, network, {**point, "devices": 1, "hosts": 1})
    single = simulate(alone).samples_per_second
    return answer_of(predict(experiment), case["given"][0]["images_per_second"] / single)


def answer_of(predicted: Any, unit: float) -> dict[str, float]:
    return {
        "images_per_second": predicted.samples_per_second * unit,
        "low": predicted.low * unit,
        "high": predicted.high * unit,
    }


def fitted_case(case: dict[str, Any], network: str) -> spec.Experiment:
    """The first given figure fixes the device; a second one the rate that is not written down."""
    first, *more = case["given"]
    experiment = experiment_of(case, network, first)
    alone = case["architecture"] == "server" and first["devices"] == 1
    if alone or "without DDP" in case["note"]:
        single = {"architecture": spec.Single(), "servers": 0, "hosts": ()}
        experiment = spec.replace(experiment, **single)
    fitted = fit(experiment, first["images_per_second"], "one_device")
    for second in more:
        at_second = with_known(experiment_of(case, network, second), fitted)
        unknown: Unknown = "link" if second.get("hosts", 1) > 1 else "inside"
        fitted = fit(at_second, second["images_per_second"], unknown)
    return fitted


def known_of(case: dict[str, Any]) -> tuple[str, ...]:
    """Fractions of links whose payload rate was fitted to a second figure."""
    if len(case["given"]) == 1:
        return ()
    return ("tcp_fraction",) if case["given"][1]["hosts"] > 1 else ("bus_fraction", "tcp_fraction")


def with_known(experiment: spec.Experiment, fitted: spec.Experiment) -> spec.Experiment:
    """What fitting found, put into another point of the same case."""
    cluster, found = fitted.cluster, fitted.prediction
    batch = found.one_device_batch or fitted.workload.batch
    return spec.replace(
        experiment,
        link=cluster.link,
        inside=cluster.inside,
        one_device=found.one_device,
        one_device_batch=batch,
    )


def experiment_of(case: dict[str, Any], network: str, point: dict[str, Any]) -> spec.Experiment:
    """A point of a case, written as an experiment."""
    devices, hosts = point["devices"], point["hosts"]
    each, servers = devices // hosts, point.get("servers", int(case["architecture"] == "server"))
    links = NETWORKS[network]
    architecture, stack = case["architecture"], stack_of(case)
    if case.get("mode"):
        architecture = f"{architecture}:mode={case['mode']}"
    if "between=server" in architecture:
        servers = hosts
    alike = [{"count": servers, "workers": each, "servers": 1}] if servers else []
    if hosts > servers:
        alike.append({"count": hosts - servers, "workers": each})
    half = case["precision"] == "float16"
    return spec.from_tables(
        {
            "name": case["id"],
            "engine": "predict",
            "workload": {
                "model": point.get("model", case["model"]),
                "data": "imagefolder" if "EDR InfiniBand port" in network else "synthetic",
                "batch": point.get("batch", case.get("batch", 0)),
                "precision": "bfloat16" if half else "float32",
            },
            "architecture": architecture,
            "cluster": {
                "workers": devices,
                "servers": servers,
                "device": case["device"],
                "hosts": alike,
                **links,
            },
            "prediction": {"stack": stack, "model_size": size_of(case)},
        },
        case["id"],
    )


def stack_of(case: dict[str, Any]) -> str:
    note = case["note"].lower()
    if "horovod" in note:
        return "horovod"
    if "ddp" in note:
        return "pytorch-ddp"
    return "mxnet" if "mxnet" in note else "tensorflow"


def size_of(case: dict[str, Any]) -> str:
    """Bytes of all gradients where they are not the model's own 32-bit ones."""
    stated = [word for word in case["note"].replace(";", "").split() if word.endswith("MB")]
    if stated and stated[0] != "MB":
        return str(stated[0])
    if case["precision"] == "float16" and "TF1" not in case["note"]:
        return "51MB"  # ResNet-50's gradients as 16-bit numbers
    return ""


if __name__ == "__main__":
    main()
