"""The warpgroups of the forward that compute: 64 query rows of an item each, tile by tile of keys."""

import dataclasses
from types import ModuleType

import cutlass
import cutlass.cute as cute
from cutlass.experimental import primitives
from kernels import ring, tile, work
from kernels.hopper import direct_p, epilogue, items, online_softmax, query_tile, visibility, warpgroup
from kernels.instructions import fused
from kernels.words import Float32, Uint32, view, when

Int32, Int64, Boolean, Pointer, Constexpr = (
    cutlass.Int32,
    cutlass.Int64,
    cutlass.Boolean,
    cutlass.Pointer,
    cutlass.Constexpr,
)
Constants = online_softmax.Constants | direct_p.Constants

_QUERY_BARRIER = 1  # and the next ones: the query rows of a consumer are there, or are no longer read


@dataclasses.dataclass(frozen=True)
class Arrays:
    """What consumers read and write themselves; see :func:`kernels.hopper.forward.forward`."""

    query_codes: Pointer
    query_pages: Pointer
    value_exponents: Pointer
    output: Pointer
    lse: Pointer
    query_segments: Pointer
    key_segments: Pointer


def _first_row_of(job: items.Job, consumer: Int32, num_queries: Int32) -> Int32:
    """The first row of a warpgroup, or one behind the last if the item has no rows for it."""
    row = job.item.first_row + consumer * warpgroup.ROWS
    return when(row < 0, num_queries, row)


@cute.jit
def _release(of: ring.Ring, place: ring.Place) -> None:
    """Tells the producer that this warp has read a stage."""
    with cute.arch.elect_one():
        primitives.mbarrier_arrive(of.empty(place.stage))


@cute.jit
def _skip(keys: ring.Ring, values: ring.Ring, place: ring.Place) -> ring.Place:
    """Leaves out a tile that no row of the warpgroup sees."""
    for of in (keys, values):
        ring.wait(of.full(place.stage), place.parity)
        _release(of, place)
    return ring.following(place, keys.stages)


@cute.jit
def _of_batch(segments: Pointer, batch: Int32, length: Int32) -> Pointer:
    """Start of a batch entry's segments, or null."""
    if segments.toint() != 0:
        segments = view(segments, Int32) + Int64(batch) * length
    return segments


def _scores(query: Int32, keys: ring.Ring, place: ring.Place, head_size: int) -> list[Float32]:
    """Starts the product of the query rows and a tile of keys, when the tile is there."""
    ring.wait(keys.full(place.stage), place.parity)
    key = warpgroup.descriptor(keys.stage(place.stage).toint(Int32))
    return warpgroup.product_of_shared(query, key, tile.ROWS, head_size, warpgroup.ROWS, tile.ROWS)


def _outputs(p: list[Uint32], values: ring.Ring, place: ring.Place, head_size: int, kind: str) -> list[Float32]:
    """Starts the product of probabilities and a tile of values, when the tile is there."""
    ring.wait(values.full(place.stage), place.parity)
    value = warpgroup.descriptor(values.stage(place.stage).toint(Int32))
    return warpgroup.product_of_registers(p, value, head_size, kind, kind)


def _softmax(constants: Constants) -> ModuleType:
    """Where the functions of a softmax are."""
    return online_softmax if isinstance(constants, online_softmax.Constants) else direct_p


def _probabilities(
    scores: list[Float32],
    accumulators: list[Float32],
    state: online_softmax.Rows | direct_p.Rows,
    key_tile: Int32,
    is_first: Boolean,
    value_exponents: Pointer,
    first_exponent: Int32,
    constants: Constants,
) -> tuple[list[Uint32], list[Float32], list[Float32], online_softmax.Rows | direct_p.Rows]:
    """The A operand of the second product, factors, the accumulators to add to, and the new state."""
    if isinstance(constants, online_softmax.Constants):
        p, factors, state = online_softmax.step(scores, state, constants)
        return p, factors, accumulators, state
    value_exponent = work.int_at(value_exponents, first_exponent + key_tile)
    return direct_p.step(scores, accumulators, state, key_tile, is_first, value_exponent, constants)


