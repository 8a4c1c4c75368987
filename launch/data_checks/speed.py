"""Compares the speed of this host's input pipeline with what the TPU needs."""

import math
import time

from tftpu.amounts import format_duration
from tftpu.errors import counted
from tftpu.launch.data_checks import Pipeline
from tftpu.launch.data_checks.finding import Finding

_BRIEF = 5.0  # seconds; for an epoch as short as this, more machines are not worth their price


def measure_speed(pipeline: Pipeline, hosts: int, seconds: float) -> float:
    """Returns the examples per second that this host reads, after a warm-up batch.

    Args:
        pipeline: the pipeline of the training split.
        hosts: number of hosts that share a batch.
        seconds: the time for which batches are read.
    """
    import tensorflow as tf

    from tftpu import input_pipelines

    batches = iter(input_pipelines.starting_at(pipeline, 0, 0, hosts))
    share = tf.nest.flatten(next(batches))[0].shape[0]
    start, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - start < seconds:
        next(batches)
        count += 1
    return count * share / (time.perf_counter() - start)


def inspect_speed(
    rate: float, needs: dict[str, float], hosts: int, examples: int | None, source: str = ""
) -> list[Finding]:
    """Checks that hosts like this one are fast enough for the TPU.

    Args:
        rate: examples per second of this host.
        needs: the examples per second that each slice needs, by its name.
        hosts: number of hosts.
        examples: number of training examples; None if it is unknown.
        source: a text on where `needs` are from; if `needs` is empty, on how to get them.
    """
    speed, seconds = f"this host gives {rate:,.0f} examples/s", math.inf
    if examples and hosts == 1:
        seconds = examples / rate
        speed = f"an epoch of {counted(examples, 'example')} takes this host "
        speed += f"{format_duration(seconds)} ({rate:,.0f} examples/s)"
    if not needs:
        return [Finding("ok", f"{speed}; {source}" if source else speed)]
    found = []
    for name, need in needs.items():
        wanted = max(1, math.ceil(need / rate))
        text = f"{speed}; {name} needs {need:,.0f}{source}"
        if wanted <= hosts:
            text += f": {hosts} host{'s are' if hosts > 1 else ' is'} enough"
            found.append(Finding("ok", text))
        elif seconds <= _BRIEF:
            found.append(Finding("ok", f"{text}: for epochs this short, this host is enough"))
        else:
            text += (
                f": {wanted:,} hosts like this one, or other machines that prepare the data "
                "(data.service)"
            )
            found.append(Finding("warning", text))
    return found
