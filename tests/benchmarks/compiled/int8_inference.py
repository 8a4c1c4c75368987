"""Compares inference in bfloat16 and in static int8 on a TPU, in the compiler's cycles.

    python -m tests.benchmarks.compiled.int8_inference [--programs=vit,gpt2] [--generations=v5e,v6e]

Evidence: compiled, on one core. The programs: ViT-B/16 over 64 images of 224 pixels, GPT-2 that
reads 8 prompts of 1,024 tokens, both with flash attention, which leaves the dense products the
largest share; one layer of a GPT of other widths; GPT-2 that writes one token of 1 and of 32 rows;
and products alone. Weights are in bfloat16, or in int8 with a scale for each output.

Static int8 knows the scale of the activations before: they are rounded on the way into a product,
and its int32 results are scaled, biased and activated on their way out. "Apart" keeps the two
products of the MLP from being compiled as one, which XLA prefers: then int8 lies between them.

Cycles are completed by `tests.benchmarks.compiled.cycles` for kernels, of which the compiler makes
no estimate; milliseconds are those of preflight. All programs take 30 minutes on 2 cores.
"""

import argparse
import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import keras

from tests.benchmarks.compiled.cycles import cycles_of
from tftpu import models, sharding
from tftpu.engines import keras_internals
from tftpu.engines.lowered import LoweredStep
from tftpu.inference.decoding import Cached
from tftpu.models.layers.dense import Dense
from tftpu.preflight.compiling import compiler
from tftpu.preflight.pricing.cost import price
from tftpu.tpu.slices import parse_slice

Shape = jax.ShapeDtypeStruct
BF16, F32, INT8, INT32 = jnp.bfloat16, jnp.float32, jnp.int8, jnp.int32
STEP = 0.05  # of the activations: any constant gives the same program
CONTEXT = 1024
HEAD = "| program | generation | form | kcycles | ratio | ms | GB | int8 products |"


@dataclasses.dataclass(frozen=True)
class Form:
    """A form of the dense layers.

    Attributes:
        name: of the row.
        layers: ends of the names of the layers with int8 weights.
        static: whether their activations are int8, too.
        apart: whether the two products of the MLP are kept apart.
    """

    name: str
    layers: tuple[str, ...] = ()
    static: bool = True
    apart: bool = False


ALL, MLP = ("qkv", "out", "expand", "contract"), ("expand", "contract")
FORMS = (
    Form("bfloat16"),
    Form("bfloat16, apart", apart=True),
    Form("int8", ALL),
    Form("int8, apart", ALL, apart=True),
    Form("int8 MLP, apart", MLP, apart=True),
    Form("int8 contract, apart", MLP[1:], apart=True),
    Form("int8 weights only", ALL, static=False),
)


class Int8(Dense):
    """A dense layer of int8 weights: `codes` and `scale` are set while a program is traced."""

    form: Form
    codes: Any
    scale: Any

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        y = self._wide(inputs) + jnp.asarray(self.bias, F32)
        return (y if self.activation is None else self.activation(y)).astype(BF16)

    def product(self, x: Any) -> Any:
        return self._wide(x).astype(BF16)

    def _wide(self, x: Any) -> Any:
        """Returns the product in float32."""
        if not self.form.static:
            return jnp.matmul(x, self.codes.astype(BF16), preferred_element_type=F32) * self.scale
        x = rounded(x, STEP)
        if self.form.apart and self.name.endswith("contract"):
            x = jax.lax.optimization_barrier(x)
        return int_product(x, self.codes).astype(F32) * self.scale


class Apart(Dense):
    """A dense layer that is not compiled as one with what computes its input."""

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        return super().call(jax.lax.optimization_barrier(inputs), training)


def rounded(x: Any, step: Any) -> Any:
    """Returns x in steps, as int8."""
    return jnp.clip(jnp.round(x.astype(F32) / step), -127, 127).astype(INT8)


