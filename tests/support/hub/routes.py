"""Trains backbones on one route, and prints a line of JSON for each.

    KERAS_BACKEND=BACKEND python -m tests.support.hub.routes ROUTE NAME ...

A route is an engine with its devices, beside which Keras's `fit` trains on one device of the same
backend. A backbone that takes more than TIME_LIMIT seconds ends the process.
"""

import dataclasses
import json
import re
import signal
import sys
from typing import Any

TIME_LIMIT = 900


@dataclasses.dataclass(frozen=True)
class Route:
    """A way in which `Trainer` trains.

    Attributes:
        title: its name in the table.
        backend: Keras's.
        devices: the number of virtual CPU devices.
        mesh: as for `tftpu.connect`.
        remat: what is recomputed, as for `tftpu.TrainConfig`.
    """

    title: str
    backend: str
    devices: int
    mesh: str | None = None
    remat: str = "none"


ROUTES = {
    "tensorflow": Route("TensorFlow, 1 device", "tensorflow", 1),
    "fsdp": Route("JAX `fsdp:8`", "jax", 8, "fsdp:8"),
    "tensor": Route("JAX `data:2,tensor:4`", "jax", 8, "data:2,tensor:4"),
    "remat": Route("JAX `fsdp:8`, `remat=block`", "jax", 8, "fsdp:8", "block"),
}


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of training a backbone on a route.

    Attributes:
        kind: "equal", "rounding", "differs" (as in `training.Compared`), "refused" (by tftpu, with
            a reason), "keras" (it is Keras that fails) or "open" (any other error).
        reason: the first line of the error; all of it if it is a reason.
        losses, weights, update, still, divided, noise: as in `training.Compared`; 0 if it did not
            train.
    """

    kind: str
    reason: str = ""
    losses: float = 0.0
    weights: float = 0.0
    update: float = 0.0
    still: float = 0.0
    divided: float = 0.0
    noise: float = 0.0


def try_backbone(name: str, engine: Any, remat: str = "none") -> Result:
    """Returns what comes of a backbone, whatever happens."""
    from tests.support.hub import training
    from tftpu.errors import UserError

    try:
        found = training.compare(name, engine, remat)
    except training.KerasFailedError as error:
        return Result("keras", _take_line(str(error)))
    except UserError as error:
        return Result("refused", " ".join(str(error).split()))
    except Exception as error:  # a failure is a result
        return Result("open", _take_line(f"{type(error).__name__}: {error}"))
    return Result(found.kind, **found._asdict())


def _take_line(text: str) -> str:
    """Returns the first line of an error, and the next where Keras names a layer before it."""
    lines = [line for line in re.sub(r"\x1b\[\d*m", "", text).splitlines() if line.strip()]
    count = 2 if "Exception encountered when calling" in lines[0] else 1
    return " ".join(lines[:count])[:300]


def main(route: str, *names: str) -> None:
    """Prints the results."""
    import keras

    import tftpu

    chosen = ROUTES[route]
    engine = tftpu.connect("none", virtual_devices=chosen.devices, mesh=chosen.mesh)
    if chosen.mesh:
        # Every weight here is smaller than those that are worth dividing.
        from tftpu.engines.jax.placement import creation, sharding

        creation.SMALLEST = sharding.SMALLEST = 1
    for name in names:
        signal.alarm(TIME_LIMIT)
        found = try_backbone(name, engine, chosen.remat)
        print(json.dumps(dataclasses.asdict(found)), flush=True)
        keras.backend.clear_session()


if __name__ == "__main__":
    main(*sys.argv[1:])
