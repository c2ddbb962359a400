"""`paceline kubernetes` and `paceline slurm` print what a cluster takes, or say what is wrong."""

import pytest

from paceline.cli.main import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    printed = capsys.readouterr()
    return int(left.value.code or 0), printed.out, printed.err


def test_slurm_prints_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("-n", "2", "--servers", "1", "--cores", "4")
    status, out, _ = run(capsys, "slurm", *flags, "--", "paceline", "train", "--batch", "8")
    assert status == 0
    assert out.startswith("#!/bin/bash\n")
    assert "#SBATCH --ntasks=3\n" in out
    assert out.endswith(" paceline train --batch 8\n")


def test_kubernetes_prints_manifests(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--image", "example.org/p", "-n", "2")
    status, out, _ = run(capsys, "kubernetes", *flags, "--", "paceline", "train", "--batch", "8")
    assert status == 0
    assert [line for line in out.splitlines() if line.startswith("kind")] == [
        'kind: "Secret"',
        'kind: "Service"',
        'kind: "Job"',
    ]
    status, out, _ = run(capsys, "kubernetes", *flags, "--jobset", "--", "true")
    assert 'kind: "JobSet"' in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("slurm", "-n", "1", "--hosts", "2", "--", "true"), "on 2 hosts cannot be placed"),
        (("kubernetes", "--image", "i", "-n", "0", "--", "true"), "at least one worker"),
        (("kubernetes", "--image", "i", "-n", "1", "--name", "A b", "--", "true"), "lower-case"),
        (("doctor", "--on", "moon"), "one of: here, tunnel"),
        (("doctor", "--container", "podmn:x"), 'did you mean "podman"'),
        (("doctor", "--shared-memory", "lots"), "not a size"),
    ],
)
def test_bad_input_says_what_to_do(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert said in err
