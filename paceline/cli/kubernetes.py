"""`paceline kubernetes`: print manifests for an indexed Job or a JobSet."""

from typing import Annotated

import typer

SETTINGS = {
    "context_settings": {"allow_interspersed_args": False},
    "epilog": "Example: paceline kubernetes --image registry/paceline --workers 4 -- "
    "paceline train --model resnet50 --data imagefolder --batch 64 | kubectl apply -f -",
}


def command(
    arguments: Annotated[list[str], typer.Argument(metavar="COMMAND…", help="What members run.")],
    image: Annotated[str, typer.Option(help="Image that holds paceline; deploy/Dockerfile.")],
    workers: Annotated[int, typer.Option("-n", "--workers", help="Workers.")],
    servers: Annotated[int, typer.Option(help="Dedicated servers, the last pods.")] = 0,
    name: Annotated[str, typer.Option(help="Name of the job and of its service.")] = "paceline",
    cores: Annotated[str, typer.Option(help='Cores of each member: "2" or "500m".')] = "1",
    memory: Annotated[str, typer.Option(help='Memory of each member: "4Gi".')] = "",
    gpus: Annotated[int, typer.Option(help="GPUs of each member.")] = 0,
    shared_memory: Annotated[str, typer.Option(help="Size of /dev/shm of each member.")] = "1Gi",
    jobset: Annotated[bool, typer.Option(help="A JobSet in place of Job and Service.")] = False,
) -> None:
    """Print Kubernetes manifests; each pod finds its role by itself."""
    from paceline.launch.kubernetes import PodJob, manifests, to_yaml

    job = PodJob(
        image=image,
        command=tuple(arguments),
        workers=workers,
        servers=servers,
        name=name,
        cores=cores,
        memory=memory,
        gpus=gpus,
        shared_memory=shared_memory,
    )
    print(to_yaml(manifests(job, jobset=jobset)), end="")
