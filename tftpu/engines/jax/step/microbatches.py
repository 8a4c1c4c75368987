"""The division of a global batch into microbatches, without moving examples between devices."""

from typing import Any

import jax
import jax.numpy as jnp
import keras

from tftpu.engines.jax.placement import mesh as meshes
from tftpu.engines.jax.placement.sharding import Layout
from tftpu.engines.objectives.losses import count_examples
from tftpu.tensors import Nest


class MicrobatchLayout:
    """The microbatches of a global batch.

    Each device holds consecutive examples. A microbatch takes consecutive examples from each
    device.

    Args:
        layout: the shardings of batches.
        shard_spec: spec of one device's shard, nested `tf.TensorSpec`s.
        microbatches: number of microbatches.
        examples: the number of examples of a batch without its padding; None: there is no padding.
        whole: whether every device computes the whole batch; `shard_spec` is then its spec.

    Attributes:
        microbatches: the number of microbatches.
        examples, whole: the arguments.
        shard: the number of examples in one shard of a batch.
        batch: the shapes of a global batch, `jax.ShapeDtypeStruct`s.
        microbatch: the shapes of a microbatch.
    """

    def __init__(
        self,
        layout: Layout,
        shard_spec: Nest,
        microbatches: int,
        examples: int | None = None,
        whole: bool = False,
    ):
        self._layout = layout
        self.examples = examples
        self.whole = whole
        self._shards = 1 if whole else meshes.count_batch_shards(layout.mesh)
        self.shard = count_examples(shard_spec)
        self.microbatches = microbatches
        self.batch = self._build_shapes(shard_spec, self._shards * self.shard)
        self.microbatch = self._build_shapes(shard_spec, self._shards * self.shard // microbatches)

    def split_batch(self, batch: Nest) -> Nest:
        """Returns a global batch in the shape (microbatches, examples per microbatch, ...)."""
        return jax.tree.map(self._split_microbatches, batch)

    @property
    def padded(self) -> int:
        """The number of examples of a batch with its padding."""
        return self._shards * self.shard

    def build_mask(self) -> Any:
        """Returns 1.0 for examples and 0.0 for padding, (padded,); None if there is no padding."""
        if self.examples is None:
            return None
        return (jnp.arange(self.padded) < self.examples).astype("float32")

    def find_positions(self, number: Any) -> tuple[Any, int, int]:
        """Returns the positions of a microbatch's examples in the global batch.

        Args:
            number: the index of the microbatch.

        Returns:
            The position of the first example, the number of consecutive examples, and the distance
            from the start of one such run of examples to the start of the next.
        """
        run = self.shard // self.microbatches
        return number * run, run, self.shard

    def _split_microbatches(self, tensor: Any) -> Any:
        count, rest = self.microbatches, tensor.shape[1:]
        cut = tensor.reshape(self._shards, count, self.shard // count, *rest)
        cut = jnp.swapaxes(cut, 0, 1).reshape(count, -1, *rest)
        return jax.lax.with_sharding_constraint(
            cut, self._layout.build_batch_sharding(cut.ndim, before=1)
        )

    def _build_shapes(self, spec: Nest, examples: int) -> Nest:
        return keras.tree.map_structure(
            lambda s: jax.ShapeDtypeStruct((examples, *s.shape[1:]), s.dtype.as_numpy_dtype), spec
        )
