"""Reads the text of a compiled program: instructions, shapes, loops, FLOPs, bytes, layers."""

import dataclasses
import functools
import math
import re
from collections.abc import Collection, Iterator

_BYTES = {"pred": 1, "bf16": 2, "f16": 2, "c64": 8, "c128": 16, "token": 0}
_TENSOR = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\](?:\{([^}]*)\})?")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%(\S+) = (.+?) ([a-z][a-z0-9-]*)\((.*)$")
_CALLED = r"(?:calls|body|to_apply|true_computation|false_computation)=%?([\w.-]+)"
_COMPUTATION = re.compile(r"^(ENTRY )?%(\S+) \(.*\{$")


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One array of a shape: `bf16[128,56,56,64]{3,0,2,1:T(8,128)(2,1)S(1)}`."""

    dtype: str
    dims: tuple[int, ...]
    layout: str = ""

    @property
    def item(self) -> float:
        """Bytes of one element."""
        if self.dtype in _BYTES:
            return _BYTES[self.dtype]
        bits = re.search(r"\d+", self.dtype)
        return int(bits[0]) / 8 if bits else 0

    @property
    def bytes(self) -> int:
        """Without padding."""
        return math.ceil(math.prod(self.dims) * self.item)

    @property
    def padded_bytes(self) -> int:
        """As it lies in memory: the two minor dimensions rounded up to the tile."""
        tile = re.search(r"T\((\d+)(?:,(\d+))?\)", self.layout)
        if not tile or not self.dims:
            return self.bytes
        order = [int(d) for d in self.layout.split(":")[0].split(",")]  # minor dimension first
        dims, sizes = list(self.dims), [int(t) for t in tile.groups() if t][::-1]
        for dim, size in zip(order, sizes):
            dims[dim] = -(-dims[dim] // size) * size
        return math.ceil(math.prod(dims) * self.item)

    @property
    def on_chip(self) -> bool:
        """Whether it lies in the core's own memory (VMEM, CMEM, SMEM) and not in HBM."""
        return bool(re.search(r"S\([1-9]", self.layout))

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(str(d) for d in self.dims)}]"


@dataclasses.dataclass
class Instruction:
    """One line of the program."""

    name: str
    opcode: str
    shape: list[Tensor]  # several for a tuple
    operands: list[str]
    argument: str  # as written: the number of a parameter
    rest: str  # what follows the operands: attributes, metadata, backend_config

    def attribute(self, pattern: str) -> str:
        """What a regular expression with one group finds among the attributes, or ""."""
        match = re.search(pattern, self.rest)
        return match[1] if match else ""

    @functools.cached_property
    def op_name(self) -> str:
        """The TensorFlow op it came from, with its name scopes."""
        return self.attribute(r'op_name="([^"]*)"')

    @property
    def cycles(self) -> int | None:
        """The compiler's own estimate; None where it makes none."""
        found = self.attribute(r'"estimated_cycles":"(\d+)"')
        return int(found) if found else None

    @property
    def called(self) -> list[str]:
        """The computations that it runs: a fusion's, a loop's body, branches."""
        found = re.findall(_CALLED, self.rest)
        branches = self.attribute(r"branch_computations=\{([^}]*)\}")
        return found + re.findall(r"[\w.-]+", branches)


