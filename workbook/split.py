"""Products on the tensor cores of a Hopper GPU, of halves or of TF32's floats, by the user's route.

    v = 2^e (hi + lo), hi and lo in half, an exponent a row;  z = sum_k (xh wl + xl wh + xh wh)

float32: three products with 11 bits on each side keep 22 of float32's 24, and what tensor cores
round toward zero is kept short. tf32: xh wh alone has TF32's 11 bits, at half the bytes; or x and W
are multiplied as they are, rounded to these bits on their way. Columns of weights are divided by
powers of two first, those of x multiplied by them, so that no column is lost beside a larger one.
`halves` holds the same in plain torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from workbook import limits, ops, precision, ways
from workbook.fold import FoldCache
from workbook.ways import PANEL

__all__ = [
    "METHODS",
    "SHARED",
    "Halves",
    "added",
    "floor_ms",
    "halved",
    "halved_differences",
    "halved_means",
    "is_here",
    "kept",
    "method",
    "our_way",
    "product",
    "suits",
]

# The sources of the kernels below, under kernels/: they count in the digest of who uses them.
SHARED = (
    "split_product/split_product.cu",
    "split_rows/split_rows.cu",
    "split_weights/split_weights.cu",
)
METHODS = {"float32": "fp16x3", "tf32": "fp16x1"}  # of a route: by halves
PRODUCTS = {"float32": 3, "tf32": 1}
HOPPER = (9, 0)  # the compute capability whose instructions the product is written in
GROUP = 8  # rows that the halves' layout rounds up to; columns: to a pair of panels


class Halves(NamedTuple):
    """A matrix (rows, K) as 2^exponents (hi + lo) 2^columns, hi and lo by panels of 32 columns;
    columns has zeros behind K, up to a multiple of 64."""

    hi: Tensor
    lo: Tensor
    exponents: Tensor
    columns: Tensor


@functools.cache
def _split_rows() -> Callable | None:
    return ops.built("split_rows", "cuda", ["split_rows.cu"])


@functools.cache
def _split_weights() -> Callable | None:
    return ops.built("split_weights", "cuda", ["split_weights.cu"])


@functools.cache
def _split_product() -> Callable | None:
    return ops.built("split_product", "hopper", ["split_product.cu"])


@functools.cache
def _processors(index: int) -> int:
    """Multiprocessors of a GPU that the product runs on, built; else 0."""
    found = torch.cuda.get_device_properties(index)
    if (found.major, found.minor) != HOPPER or None in (
        _split_rows(), _split_weights(), _split_product()
    ):  # fmt: skip
        return 0
    return found.multi_processor_count


def is_here(device: str | torch.device = "cuda") -> bool:
    """True where that device is a GPU that the product runs on."""
    where = torch.device(device)
    if where.type != "cuda" or not torch.cuda.is_available():
        return False
    return _processors(torch.cuda.current_device() if where.index is None else where.index) > 0


def suits(
    x: Tensor, outputs: int, route: str = "", whole: bool = False, through: bool = False,
    centred: bool = False,
) -> bool:  # fmt: skip
    """True where `product` is the faster one for x (B, K) and that many outputs, on a Hopper GPU;
    route: that of the user if not given. whole, through: as of `ways.ours`. centred: x has a
    centre."""
    if not x.is_cuda or x.dtype is not torch.float32:
        return False
    processors = _processors(x.get_device())
    route = route or precision.chosen_route()
    shape, raw = (*x.shape, outputs, processors), not centred and _has_even_rows(x)
    return processors > 0 and ways.best(route, *shape, whole, through, raw) != "torch"


def our_way(x: Tensor, outputs: int, route: str, whole: bool, through: bool) -> str:
    """The way, of ours, that x (B, K) is multiplied in on a Hopper GPU."""
    can = ways.ours(route, whole, through, _has_even_rows(x))
    processors = _processors(x.get_device()) or ways.PROCESSORS
    return ways.fastest(can, route, *x.shape, outputs, processors)


def _has_even_rows(x: Tensor) -> bool:
    """True where rows of x, or of a copy where they are not adjacent, and rows as long as they,
    all start at 16 bytes if the first does."""
    K = x.size(1)
    return K % 4 == 0 and (x.stride(0) % 4 == 0 or x.stride(1) != 1)


def method(way: str, route: str) -> str:
    """How a way of `ways` multiplies on a route, as records name it; "" for torch's."""
    if way == "torch":
        return ""
    return "tf32" if way == "floats" else METHODS[route]


