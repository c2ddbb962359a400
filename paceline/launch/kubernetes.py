"""Members that are pods of an indexed Job, and the manifests that make them."""

from collections.abc import Mapping

from paceline.launch.identity import Identity, from_launcher, integer


def identify(environ: Mapping[str, str]) -> Identity | None:
    if "JOB_COMPLETION_INDEX" not in environ or "PACELINE_WORKERS" not in environ:
        return None
    members = integer(environ, "PACELINE_WORKERS") + integer(environ, "PACELINE_SERVERS", 0)
    return from_launcher(
        environ,
        "kubernetes",
        index=integer(environ, "JOB_COMPLETION_INDEX"),
        members=members,
        local_index=0,
        local_members=1,  # a pod is a host of its own: its own address, its own shared memory
        coordinator=environ.get("PACELINE_COORDINATOR", ""),
        host=environ.get("PACELINE_HOST", ""),
    )
