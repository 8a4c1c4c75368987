"""Parser of HLO text: instructions, shapes, loops, FLOPs and bytes."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

# Copies that overlap with other instructions. A matching "…-done" reads their results.
COPIES = ("copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start")
FREE = {  # opcodes of instructions that take no time
    *("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all"),
    *("partition-id", "replica-id", "opt-barrier", "domain", "recv"),
}

_UNKNOWN = (1 << 63) - 1  # cycles stated for an instruction that does not run on the TensorCore
_READ_IN_PART = ("dynamic-slice", "gather", "slice")
_SAME_PLACE = ("bitcast", "convert", "copy", "reshape")
_BYTES = {"pred": 1, "bf16": 2, "f16": 2, "c64": 8, "c128": 16, "token": 0}
_TENSOR = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\](?:\{([^}]*)\})?")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%(\S+) = (.+?) ([a-z][a-z0-9-]*)\((.*)$")
_CALLED = r"(?:calls|body|to_apply|true_computation|false_computation)=%?([\w.-]+)"
_COMPUTATION = re.compile(r"^(ENTRY )?%(\S+) \(.*\{$")
_DIM_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")


@dataclasses.dataclass(frozen=True)
class Tensor:
    """An array with its layout, such as `bf16[128,56,56,64]{3,0,2,1:T(8,128)(2,1)S(1)}`."""

    dtype: str
    dims: tuple[int, ...]
    layout: str = ""

    @property
    def item(self) -> float:
        """Bytes per element."""
        if self.dtype in _BYTES:
            return _BYTES[self.dtype]
        bits = re.search(r"\d+", self.dtype)
        return int(bits[0]) / 8 if bits else 0

    @property
    def bytes(self) -> int:
        """Size without padding."""
        return math.ceil(math.prod(self.dims) * self.item)

    @property
    def padded_bytes(self) -> int:
        """Size in memory, where the two minor dimensions are rounded up to whole tiles."""
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
        """True if the array is in the core's own memory (VMEM, CMEM, SMEM)."""
        return bool(re.search(r"S\([1-9]", self.layout)) and not self.on_host

    @property
    def on_host(self) -> bool:
        """True if the array is in the memory of the host."""
        return "S(5)" in self.layout

    @property
    def in_hbm(self) -> bool:
        """True if the array is in the chip's HBM."""
        return not self.on_chip and not self.on_host

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(str(d) for d in self.dims)}]"


@dataclasses.dataclass
class Instruction:
    """One HLO instruction.

    Attributes:
        name: unique within its computation.
        opcode: such as "fusion" or "convolution".
        shape: the result: one array, or several for a tuple.
        operands: names of the operands.
        argument: operands as written; for a parameter, its number.
        rest: text after the operands: attributes, metadata, backend_config.
        root: whether the instruction is the result of its computation.
        loop: the loop whose body contains it, if any.
    """

    name: str
    opcode: str
    shape: list[Tensor]
    operands: list[str]
    argument: str
    rest: str
    root: bool = False
    loop: "Instruction | None" = None

    def match_attribute(self, pattern: str) -> str:
        """Returns the first group of a regular expression searched in the attributes, or ""."""
        match = re.search(pattern, self.rest)
        return match[1] if match else ""

    @functools.cached_property
    def op_name(self) -> str:
        """Name of the op that the instruction came from, with its name scopes.

        Instructions that the compiler adds to the loop of an op have no name: they get the loop's.
        """
        found = self.match_attribute(r'op_name="([^"]*)"')
        return found or (self.loop.op_name if self.loop else "")

    @property
    def cycles(self) -> int | None:
        """The compiler's estimate of the core cycles it takes; None if there is none."""
        found = int(self.match_attribute(r'"estimated_cycles":"(\d+)"') or _UNKNOWN)
        return found if found < _UNKNOWN else None

    @property
    def called(self) -> list[str]:
        """The names of the computations that it runs: the body of a fusion or loop, branches."""
        found = re.findall(_CALLED, self.rest)
        several = self.match_attribute(r"(?:branch|called)_computations=\{([^}]*)\}")
        return found + re.findall(r"[\w.-]+", several)


Computation = dict[str, Instruction]  # instructions by name, in the order of the text


