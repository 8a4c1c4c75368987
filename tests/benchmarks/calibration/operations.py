"""Single operations that others have published the time of: products, copies, exchanges."""

import dataclasses
from typing import Any, Literal

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from tftpu.config import ClusterConfig
from tftpu.engines.lowered import LoweredStep
from tftpu.tpu.slices import Slice


@dataclasses.dataclass(frozen=True)
class MatrixProduct:
    """The product of two square matrices in bfloat16, alone.

    Attributes:
        width: of the matrices.
        options: of the compiler, that the published product was compiled with.
    """

    width: int
    options: dict[str, str] = dataclasses.field(default_factory=dict)
    cluster: ClusterConfig = dataclasses.field(default_factory=lambda: ClusterConfig(engine="jax"))

    def lower(self, target: Slice) -> LoweredStep:
        """Lowers the product for one chip."""
        matrix = jax.ShapeDtypeStruct((self.width, self.width), "bfloat16")
        program = jax.jit(lambda a, b: a @ b).lower(matrix, matrix).as_text().encode()
        return LoweredStep(
            program=program, partitioned=True, arguments=["a", "b"], precision="bfloat16"
        )

    def choose_options(self, target: Slice) -> dict[str, str]:
        """Returns the options of the published product."""
        return self.options


@dataclasses.dataclass(frozen=True)
class ArrayCopy:
    """A copy of an array in a chip's memory, alone.

    Attributes:
        size: of the array, in bytes.
    """

    size: int
    cluster: ClusterConfig = dataclasses.field(default_factory=lambda: ClusterConfig(engine="jax"))

    def lower(self, target: Slice) -> LoweredStep:
        """Lowers the copy for one chip."""
        given = jax.ShapeDtypeStruct((self.size // 4,), "float32")
        program = jax.jit(lambda a: a.copy()).lower(given).as_text().encode()
        return LoweredStep(program=program, partitioned=True, arguments=["a"], precision="float32")

    def choose_options(self, target: Slice) -> dict[str, str]:
        """Returns no options."""
        return {}


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A collective over the devices of a slice, alone.

    Attributes:
        collective: "all_gather" or "psum", as in `jax.lax`.
        shape: of the array that each device has before.
        dtype: of the array.
        mesh: sizes of three axes of devices; those along the second exchange.
    """

    collective: Literal["all_gather", "psum"]
    shape: tuple[int, ...]
    dtype: str
    mesh: tuple[int, int, int]
    cluster: ClusterConfig = dataclasses.field(default_factory=lambda: ClusterConfig(engine="jax"))

    def lower(self, target: Slice) -> LoweredStep:
        """Lowers the collective for all devices of a slice."""
        mesh, whole = AbstractMesh(self.mesh, ("outer", "along", "inner")), PartitionSpec()
        parted = PartitionSpec("along") if self.collective == "all_gather" else whole

        def exchange(part: Any) -> Any:
            if self.collective == "psum":
                return jax.lax.psum(part, "along")
            return jax.lax.all_gather(part, "along", tiled=True)

        mapped = jax.shard_map(
            exchange, mesh=mesh, in_specs=parted, out_specs=whole, check_vma=False
        )
        parts = self.mesh[1] if self.collective == "all_gather" else 1
        given = jax.ShapeDtypeStruct(
            (parts * self.shape[0], *self.shape[1:]), self.dtype,
            sharding=NamedSharding(mesh, parted),
        )  # fmt: skip
        traced = jax.jit(mapped).trace(given).lower(lowering_platforms=("tpu",))
        return LoweredStep(
            program=traced.as_text().encode(),
            partitioned=True,
            arguments=["a"],
            precision=self.dtype,
        )

    def choose_options(self, target: Slice) -> dict[str, str]:
        """Returns no options."""
        return {}
