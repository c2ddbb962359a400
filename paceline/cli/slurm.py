"""`paceline slurm`: print a batch script that starts members with srun."""

from typing import Annotated

import typer

SETTINGS = {
    "context_settings": {"allow_interspersed_args": False},
    "epilog": "Example: paceline slurm --workers 8 --hosts 2 -- paceline train --model resnet50 "
    "--data imagefolder --batch 64 > job.sh && sbatch job.sh",
}


def command(
    arguments: Annotated[list[str], typer.Argument(metavar="COMMAND…", help="What members run.")],
    workers: Annotated[int, typer.Option("-n", "--workers", help="Workers.")],
    servers: Annotated[int, typer.Option(help="Dedicated servers, the last tasks.")] = 0,
    hosts: Annotated[int, typer.Option(help="Hosts (Slurm's nodes) to spread them over.")] = 1,
    cores: Annotated[int, typer.Option(help="Cores of each member.")] = 1,
    gpus: Annotated[int, typer.Option(help="GPUs of each member.")] = 0,
    name: Annotated[str, typer.Option(help="The job's name.")] = "paceline",
    partition: Annotated[str, typer.Option(help="Slurm partition.")] = "",
    time: Annotated[str, typer.Option(help="Longest time, as Slurm writes it: 2:00:00.")] = "",
) -> None:
    """Print a Slurm batch script; each task finds its role by itself."""
    from paceline.launch.slurm import BatchJob, batch_script

    job = BatchJob(
        command=tuple(arguments),
        workers=workers,
        servers=servers,
        hosts=hosts,
        cores=cores,
        gpus=gpus,
        name=name,
        partition=partition,
        time=time,
    )
    print(batch_script(job), end="")
