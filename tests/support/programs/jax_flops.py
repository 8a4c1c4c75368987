"""The model FLOPs that the JAX engine counts.

    KERAS_BACKEND=jax python -m tests.support.programs.jax_flops

Prints as JSON the FLOPs of some functions of 4 x 4 matrices, and of a transposed convolution; the
model FLOPs of foreign models, of a device of four.
"""

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, PartitionSpec

from tests.support.models import foreign_models
from tftpu.config import TrainConfig
from tftpu.engines.jax import jaxprs
from tftpu.engines.jax.lower import JaxLowering
from tftpu.engines.origins import Origin

DATA, FIXED, TRAINED = Origin.DATA, Origin.FIXED, Origin.TRAINED
TWO = DATA, TRAINED
MATRIX = np.ones((4, 4), "float32")
FOREIGN = ("gan", "bilstm", "diffusion", "unet")
EXAMPLES = 2


def scanned(x: Any, weights: Any) -> Any:
    """Multiplies three times, in a loop that calls another function."""
    return jax.lax.scan(lambda y, _: (jax.jit(jnp.matmul)(y, weights), None), x, length=3)[0]


def sharded(x: Any, weights: Any) -> Any:
    """Multiplies on four devices, of which each pair has half of the rows."""
    mesh = AbstractMesh((2, 2), ("rows", "same"))
    specs = PartitionSpec("rows"), PartitionSpec()
    multiply = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=specs, out_specs=specs[0])
    return multiply(x, weights)


def counted(function: Callable[..., Any], *origins: Origin, shapes: Any = ((4, 4), (4, 4))) -> int:
    """Returns the FLOPs of a function of arrays."""
    given = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    return jaxprs.count_step_flops(jax.make_jaxpr(function)(*given).jaxpr, origins)


def functions() -> dict[str, int]:
    """Returns the FLOPs of functions of two matrices."""
    return {
        "trained loop": counted(scanned, FIXED, TRAINED),
        "fixed loop": counted(scanned, FIXED, FIXED),
        "sharded": counted(sharded, DATA, TRAINED),
        "stopped": counted(lambda x, w: jax.lax.stop_gradient(x @ w) @ w, DATA, TRAINED),
        "constant": counted(lambda x, w: x @ w @ jnp.eye(4), DATA, TRAINED),
        "recomputed": counted(lambda x, w: jax.checkpoint(jnp.matmul)(x, w), DATA, FIXED),
        "fixed array": counted(lambda x, w: ((x - MATRIX) @ MATRIX) @ w, DATA, TRAINED),
        "noise": counted(lambda _, w: jax.random.normal(jax.random.key(0), (4, 4)) @ w, *TWO),
        "experts": counted(jnp.matmul, *TWO, shapes=((4, 2, 2), (4, 2, 2))),
        "attention": counted(jnp.matmul, DATA, DATA | TRAINED, shapes=((4, 2, 2), (4, 2, 2))),
        "unused": counted(lambda x, w: (x @ w, x @ w @ w)[0], *TWO),
        "choice": counted(
            lambda x, w: jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x @ w @ w), *TWO
        ),
        "transposed convolution": counted(
            lambda x, k: jax.lax.conv_transpose(x, k, (2, 2), "SAME"),
            DATA,
            DATA,
            shapes=((2, 8, 8, 3), (3, 3, 3, 4)),
        ),
    }


def of_foreign(name: str) -> int:
    """Returns the model FLOPs of one of four devices, each with some examples."""
    model = foreign_models.small(name)
    spec = model.batch(EXAMPLES)
    lowering = JaxLowering("data:-1")
    step = lowering.build(
        model.build, spec, 4, "mixed_bfloat16", TrainConfig(), objectives=model.objectives
    ).lower()
    return step.model_flops


def main() -> None:
    """Prints the FLOPs."""
    foreign = {name: of_foreign(name) for name in FOREIGN}
    print(json.dumps({"functions": functions(), "foreign": foreign}))


if __name__ == "__main__":
    main()
