"""Causal attention over sequences of which each device has consecutive tokens.

Keys and values travel round the ring of devices. Each device attends to those that pass, and merges
the results by the softmax's denominators (Liu et al. 2023, https://arxiv.org/abs/2310.01889). With
tokens in order, the last device would attend to all keys and the first to almost none. Therefore,
during attention, device i of n holds chunks i and 2n - 1 - i of 2n, so all devices compute two
pairs of chunks in each round (Llama 3; Dubey et al. 2024, https://arxiv.org/abs/2407.21783).

Call these functions within `jax.shard_map`. The module `flash` computes a pair of chunks.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tftpu.kernels import flash
from tftpu.sharding import Ring

Chunks = tuple[Any, Any]  # the chunk of early tokens and the chunk of late tokens


class KeyChunk(NamedTuple):
    """The keys and values that travel round the ring, with their segments if there are any."""

    key: jax.Array
    value: jax.Array
    segments: jax.Array | None


class PartialAttention(NamedTuple):
    """Attention to some of the keys.

    Attributes:
        output: (batch, time, columns x 128), float32.
        log_sum: (batch, columns, heads per column, time), float32: as `flash.forward` returns it.
    """

    output: jax.Array
    log_sum: jax.Array


def forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: flash.Segments | None,
    *,
    head_dim: int,
    ring: Ring,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Computes `flash.forward` for the tokens of this device.

    Args:
        query: see `flash.forward`, but with this device's tokens only, a multiple of twice
            `flash.BLOCK`. The same for key, value and segments.
        head_dim, interpret: see `flash.forward`.
        ring: the devices that share the time axis.

    Returns:
        output: see `flash.forward`.
        log_sum: see `flash.forward`; for this device's two chunks instead of consecutive tokens.
    """
    queries, held, query_segments = _collect_chunks(query, key, value, segments, ring)

    def attend_pair(
        query: Any, keys: KeyChunk, of_queries: Any, causal: bool = False
    ) -> PartialAttention:
        run = functools.partial(flash.forward, head_dim=head_dim, interpret=interpret)
        seen = _select_seen(of_queries, keys)
        output, log_sum = run(query, keys.key, keys.value, seen, causal=causal)
        return PartialAttention(output.astype(jnp.float32), log_sum)

    def add(mixed: PartialAttention, more: PartialAttention) -> PartialAttention:
        log_sum = jnp.logaddexp(mixed.log_sum, more.log_sum)
        parts = [
            m.output * _expand_to_channels(jnp.exp(m.log_sum - log_sum), m) for m in (mixed, more)
        ]
        return PartialAttention(parts[0] + parts[1], log_sum)

    def run_round(state: Any, number: Any) -> tuple[Any, None]:
        (early, late), held = state
        coming = _send_on(held, ring)
        of_earlier = _is_earlier(number, ring)
        late = add(late, attend_pair(queries[1], held[0], query_segments[1]))
        query, of_query = (_select_pair(of_earlier, x) for x in (queries, query_segments))
        more = attend_pair(query, _select_pair(of_earlier, held), of_query)
        early = _select_where(of_earlier, add(early, more), early)
        late = _select_where(of_earlier, late, add(late, more))
        return ((early, late), coming), None

    early = attend_pair(queries[0], held[0], query_segments[0], causal=True)
    late = attend_pair(queries[1], held[1], query_segments[1], causal=True)
    late = add(late, attend_pair(queries[1], held[0], query_segments[1]))
    state = (early, late), _send_on(held, ring)
    ((early, late), _), _ = jax.lax.scan(run_round, state, jnp.arange(1, ring.size))
    output = _restore_order((early.output, late.output), ring).astype(query.dtype)
    return output, jnp.concatenate([early.log_sum, late.log_sum], -1)


def backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: flash.Segments | None,
    log_sum: jax.Array,
    output: jax.Array,
    upstream: jax.Array,
    *,
    head_dim: int,
    ring: Ring,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes `flash.backward` for the tokens of this device.

    Args:
        query: see `forward`; the same for key, value, segments, head_dim, ring and interpret.
        log_sum: the second result of `forward`.
        output: the first result of `forward`.
        upstream: the gradient with respect to the output, with query's shape.

    Returns:
        See `flash.backward`. Gradients of keys travel with the keys, and are summed in float32.
    """
    queries, held, query_segments = _collect_chunks(query, key, value, segments, ring)
    given = tuple(
        zip(
            queries,
            query_segments,
            jnp.split(log_sum, 2, -1),
            *_exchange_halves((output, upstream), ring),
        )
    )

    def differentiate_pair(
        of_query: Any, keys: KeyChunk, causal: bool = False
    ) -> tuple[jax.Array, Chunks]:
        query, of_queries, log_sum, output, upstream = of_query
        run = functools.partial(flash.backward, head_dim=head_dim, interpret=interpret)
        seen = _select_seen(of_queries, keys)
        after = (log_sum, output, upstream)
        found = run(query, keys.key, keys.value, seen, None, *after, causal=causal)
        d_query, d_key, d_value = (x.astype(jnp.float32) for x in found)
        return d_query, (d_key, d_value)

    def run_round(state: Any, number: Any) -> tuple[Any, None]:
        (d_early, d_late), (d_first, d_second), held = state
        coming = _send_on(held, ring)
        # Gradients of the keys that this device holds now.
        d_first, d_second = _send_on((d_first, d_second), ring)
        of_earlier = _is_earlier(number, ring)
        d_query, d_keys = differentiate_pair(given[1], held[0])
        d_late, d_first = d_late + d_query, _sum(d_first, d_keys)
        d_query, d_keys = differentiate_pair(
            _select_pair(of_earlier, given), _select_pair(of_earlier, held)
        )
        d_early, d_late = (
            jnp.where(of_earlier, d_early + d_query, d_early),
            jnp.where(of_earlier, d_late, d_late + d_query),
        )
        d_first, d_second = (
            _select_where(of_earlier, _sum(d_first, d_keys), d_first),
            _select_where(of_earlier, d_second, _sum(d_second, d_keys)),
        )
        return ((d_early, d_late), (d_first, d_second), coming), None

    d_early, d_first = differentiate_pair(given[0], held[0], causal=True)
    d_late, d_second = differentiate_pair(given[1], held[1], causal=True)
    more, d_keys = differentiate_pair(given[1], held[0])
    state = (d_early, d_late + more), (_sum(d_first, d_keys), d_second), _send_on(held, ring)
    (d_queries, d_keys, _), _ = jax.lax.scan(run_round, state, jnp.arange(1, ring.size))
    (d_key, d_value) = zip(*_send_on(d_keys, ring))
    found = zip((d_queries, d_key, d_value), (query, key, value))
    d_query, d_key, d_value = (_restore_order(chunks, ring).astype(x.dtype) for chunks, x in found)
    return d_query, d_key, d_value


def _collect_chunks(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: flash.Segments | None,
    ring: Ring,
) -> tuple[Chunks, tuple[KeyChunk, KeyChunk], Chunks]:
    """Returns this device's two chunks of queries, of keys and values, and of query segments."""
    of_queries, of_keys = (
        ((None, None),) * 2 if segments is None else _exchange_halves(segments, ring)
    )
    queries, keys, values = _exchange_halves((query, key, value), ring)
    held = tuple(KeyChunk(*one) for one in zip(keys, values, of_keys))
    return queries, (held[0], held[1]), of_queries


def _select_seen(of_queries: jax.Array | None, keys: KeyChunk) -> flash.Segments | None:
    """Returns the segments of queries and of keys; None if there are none."""
    if of_queries is None or keys.segments is None:
        return None
    return of_queries, keys.segments


def _exchange_halves(arrays: tuple[jax.Array, ...], ring: Ring) -> list[Chunks]:
    """Returns, for each array, the two chunks that this device holds during attention.

    Args:
        arrays: (batch, time, ...), with this device's consecutive tokens.
        ring: the devices that share the time axis.
    """
    found = []
    for array in arrays:
        even, odd = (
            jax.lax.ppermute(half, ring.axis, _list_destinations(ring, number))
            for number, half in enumerate(jnp.split(array, 2, 1))
        )
        found.append(_as_even(even, odd, ring))
    return found


def _restore_order(chunks: Chunks, ring: Ring) -> jax.Array:
    """Returns this device's consecutive tokens; the inverse of `_exchange_halves`."""
    halves = [
        jax.lax.ppermute(half, ring.axis, [(b, a) for a, b in _list_destinations(ring, number)])
        for number, half in enumerate(_as_even(*chunks, ring))
    ]
    return jnp.concatenate(halves, 1)


def _list_destinations(ring: Ring, number: int) -> list[tuple[int, int]]:
    """Returns (sender, receiver) for the first (0) or second (1) half of each device's tokens."""
    chunks = [(device, 2 * device + number) for device in range(ring.size)]
    last = 2 * ring.size - 1
    return [(device, min(chunk, last - chunk)) for device, chunk in chunks]


def _as_even(first: jax.Array, second: jax.Array, ring: Ring) -> Chunks:
    """Swaps two arrays on odd devices: (even, odd) chunks become (early, late), or the reverse."""
    even = jax.lax.axis_index(ring.axis) % 2 == 0
    return jnp.where(even, first, second), jnp.where(even, second, first)


def _is_earlier(number: Any, ring: Ring) -> Any:
    """Returns whether the keys of round `number`, 1 or later, are from a device of lower index."""
    return number <= jax.lax.axis_index(ring.axis)


def _send_on(tree: Any, ring: Ring) -> Any:
    """Sends a value to the next device; returns the value of the previous device."""
    to = [(device, (device + 1) % ring.size) for device in range(ring.size)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, ring.axis, to), tree)


def _select_pair(first: Any, pair: Any) -> Any:
    return _select_where(first, *pair)


def _select_where(condition: Any, first: Any, second: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), first, second)


def _sum(first: Any, second: Any) -> Any:
    return jax.tree.map(jnp.add, first, second)


def _expand_to_channels(weights: jax.Array, mixed: PartialAttention) -> jax.Array:
    """Repeats each head's weights over its channels; returns (batch, time, width)."""
    batch, columns, heads, time = weights.shape
    by_head = jnp.transpose(weights, (0, 3, 1, 2)).reshape(batch, time, columns * heads, 1)
    width = mixed.output.shape[2]
    spread = jnp.broadcast_to(by_head, (*by_head.shape[:3], width // (columns * heads)))
    return spread.reshape(batch, time, width)