def int_product(x: Any, y: Any) -> Any:
    """Returns the product of int8 in int32."""
    return jnp.matmul(x, y, preferred_element_type=INT32)


# Programs, each with the shapes that it is given


def classify(model: Any, images: Any) -> Any:
    return model(images, training=False)


def read(model: Any, tokens: Any, lengths: Any) -> Any:
    return Cached(model).read(tokens, lengths, CONTEXT)


def write(model: Any, state: Any, *given: Any) -> Any:
    return Cached(model).step(state, *given)


def token(rows: int) -> tuple:
    pair = (Shape((rows, CONTEXT, 768), BF16),) * 2
    state = {f"block{n + 1}_attention": pair for n in range(12)}
    number, row = Shape((), INT32), Shape((rows,), INT32)
    return "gpt2_small", {}, write, [state, row, row, number, number]


PROMPTS = [Shape((8, CONTEXT), INT32), Shape((8,), INT32)]


def wide(width: int) -> tuple:
    fields = {"width": width, "heads": width // 128, "layers": 1, "vocabulary": 512}
    return "gpt2_small", fields, read, PROMPTS


PROGRAMS: dict[str, tuple] = {
    "vit": ("vit_b16", {}, classify, [Shape((64, 224, 224, 3), BF16)]),
    "gpt2": ("gpt2_small", {}, read, PROMPTS),
    **{f"width{n}": wide(n) for n in (1024, 2048, 4096)},
    **{f"token{n}": token(n) for n in (1, 32)},
}


def lower_model(
    form: Form, name: str, fields: dict[str, Any], run: Callable, given: Sequence[Any]
) -> LoweredStep:
    """Lowers a pass by a model of the zoo, in a form."""
    keras.config.set_dtype_policy("bfloat16")
    with keras_internals.fresh_names():
        model = models.build(name, attention="flash", **fields)
    layers: list[Any] = keras_internals.list_layers(model)
    found = [x for x in layers if type(x) is Dense and x.name.endswith(ALL)]
    quantized = [x for x in found if x.name.endswith(form.layers)]
    for layer in found:
        if layer in quantized:
            layer.__class__, layer.form = Int8, form
        elif form.apart and layer.name.endswith("contract"):
            layer.__class__ = Apart
    kernels = {id(x.kernel) for x in quantized}
    kept = [v for v in model.variables if id(v) not in kernels]

    def program(values: Any, coded: Any, *given: Any) -> Any:
        for layer, (codes, scale) in zip(quantized, coded):
            layer.codes, layer.scale = codes, scale
        scope = keras.StatelessScope(list(zip(kept, values)))
        with sharding.compiling_for("tpu"), scope, keras_internals.plain_errors():
            return run(model, *given)

    values = [Shape(v.shape, v.dtype) for v in kept]
    coded = [(Shape(x.kernel.shape, INT8), Shape((x.units,), F32)) for x in quantized]
    donated = (2,) if isinstance(given[0], dict) else ()  # a cache is overwritten
    return lower(program, [values, coded, *given], donated)


def lower(program: Callable, given: Sequence[Any], donated: tuple[int, ...] = ()) -> LoweredStep:
    """Lowers a function for one core."""
    jitted = jax.jit(program, keep_unused=True, donate_argnums=donated)
    lowered = jitted.trace(*given).lower(lowering_platforms=("tpu",))
    module: Any = lowered.compiler_ir("stablehlo")
    text: str = module.operation.get_asm(enable_debug_info=True)
    arguments = ["argument"] * (len(jax.tree.leaves(given)) + 100)  # and what JAX adds
    return LoweredStep(
        program=text.encode(),
        partitioned=True,
        arguments=arguments,
        precision="bfloat16",
        numbered=False,
    )


# Products alone: (rows, channels) x (channels, units)


def products(rows: int, channels: int, units: int) -> dict[str, tuple]:
    """Returns forms of a product by name, with the shapes that they are given."""
    x, w = (rows, channels), (channels, units)
    scale = Shape((units,), F32)

    def scaled(x: Any, w: Any, scale: Any) -> Any:
        return (int_product(x, w).astype(F32) * scale).astype(BF16)

    def largest(x: Any, axis: int) -> Any:
        return jnp.maximum(jnp.max(jnp.abs(x.astype(F32)), axis, keepdims=True) / 127, 1e-9)

    def dynamic(x: Any, w: Any, scale: Any) -> Any:
        step = largest(x, -1)
        return (int_product(rounded(x, step), w).astype(F32) * step * scale).astype(BF16)

    def both(x: Any, w: Any) -> Any:
        steps = largest(x, -1), largest(w, 0)
        codes = rounded(x, steps[0]), rounded(w, steps[1])
        return (int_product(*codes).astype(F32) * steps[0] * steps[1]).astype(BF16)

    def training(product: Callable) -> Callable:
        return lambda x, w, dy: (product(x, w), product(dy, w.T), product(x.T, dy))

    floats, codes = (Shape(x, BF16), Shape(w, BF16)), (Shape(x, INT8), Shape(w, INT8))
    found = {
        "bfloat16": (jnp.matmul, floats),
        "int8": (scaled, (*codes, scale)),
        "int8, static": (
            lambda x, w, s: scaled(rounded(x, STEP), w, s),
            (floats[0], codes[1], scale),
        ),
        "int8, scales of each row": (dynamic, (floats[0], codes[1], scale)),
    }
    if rows == channels == units:
        found["bfloat16, training"] = (training(jnp.matmul), (*floats, floats[0]))
        found["int8, training"] = (training(both), (*floats, floats[0]))
    return found


PRODUCTS = ((12608, 768, 3072), (12608, 3072, 768), (4096, 4096, 4096))


def main() -> None:
    """Prints a row for each program, generation and form."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", default=",".join(["products", *PROGRAMS]))
    parser.add_argument("--generations", default="v5e,v6e")
    asked = parser.parse_args()
    print(f"{HEAD}\n|{'---|' * HEAD[1:].count('|')}", flush=True)
    for name in asked.programs.split(","):
        if name == "products":
            for sizes in PRODUCTS:
                forms = {k: lower(*v) for k, v in products(*sizes).items()}
                show(" x ".join(map(str, sizes)), forms, asked.generations.split(","))
            continue
        # What writes a token waits for its weights.
        forms = (FORMS[0], FORMS[-1]) if name.startswith("token") else FORMS
        lowered = {x.name: lower_model(x, *PROGRAMS[name]) for x in forms}
        show(name, lowered, asked.generations.split(","))


def show(name: str, forms: dict[str, LoweredStep], generations: Sequence[str]) -> None:
    """Compiles the forms of a program, and prints their costs and ratios to bfloat16."""
    for generation in generations:
        one, base = parse_slice(f"{generation}-1"), {}
        for form, program in forms.items():
            compiled = compiler.compile_program(program, one)
            if compiled.error:
                print(f"| {name} | {generation} | {form} | {compiled.error[:200]} |", flush=True)
                continue
            cost = price(program, compiled, one)
            cycles = cycles_of(cost, one)
            kind = form.partition(", training")[1]
            ratio = cycles / base.setdefault(kind, cycles)
            numbers = f"{cycles / 1e3:,.0f} | {ratio:.3f} | {1e3 * cost.seconds:.2f}"
            cells = f"{numbers} | {cost.bytes_accessed / 1e9:.2f} | {int8_products(compiled.text)}"
            print(f"| {name} | {generation} | {form} | {cells} |", flush=True)


def int8_products(text: str) -> int:
    """Returns how many products of a compiled program take int8 on both sides."""
    int8 = {line.split(" = ")[0].split("%")[-1] for line in text.splitlines() if " = s8[" in line}
    count = 0
    for line in text.splitlines():
        if " convolution(" in line:
            operands = line.split(" convolution(")[1].split(")")[0]
            count += all(x.strip().lstrip("%") in int8 for x in operands.split(","))
    return count


if __name__ == "__main__":
    main()
