"""Row indices of a minibatch in O(batch) work and memory, however many rows there are."""

from collections.abc import Iterable
from typing import Any, NamedTuple
from zlib import crc32

from jax import Array, lax, random
import jax.numpy as jnp
from jax.sharding import NamedSharding

from numpyro_ext.data._ahead import read_ahead, with_rows
from numpyro_ext.data._rows import is_on_host

_ROUNDS = 8
"""Rounds of the Feistel network, and the largest number of rows that are sorted instead."""


class PlateState(NamedTuple):
    """The position of one plate of one chain in its passes over the data."""

    epoch: Array
    """Number of passes completed."""
    offset: Array
    """Rows of the current pass already used, less than the size of the plate."""
    rng_key: Array
    """Fixed over the chain; the order of a pass is a function of it."""


def replace_indices(rng_key: Array, size: int, batch_size: int) -> Array:
    """``(B,)`` independent, uniform row numbers, in which a row may occur twice."""
    return random.randint(rng_key, (batch_size,), 0, size, jnp.int32)


def block_indices(rng_key: Array, size: int, batch_size: int) -> Array:
    """``(B,)`` contiguous row numbers from a uniform start; behind the last row comes the first."""
    start = random.randint(rng_key, (), 0, size, jnp.int32).astype(jnp.uint32)
    return ((start + jnp.arange(batch_size, dtype=jnp.uint32)) % size).astype(jnp.int32)


def plate_indices(rng_key: Array, name: str, size: int, batch_size: int) -> Array:
    """``(B,)`` row numbers of a plate, all different; each plate draws by its name and the key."""
    key = random.fold_in(rng_key, crc32(name.encode()))
    place = jnp.arange(min(batch_size, size), dtype=jnp.uint32)
    return permute(round_keys(key), place, size).astype(jnp.int32)


def rows_of_step(
    rng_key: Array, plates: Iterable[tuple[str, int, int]], arguments: Any
) -> tuple[dict[str, Array], Any]:
    """The :func:`plate_indices` of each plate, ``(name, size, batch_size)``, and the arguments of a
    model with the rows on the host read there; without such rows, no indices."""
    if not is_on_host(arguments):
        return {}, arguments
    idx = {name: plate_indices(rng_key, name, *size) for name, *size in plates}
    sizes = {name: size for name, size, _ in plates}
    rows = read_ahead(arguments, sizes, idx)
    return ({}, arguments) if rows is None else (idx, with_rows(arguments, sizes, idx, rows))


def _mix(x: Array, key: Array) -> Array:
    """A 32-bit multiply-xorshift hash (the finalizer of MurmurHash3)."""
    x = x ^ key
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def permute(keys: Array, i: Array, size: int) -> Array:
    r"""The images of the row numbers ``i`` under a pseudo-random bijection of ``0 .. size - 1``.

    The halves :math:`L, R` of a number go through a Feistel network, :math:`L \leftarrow L \oplus
    F_k(R)` in even rounds and :math:`R \leftarrow R \oplus F_k(L)` in odd ones, again while the
    result is not below N. It is a uniform draw among all N! permutations up to 8 rows only.

    :param keys: :func:`round_keys`, ``(rounds,)``, or ``(rounds, B)`` for a bijection of each row.
    """
    return _rank(keys, i, size) if size <= _ROUNDS else _encrypt(keys, i, size)


def _rank(keys: Array, i: Array, size: int) -> Array:
    """The rank of number ``i`` among the first ``size`` keys: a uniform draw of all orders."""
    i, each = i.astype(jnp.int32), (1,) * i.ndim
    keys = jnp.broadcast_to(keys.reshape(_ROUNDS, *(keys.shape[1:] or each)), (_ROUNDS, *i.shape))
    mine, others = jnp.take_along_axis(keys, i[None], 0), keys[:size]
    j = jnp.arange(size).reshape(size, *each)
    return jnp.sum((others < mine) | ((others == mine) & (j < i)), axis=0, dtype=jnp.uint32)


def _encrypt(keys: Array, i: Array, size: int) -> Array:
    """``i`` encrypted by an alternating Feistel network."""
    bits = (size - 1).bit_length()
    low = bits - bits // 2
    mask_left, mask_right = jnp.uint32((1 << (bits // 2)) - 1), jnp.uint32((1 << low) - 1)

    def encrypt(x: Array) -> Array:
        left, right = x >> low, x & mask_right
        for k in range(_ROUNDS):
            if k % 2 == 0:
                left = left ^ (_mix(right, keys[k]) & mask_left)
            else:
                right = right ^ (_mix(left, keys[k]) & mask_right)
        return (left << low) | right

    # Cycle walking: a value outside the rows is encrypted again. Starting from a row, the walk ends
    # at a row, and two walks never meet, so the rows are permuted among themselves.
    return lax.while_loop(
        lambda x: jnp.any(x >= size),
        lambda x: jnp.where(x >= size, encrypt(x), x),
        encrypt(i.astype(jnp.uint32)),
    )


def round_keys(rng_key: Array) -> Array:
    """The keys of the Feistel network; other keys are another bijection."""
    return random.bits(rng_key, (_ROUNDS,), jnp.uint32)


def epoch_indices(
    rng_key: Array, epoch: Array, offset: Array, size: int, batch_size: int
) -> tuple[Array, Array, Array]:
    """The next minibatch of a pass in which each row occurs once, and the counters after it; near
    the end of a pass it goes on with the first rows of the next."""
    epoch, offset = jnp.asarray(epoch), jnp.asarray(offset).astype(jnp.uint32)
    place = offset + jnp.arange(batch_size, dtype=jnp.uint32)
    next_pass = place >= size
    place = jnp.where(next_pass, place - jnp.uint32(size), place)
    keys = [round_keys(random.fold_in(rng_key, e))[:, None] for e in (epoch, epoch + 1)]
    idx = permute(jnp.where(next_pass, keys[1], keys[0]), place, size).astype(jnp.int32)
    end = offset + jnp.uint32(batch_size)
    over = end >= size
    return idx, epoch + over.astype(epoch.dtype), jnp.where(over, end - jnp.uint32(size), end)


def start_plates(
    rng_key: Array, plates: dict[str, tuple[int, int]], policy: str
) -> dict[str, PlateState]:
    """The counters of a new chain, which ``"epoch"`` alone has."""
    if policy != "epoch" or not plates:
        return {}
    zero, keys = jnp.zeros((), jnp.uint32), random.split(rng_key, len(plates))
    return {name: PlateState(zero, zero, key) for name, key in zip(plates, keys, strict=True)}


def draw_indices(
    rng_key: Array,
    counters: dict[str, PlateState],
    plates: dict[str, tuple[int, int]],
    sharding: NamedSharding | None = None,
    policy: str = "replace",
) -> tuple[dict[str, Array], dict[str, PlateState]]:
    """One minibatch of every plate, each drawn independently, and the counters after it."""
    draw = block_indices if policy == "block" else replace_indices
    idx, after = {}, {}
    # With partitionable keys `split` costs one small kernel; one plate does without it.
    keys = random.split(rng_key, len(plates)) if len(plates) > 1 else [rng_key]
    for (name, (size, batch_size)), key in zip(plates.items(), keys, strict=False):
        if name in counters:
            epoch, offset, plate_key = counters[name]
            idx[name], epoch, offset = epoch_indices(plate_key, epoch, offset, size, batch_size)
            after[name] = PlateState(epoch, offset, plate_key)
        else:
            idx[name] = draw(key, size, batch_size)
        if sharding is not None:
            idx[name] = lax.with_sharding_constraint(idx[name], sharding)
    return idx, after