class Module:
    """A parsed HLO module.

    Args:
        text: output of `HloModule.to_string()`, before or after compilation.

    Attributes:
        computations: all computations, by name.
        entry: the computation that the program starts with.
    """

    def __init__(self, text: str):
        self.computations: dict[str, Computation] = {}
        self.entry: Computation = {}
        here: Computation = {}
        for line in _iterate_lines(text):
            start = _COMPUTATION.match(line)
            if start:
                here = self.computations[start[2]] = {}
                self.entry = here if start[1] else self.entry
            elif match := _INSTRUCTION.match(line):
                root, name, shape, opcode, rest = match.groups()
                operands, attributes = _split_operands(rest)
                here[name] = Instruction(
                    name,
                    opcode,
                    parse_tensors(shape),
                    re.findall(r"%([\w.-]+)", operands),
                    operands,
                    attributes,
                    bool(root),
                )
        self._set_loops()

    def _set_loops(self) -> None:
        """Sets the loop of each instruction that is in a loop."""
        for computation in self.computations.values():
            for loop in computation.values():
                for name in loop.called if loop.opcode == "while" else ():
                    for inside in self.computations[name].values():
                        inside.loop = loop

    def iterate_products(
        self, instruction: Instruction, computation: Computation
    ) -> Iterator[tuple[Instruction, Computation]]:
        """Yields the dots and convolutions that an instruction runs, each with its computation."""
        if instruction.opcode in ("dot", "convolution"):
            yield instruction, computation
        elif instruction.opcode in ("fusion", "async-start"):
            for name in instruction.called:
                inner = self.computations[name]
                for inside in inner.values():
                    yield from self.iterate_products(inside, inner)

    def count_matrix_flops(self, instruction: Instruction, computation: Computation) -> int:
        """Returns the FLOPs of the dots and convolutions that an instruction runs.

        A multiply-add counts as two.
        """
        return sum(
            count_product_flops(*product)
            for product in self.iterate_products(instruction, computation)
        )


def _iterate_lines(text: str) -> Iterator[str]:
    """Yields the lines of a program, each joined with its continuation lines.

    The value of an attribute, such as the metadata of a kernel, may span several lines.
    """
    begun = ""
    for line in text.splitlines():
        if not begun or line == "}" or _INSTRUCTION.match(line) or _COMPUTATION.match(line):
            yield begun
            begun = line
        else:
            begun += line
    yield begun


def _split_operands(text: str) -> tuple[str, str]:
    """Returns the operands, up to their closing parenthesis, and the text after it."""
    end, depth = text.index(")"), 0
    while text.count("(", 0, end) > depth:  # skips the parentheses of a tuple's type or of a layout
        depth += 1
        end = text.index(")", end + 1)
    return text[:end], text[end + 1 :]


def parse_tensors(shape: str) -> list[Tensor]:
    """Returns the arrays in the text of a shape: one, or all of a tuple."""
    return [
        Tensor(dtype, tuple(int(d) for d in dims.split(",") if d), layout)
        for dtype, dims, layout in _TENSOR.findall(re.sub(r"/\*.*?\*/", "", shape))
    ]


def count_product_flops(instruction: Instruction, computation: Computation) -> int:
    """Returns the FLOPs of a dot or a convolution; products with padding do not count."""
    out = instruction.shape[0].dims
    left, right = (computation[name].shape[0].dims for name in instruction.operands[:2])
    if instruction.opcode == "dot":
        contracted = instruction.match_attribute(r"lhs_contracting_dims=\{([\d,]*)\}")
        return 2 * math.prod(out) * math.prod(left[int(d)] for d in contracted.split(",") if d)
    return 2 * _count_convolution_macs(instruction, out, left, right)


def count_hbm_bytes(module: Module, instruction: Instruction, computation: Computation) -> int:
    """Returns the bytes that an instruction reads from and writes to HBM, including padding.

    If an instruction only slices an operand, or updates an array in place, only that part counts.
    """
    if instruction.opcode in COPIES:
        return _count_copied_bytes(instruction)
    if instruction.opcode == "dynamic-update-slice":
        return _count_updated_bytes(instruction, computation)
    inner = _find_fused(module, instruction)
    given = {i.argument: name for name, i in inner.items() if i.opcode == "parameter"}
    read = 0
    for index, name in enumerate(instruction.operands):
        if name in computation:
            whole = sum(t.padded_bytes for t in computation[name].shape if t.in_hbm)
            part = _count_part_read(module, inner, given.get(str(index), "")) if whole else 0
            if instruction.opcode in _READ_IN_PART and index == 0:
                part = instruction.shape[0].bytes
            read += whole if part is None else min(part, whole)
    return read + _count_written_bytes(module, inner, instruction)


def _count_copied_bytes(instruction: Instruction) -> int:
    """Returns the bytes of an asynchronous copy, whose shape has its source and destination.

    The smaller array is the one that moves: the other end of a slice or update is a whole array.
    """
    arrays = [tensor for tensor in instruction.shape if tensor.dims]
    source = 1 if instruction.opcode == "dynamic-update-slice-start" else 0
    ends = [tensor for tensor in (*arrays[source : source + 1], *arrays[-1:]) if tensor.in_hbm]
    return len(ends) * min((tensor.padded_bytes for tensor in arrays), default=0)