def _accumulated(old: list[Float32], new: list[Float32], factors: list[Float32], constants: Constants) -> list[Float32]:
    """Adds a tile's product: online softmax rescales what was there, Direct-P the product.

    The tensor core adds 8-bit products with 13 fraction bits, its accumulators included, so they take one tile only.
    """
    pairs = enumerate(zip(old, new, strict=True))
    if isinstance(constants, online_softmax.Constants):
        return [fused(before, factors[i // 2 % 2], added) for i, (before, added) in pairs]
    return [fused(added, factors[i // 2 % 2], before) for i, (before, added) in pairs]


@cute.jit
def _load_query(
    memory: Pointer,
    consumer: Int32,
    head_index: Int64,
    first_row: Int32,
    arrays: Arrays,
    problem: items.Problem,
    head_size: Constexpr,
) -> None:
    """Expands the query rows of a warpgroup into shared memory, when those before are no longer read."""
    primitives.barrier_cta_sync(barrier_id=_QUERY_BARRIER + consumer, thread_count=128)
    codes, pages = view(arrays.query_codes, Uint32), view(arrays.query_pages, Uint32)
    query_tile.load(codes, pages, memory, head_index, first_row, problem.num_queries, head_size)
    primitives.barrier_cta_sync(barrier_id=_QUERY_BARRIER + consumer, thread_count=128)


def _view_of(job: items.Job, first_row: Int32, arrays: Arrays, problem: items.Problem) -> visibility.View:
    """What the rows of a warpgroup see."""
    query_segments = _of_batch(arrays.query_segments, job.item.batch, problem.num_queries)
    key_segments = _of_batch(arrays.key_segments, job.item.batch, problem.num_keys)
    return visibility.with_whole_tiles(
        visibility.View(
            job.keys,
            first_row,
            problem.window_left,
            problem.window_right,
            query_segments,
            key_segments,
            problem.order,
            problem.num_queries,
            problem.num_keys,
            [Int32(0), Int32(0)],
        )
    )


def _finish(
    o: list[Float32],
    state: online_softmax.Rows | direct_p.Rows,
    seen: visibility.View,
    job: items.Job,
    head_index: Int64,
    arrays: Arrays,
    problem: items.Problem,
    constants: Constants,
    head_size: int,
) -> None:
    """Normalises and writes output and lse."""
    rows = seen.rows()
    totals = [epilogue.sum_over_four(total) for total in state.total]
    sees = [(row < job.row_limit) & (segment > 0) for row, segment in zip(rows, seen.segments(rows), strict=True)]
    factors, logs = _softmax(constants).normalize(state, totals, sees, constants)
    output, lse, num_queries = view(arrays.output, Uint32), view(arrays.lse, Float32), problem.num_queries
    head, batch = job.item.head, job.item.batch
    epilogue.store_output(output, o, factors, rows, num_queries, problem.query_heads, head, batch, head_size)
    for row in (0, 1):
        epilogue.store_lse(lse, logs[row], rows[row], num_queries, head_index)


@cute.jit
def _attend(
    keys: ring.Ring,
    values: ring.Ring,
    place: ring.Place,
    query_memory: Pointer,
    consumer: Int32,
    job: items.Job,
    arrays: Arrays,
    problem: items.Problem,
    constants: Constants,
    head_size: Constexpr,
) -> ring.Place:
    """Computes the rows that a warpgroup has of an item, and returns the place behind the item's tiles."""
    head_index = Int64(job.item.batch) * problem.query_heads + job.item.head
    first_row = _first_row_of(job, consumer, problem.num_queries)
    _load_query(query_memory, consumer, head_index, first_row, arrays, problem, head_size)
    seen = _view_of(job, first_row, arrays, problem)
    first_tile, end_tile = visibility.tiles_seen(seen, job.row_limit)
    softmax = _softmax(constants)
    first_exponent = job.kv_index * problem.key_tiles
    query = warpgroup.descriptor(query_memory.toint(Int32))
    o = [Float32(0.0) for _ in range(head_size // 2)]
    state = softmax.before_any_tile()
    for _ in cutlass.range(first_tile - job.keys.first_tile):
        place = _skip(keys, values, place)
    for key_tile in cutlass.range(first_tile, end_tile):
        s = warpgroup.wait(0, _scores(query, keys, place, head_size))
        _release(keys, place)
        s = visibility.masked(s, seen, key_tile, softmax.KEY_ORDER)
        is_first = key_tile == first_tile
        p, factors, o, state = _probabilities(
            s, o, state, key_tile, is_first, arrays.value_exponents, first_exponent, constants
        )
        t = warpgroup.wait(0, _outputs(p, values, place, head_size, softmax.P_KIND))
        _release(values, place)
        o = _accumulated(o, t, factors, constants)
        place = ring.following(place, keys.stages)
    for _ in cutlass.range(job.keys.first_tile + job.keys.num_tiles - end_tile):
        place = _skip(keys, values, place)
    _finish(o, state, seen, job, head_index, arrays, problem, constants, head_size)
    return place


@cute.jit
def consume(
    keys: ring.Ring,
    values: ring.Ring,
    handover: items.Handover,
    query_memory: Pointer,
    consumer: Int32,
    arrays: Arrays,
    problem: items.Problem,
    constants: Constants,
    head_size: Constexpr,
) -> None:
    """Computes the items that the producer hands over, until there is none.

    Args:
      keys: Ring of keys.
      values: Ring of values.
      handover: Of the items.
      query_memory: Shared memory for the query rows of this warpgroup.
      consumer: Its number.
      arrays: Operands and results.
      problem: Sizes and restrictions.
      constants: Of the softmax.
      head_size: 64 or 128.
    """
    place, item_place = (ring.Place(Int32(0), Int32(0)) for _ in range(2))
    job = items.take(handover, item_place)
    while items.is_item(job):
        place = _attend(keys, values, place, query_memory, consumer, job, arrays, problem, constants, head_size)
        item_place = ring.following(item_place, items.STAGES)
        job = items.take(handover, item_place)
