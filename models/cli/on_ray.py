"""Options of commands that may run on Ray."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ggraph import InputError

from .common import ServedModel


@dataclass(frozen=True)
class RayFlags:
    """Whether replicas on Ray answer, how many, and what each is given."""

    ray: Annotated[
        bool, typer.Option("--ray", help="Replicas on Ray: the extra named ray, docs/scale.md.")
    ] = False
    ray_address: Annotated[
        str | None, typer.Option(help="A Ray cluster to join; default: one that begins here.")
    ] = None
    replicas: Annotated[int | None, typer.Option(min=1, help="Replicas; default: 1.")] = None
    most_replicas: Annotated[
        int | None, typer.Option(min=1, help="Let their number grow with open answers.")
    ] = None
    replica_cpus: Annotated[
        float | None, typer.Option(min=0, help="CPUs that Ray keeps for a replica; default: 1.")
    ] = None
    replica_gpus: Annotated[
        float | None, typer.Option(min=0, help="GPUs of a replica; default: those of --device.")
    ] = None

    def __post_init__(self) -> None:
        idle = [n for n, v in asdict(self).items() if v is not None and n != "ray"]
        if idle and not self.ray:
            raise InputError(f"--{idle[0].replace('_', '-')} is for --ray")

    def options(self, on: ServedModel, path: Path, **more: Any) -> dict[str, Any]:
        """What the application is built from, of the model at `path`."""
        own = {
            "replicas": self.replicas, "most_replicas": self.most_replicas,
            "cpus": self.replica_cpus, "gpus": self.replica_gpus,
        }  # fmt: skip
        named = {n: v for n, v in own.items() if v is not None}
        return {"model": path, "device": on.device, **on.how, **named, **more}
