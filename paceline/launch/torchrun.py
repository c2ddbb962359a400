"""Members started by torchrun, or by anything else that sets torch's own four variables."""

from collections.abc import Mapping

from paceline.launch.identity import Identity, from_launcher, integer
from paceline.launch.interfaces import is_loopback

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def identify(environ: Mapping[str, str]) -> Identity | None:
    if not all(name in environ for name in VARIABLES):
        return None
    members = integer(environ, "WORLD_SIZE")
    # Operators that set only the four variables start all members on one host or one on each.
    alike = members if is_loopback(environ["MASTER_ADDR"]) else 1
    return from_launcher(
        environ,
        "torchrun",
        index=integer(environ, "RANK"),
        members=members,
        local_index=integer(environ, "LOCAL_RANK", integer(environ, "RANK") if alike > 1 else 0),
        local_members=integer(environ, "LOCAL_WORLD_SIZE", alike),
        coordinator=f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}",
        # torchrun's agent serves a store on MASTER_PORT itself: a second one could not listen.
        store_is_kept=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=integer(environ, "TORCHELASTIC_RESTART_COUNT", 0),
    )