class Module:
    """A program: its computations by name, each a dict of instructions by name.

    Args:
        text: what `HloModule.to_string()` gives, of a compiled or of a lowered program.
    """

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry: dict[str, Instruction] = {}
        here: dict[str, Instruction] = {}
        for line in text.splitlines():
            start = _COMPUTATION.match(line)
            if start:
                here = self.computations[start[2]] = {}
                self.entry = here if start[1] else self.entry
                continue
            match = _INSTRUCTION.match(line)
            if match:
                _, name, shape, opcode, rest = match.groups()
                operands, _, attributes = rest.partition(")")
                here[name] = Instruction(
                    name,
                    opcode,
                    tensors(shape),
                    re.findall(r"%([\w.-]+)", operands),
                    operands,
                    attributes,
                )

    def walk(self, computation: dict | None = None, times: int = 1) -> Iterator[tuple]:
        """Every instruction that runs, with how often and its computation; loops are followed.

        The body of a fusion is not: the fusion runs as one.
        """
        computation = self.entry if computation is None else computation
        for instruction in computation.values():
            if instruction.opcode in ("while", "call", "conditional"):
                inside = times * self.trip_count(instruction, computation)
                for name in instruction.called:
                    yield from self.walk(self.computations[name], inside)
            else:
                yield instruction, times, computation

    def trip_count(self, loop: Instruction, computation: dict) -> int:
        """How often a `while` runs its body; 1 for what is no loop, or one without a fixed count.

        The compiler writes the count down, or it is read off the condition: `counter < constant`.
        """
        known = loop.attribute(r'"known_trip_count":\{"n":"?(\d+)')
        if known or loop.opcode != "while":
            return int(known or 1)
        condition = self.computations[loop.attribute(r"condition=%?([\w.-]+)")]
        for test in condition.values():
            if test.opcode != "compare" or "direction=LT" not in test.rest:
                continue
            counter, bound = (condition[name] for name in test.operands)
            if bound.opcode == "constant" and bound.argument.isdigit():
                return int(bound.argument) - self._start(counter, loop, computation)
        return 1

    def _start(self, counter: Instruction, loop: Instruction, computation: dict) -> int:
        """What the counter of a loop starts at: a constant of its first tuple, else 0."""
        index = int(counter.attribute(r"index=(\d+)") or 0)
        state = computation.get(loop.operands[0])
        if state is None or state.opcode != "tuple":
            return 0
        start = computation.get(state.operands[index])
        while start is not None and start.opcode == "copy":
            start = computation.get(start.operands[0])
        is_number = start is not None and start.opcode == "constant" and start.argument.isdigit()
        return int(start.argument) if is_number else 0

    def products(self, instruction: Instruction, computation: dict) -> Iterator[tuple]:
        """The dots and convolutions that an instruction runs, each with its computation."""
        if instruction.opcode in ("dot", "convolution"):
            yield instruction, computation
        elif instruction.opcode in ("fusion", "async-start"):
            for name in instruction.called:
                inner = self.computations[name]
                for inside in inner.values():
                    yield from self.products(inside, inner)

    def matrix_flops(self, instruction: Instruction, computation: dict) -> int:
        """FLOPs of the dots and convolutions that an instruction runs; an addition counts too."""
        return sum(product_flops(*product) for product in self.products(instruction, computation))


def tensors(shape: str) -> list[Tensor]:
    """The arrays of a shape, one or a tuple's."""
    return [
        Tensor(dtype, tuple(int(d) for d in dims.split(",") if d), layout)
        for dtype, dims, layout in _TENSOR.findall(re.sub(r"/\*.*?\*/", "", shape))
    ]


def product_flops(instruction: Instruction, computation: dict) -> int:
    """2 x multiply-adds of a dot or a convolution; products with padding are not counted."""
    out = instruction.shape[0].dims
    left, right = (computation[name].shape[0].dims for name in instruction.operands[:2])
    if instruction.opcode == "dot":
        contracted = instruction.attribute(r"lhs_contracting_dims=\{([\d,]*)\}")
        return 2 * math.prod(out) * math.prod(left[int(d)] for d in contracted.split(",") if d)
    return 2 * _convolution_macs(instruction, out, left, right)


def _convolution_macs(instruction: Instruction, out, left, right) -> int:
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.rest)
    of_left, of_right, of_out = labels.groups()
    window = dict(re.findall(r"(\w+)=([\dx_-]+)", instruction.attribute(r"window=\{([^}]*)\}")))
    spatial = sorted(c for c in of_right if c.isdigit())

    def setting(key: str) -> list[str]:
        default = "0_0" if key == "pad" else "1"
        return window[key].split("x") if key in window else [default] * len(spatial)

    settings = zip(*(setting(key) for key in ("size", "stride", "pad", "lhs_dilate", "rhs_dilate")))
    macs = out[of_out.index("b")] * out[of_out.index("f")] * right[of_right.index("i")]
    for axis, (size, stride, pad, left_dilate, right_dilate) in zip(spatial, settings):
        macs *= _positions(
            out[of_out.index(axis)],
            left[of_left.index(axis)],
            int(size),
            int(stride),
            int(pad.split("_")[0]),
            int(left_dilate),
            int(right_dilate),
        )
    return macs


@functools.cache
def _positions(out: int, n: int, size: int, stride: int, pad: int, spread: int, step: int) -> int:
    """How many (output, kernel) positions of one axis meet an element and not padding."""
    last = (n - 1) * spread
    return sum(
        0 <= at <= last and at % spread == 0
        for k in range(size)
        for at in range(k * step - pad, k * step - pad + out * stride, stride)
    )


def layer_path(op_name: str, layers: Collection[str]) -> str:
    """The Keras layers that an op belongs to, outermost first: "block1_attention/qkv".

    Args:
        op_name: with its name scopes, each a layer's name and a number, as "head_1/MatMul".
        layers: the names of the model's layers.

    Returns:
        "" if the op is in no layer.
    """
    # Keras opens the scope twice, once to build and once to call, so the number is always there.
    scopes = [re.sub(r"_\d+$", "", scope) for scope in op_name.split("/")]
    path = [scope for scope in scopes if scope in layers]
    # Backward ops repeat the path: gradient_tape/resnet50_1/head_1/...
    return "/".join(dict.fromkeys(path))