def _count_updated_bytes(instruction: Instruction, computation: Computation) -> int:
    """Returns the bytes of an update in place, including reads of partly changed tiles."""
    array, update = instruction.shape[0], computation[instruction.operands[1]].shape[0]
    read = update.padded_bytes if update.in_hbm else 0
    tiles = dataclasses.replace(array, dims=update.dims).padded_bytes if array.in_hbm else 0
    return read + (tiles if tiles == update.bytes else 2 * tiles)


def _find_fused(module: Module, instruction: Instruction) -> Computation:
    """Returns the body of a fusion; empty for other instructions."""
    if instruction.opcode == "fusion" and instruction.called:
        return module.computations[instruction.called[0]]
    return {}


def _count_part_read(module: Module, inner: Computation, name: str) -> int | None:
    """Returns the bytes that a fusion's body reads of one value; None if it reads all of it."""
    users = [i for i in inner.values() if name in i.operands]
    parts = []
    for user in users:
        nested = _find_fused(module, user)
        if user.opcode in _READ_IN_PART and user.operands[0] == name:
            parts.append(user.shape[0].bytes)
        elif user.opcode in _SAME_PLACE:  # reads only what its users read; dtypes may differ
            part = _count_part_read(module, inner, user.name)
            ratio = inner[name].shape[0].item / user.shape[0].item
            parts.append(None if part is None else math.ceil(part * ratio))
        elif nested:
            places = {str(place) for place, one in enumerate(user.operands) if one == name}
            parts += [
                _count_part_read(module, nested, inside.name)
                for inside in nested.values()
                if inside.opcode == "parameter" and inside.argument in places
            ]
        elif user.opcode != "dynamic-update-slice" or user.operands[0] != name:
            return None
    known = [part for part in parts if part is not None]
    return sum(known) if users and len(known) == len(parts) else None


def _count_written_bytes(module: Module, inner: Computation, instruction: Instruction) -> int:
    """Returns the bytes that an instruction, or a fusion with the body `inner`, writes to HBM."""
    roots = [i for i in inner.values() if i.root]
    if roots and roots[0].opcode == "tuple":
        roots = [inner[name] for name in roots[0].operands]
    # The lengths differ if one result is itself a tuple, as a collective's can be.
    if len(roots) != len(instruction.shape):
        roots = []
    written = 0
    for place, tensor in enumerate(instruction.shape):
        if tensor.in_hbm:
            update = _update(module, inner, roots[place]) if roots else None
            written += min(tensor.padded_bytes, tensor.padded_bytes if update is None else update)
    return written


def _update(module: Module, inner: Computation, result: Instruction) -> int | None:
    """Returns the bytes that a fusion's result updates in place; None if all of it is new."""
    while result.opcode in _SAME_PLACE:
        result = inner[result.operands[0]]
    if result.opcode == "dynamic-update-slice":
        return inner[result.operands[1]].shape[0].bytes
    nested = _find_fused(module, result)
    if nested and len(result.shape) == 1:
        return _update(module, nested, next(i for i in nested.values() if i.root))
    return None


def _count_convolution_macs(
    instruction: Instruction, out: tuple[int, ...], left: tuple[int, ...], right: tuple[int, ...]
) -> int:
    """Returns the multiply-adds of a convolution, given the dimensions of result and operands."""
    labels = _DIM_LABELS.search(instruction.rest)
    if labels is None:
        raise ValueError(f"The convolution {instruction.name} has no dim_labels.")
    left_labels, right_labels, out_labels = labels.groups()
    window = dict(
        re.findall(r"(\w+)=([\dx_-]+)", instruction.match_attribute(r"window=\{([^}]*)\}"))
    )
    spatial = sorted(c for c in right_labels if c.isdigit())

    def read_setting(key: str) -> list[str]:
        default = "0_0" if key == "pad" else "1"
        return window[key].split("x") if key in window else [default] * len(spatial)

    settings = zip(
        *(read_setting(key) for key in ("size", "stride", "pad", "lhs_dilate", "rhs_dilate"))
    )
    macs = out[out_labels.index("b")] * out[out_labels.index("f")] * right[right_labels.index("i")]
    for axis, (size, stride, pad, left_dilate, right_dilate) in zip(spatial, settings):
        macs *= _count_positions(
            out[out_labels.index(axis)],
            left[left_labels.index(axis)],
            int(size),
            int(stride),
            int(pad.split("_")[0]),
            int(left_dilate),
            int(right_dilate),
        )
    return macs


@functools.cache
def _count_positions(
    out: int, n: int, size: int, stride: int, pad: int, spread: int, step: int
) -> int:
    """Counts the pairs of output and kernel positions on an axis that read input, not padding."""
    last = (n - 1) * spread
    return sum(
        0 <= at <= last and at % spread == 0
        for k in range(size)
        for at in range(k * step - pad, k * step - pad + out * stride, stride)
    )
