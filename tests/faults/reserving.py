"""What a cluster gives to a group of three ranks, as JSON: `python -m tests.faults.reserving ADDRESS`."""

from __future__ import annotations

import json
import logging
import sys

import ray

from asyncrlhf.abc import Needs, Place
from asyncrlhf.errors import ConfigError
from asyncrlhf.runtimes.reserve import Reservation, cluster_nodes


def ranks(count: int, *, together: bool, **labels: str) -> list[Place]:
    needs = Needs(pool="p", cores=1, labels=labels, together=together)
    return [Place(group="g", rank=rank, engine="m:E", needs=needs) for rank in range(count)]


@ray.remote
def node() -> str:
    return ray.get_runtime_context().get_node_id()[:8]


def nodes_of(reservation: Reservation, places: list[Place]) -> list[str]:
    """Where something runs that is given what the engines would be."""
    return ray.get([node.options(**reservation.options(place)).remote() for place in places])


def main() -> None:
    ray.init(address=sys.argv[1], logging_level=logging.ERROR, log_to_driver=False)
    head = next(n.name[-9:-1] for n in cluster_nodes() if n.labels.get("pool") == "training")
    found: dict[str, object] = {"head": head}
    for name, places in {
        "one": ranks(3, together=True),
        "spread": ranks(5, together=True),
        "labelled": ranks(2, together=False, pool="generation"),
        "free": ranks(3, together=True),  # what the others have reserved is free again
    }.items():
        reservation = Reservation([], 10.0)
        reservation.take(places)
        found[name] = nodes_of(reservation, places)
        reservation.release()
    holds, late = Reservation([], 10.0), Reservation([], 1.0)
    holds.take(ranks(2, together=True, pool="training"))
    try:
        late.take(ranks(2, together=True, pool="training"))
    except ConfigError as error:
        found["late"] = str(error)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