def _room(v: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Empty (hi, lo, exponents) for so many rows of the width of v."""
    shape = (2 * -(-v.size(1) // PANEL), -(-rows // GROUP) * GROUP, PANEL // 2)
    hi, lo = (v.new_empty(shape, dtype=torch.float16) for _ in range(2))
    return hi, lo, v.new_empty(rows, dtype=torch.int32)


def _split(x: Tensor, columns: Tensor, centre: Tensor | None = None, both: bool = True) -> Halves:
    """The halves of x (B, K) 2^columns; of (x - centre) / 2. both: else lo stays empty."""
    hi, lo, exponents = _room(x, x.size(0))
    lo = lo if both else hi[:0]
    _split_rows()(x, columns, x[:0, 0] if centre is None else centre, hi, lo, exponents)
    return Halves(hi, lo, exponents, columns)


WHOLE, DIFFERENCE, MEAN = range(3)  # of rows of weights: what is split, as Fold of the kernel
# Of a kernel's blocks of 128 columns and a slice of the rows: so many as were fastest on an H200,
# eight for each multiprocessor, which holds three; more of many columns; of so many rows at least.
BLOCKS, SLICES, ROWS_OF_A_SLICE = 1056, 32, 16


def _slices(rows: int, width: int) -> int:
    """Of the rows of a fold. Where rows can't be read by 16 bytes, blocks have a quarter of the
    columns, and are four times as many."""
    across = -(-width // 128)
    return max(1, min(max(SLICES, BLOCKS // across), -(-rows // ROWS_OF_A_SLICE)))


def _halved(
    weight: Tensor, fold: int, group: int, bias: Tensor | None = None
) -> tuple[Halves, *tuple[Tensor, ...]]:
    """(halves, mean, exact, sums, shifts, total) of weight (N, K), and of the bias where there is
    one; all but the halves empty where they do not belong."""
    weight = ops.adjacent(weight.detach())
    rows, width = weight.size(0) // group, weight.size(1)
    most = weight.new_empty(width + 1, dtype=torch.int32)
    columns = weight.new_empty(-(-width // PANEL) * PANEL, dtype=torch.int8)
    hi, lo, exponents = _room(weight, rows)
    wide = {"dtype": torch.float64}
    mean, exact = (weight.new_empty((rows if fold == MEAN else 0, width), **d) for d in ({}, wide))
    summed, slices = fold == DIFFERENCE, _slices(rows, width)
    partial = weight.new_empty((slices if summed else 0, width), **wide)
    sizes = (width, rows, 1) if summed else (0, 0, 0)
    found = [weight.new_empty(size, **wide) for size in sizes]
    bias = mean[:0, 0] if bias is None else bias.detach()[: 2 * rows].contiguous()
    _split_weights()(
        weight, bias, fold, group, slices, columns, most, exponents, hi, lo, mean, exact, partial,
        *found,
    )  # fmt: skip
    return Halves(hi, lo, exponents, columns), mean, exact, *found


def halved(weight: Tensor) -> Halves:
    """The halves of weight (N, K), float32, its columns divided by powers of two of their size."""
    return _halved(weight, WHOLE, 1)[0]


def halved_means(weight: Tensor, pool: int) -> tuple[Halves, Tensor, Tensor]:
    """(halves, w, w_exact): `sums.group_mean`, and halves of w_exact, in one go over weight."""
    return _halved(weight, MEAN, pool)[:3]


def halved_differences(weight: Tensor, bias: Tensor) -> tuple[Halves, Tensor, Tensor, Tensor]:
    """(halves, sums, shifts, total) of weight (N, K) and bias (N): of the differences of pairs,
    `sums.pair_difference`, halves and sums; those of the bias and its sum (), in float64."""
    halves, _, _, summed, shifts, total = _halved(weight, DIFFERENCE, 2, bias)
    return halves, summed, shifts, total[0]


_kept = FoldCache()


def kept(weight: Tensor) -> Halves:
    """`halved` of a parameter, kept until it changes."""
    return Halves(*_kept.get("halves", (weight,), lambda: halved(weight)))


def product(
    x: Tensor,
    weight: Halves,
    whole: Tensor | None = None,
    centre: Tensor | None = None,
    way: str | None = None,
    promote: int = PANEL,
    products: int | None = None,
    through: bool = False,
) -> Tensor:
    """x (B, K) -> z (parts, B, N) in float32, whose sum over the parts is x W^T; K at least 1.

    products: 3, float32's accuracy, or 1, TF32's; None is that of the route the user has chosen.
    whole: W itself, where rows of it may hold infinities that leave an output finite or infinite.
    centre (K): of (x - centre) / 2 instead. way: one of `ways` that can be, the fastest if None.
    promote: of k, a multiple of 64, what tensor cores accumulate of three products; above 64 to see
    what becomes of it. through: one product may be accumulated over all of k, which is faster and
    draws each output toward zero, by 1e-5 of it. The sum over k is cut where blocks are missing.
    """
    processors = _processors(x.get_device()) if x.is_cuda else 0
    if not processors:
        raise RuntimeError(
            f"x: got device {x.device}; a product of halves wants a GPU of compute capability 9.0, "
            "and nvcc: move x to one, or use torch.mm"
        )
    x = ops.adjacent(x)
    products = _products(products, promote)
    outputs, route = weight.exponents.size(0), "float32" if products == 3 else "tf32"
    whole = None if whole is None else ops.adjacent(whole.detach())
    can = _ways(x, whole, centre, promote, products, through)
    if way is not None and way not in can:
        raise ValueError(f"way: got {way!r}; wants one of {', '.join(can)} for these operands")
    shape = *x.shape, outputs, processors
    way = way or ways.fastest(can, route, *shape)
    parts = 1 if promote > PANEL else ways.cut(*shape, way)[1]
    z = x.new_empty((parts, x.size(0), outputs))
    if not z.numel():
        return z
    none, both = (weight.hi[:0], weight.hi[:0], weight.exponents[:0]), products == 3
    halves = none if way in ("raw", "floats") else _split(x, weight.columns, centre, both)[:3]
    w = none if way == "floats" else (weight.hi, weight.lo if both else none[1], weight.exponents)
    interval = 0 if way == "through" else promote // PANEL
    whole = x[:0] if whole is None else whole
    _split_product()(x, *halves, weight.columns, whole, *w, interval, z)
    return z


def _products(products: int | None, promote: int) -> int:
    """How many products of halves: what is asked for, or belongs to the user's route."""
    if promote < PANEL or promote % PANEL:
        raise ValueError(f"promote: got {promote}; wants a multiple of {PANEL}")
    products = products or PRODUCTS[precision.chosen_route()]
    if products not in PRODUCTS.values() or (products == 1 and promote > PANEL):
        raise ValueError(f"products: got {products}; wants 3, or 1 with promote={PANEL}")
    return products


def _ways(
    x: Tensor, whole: Tensor | None, centre: Tensor | None, promote: int, products: int,
    through: bool,
) -> tuple[str, ...]:  # fmt: skip
    """How x (B, K) can be multiplied: the copy engine wants what it reads as it is at 16 bytes."""
    raw = centre is None and promote == PANEL and _at_16_bytes(x)
    usable = whole is not None and _at_16_bytes(whole)
    return ways.ours("float32" if products == 3 else "tf32", usable, through, raw)


def _at_16_bytes(matrix: Tensor) -> bool:
    return matrix.data_ptr() % 16 == 0 and matrix.stride(0) % 4 == 0


def added(parts: Tensor) -> Tensor:
    """parts (parts, B, N) -> (B, N), their sum, of its own memory or that of the one part."""
    return parts[0] if parts.size(0) == 1 else parts.sum(0)


def floor_ms(B: int, K: int, N: int, reach: limits.Ceilings) -> float:
    """The least time of the product in ms: three products of halves or the bytes of x, W and z,
    which are float32's; at float32's rate where that of halves is not known."""
    route = "fp16x3" if reach.half_tflops else "float32"
    return limits.floor_ms(limits.gemm_work(B, K, max(N, 1)), reach, route).ms
