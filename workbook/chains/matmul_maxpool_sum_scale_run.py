"""How the maxpool chain runs: torch's products around its kernels, by blocks, and the guard."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbook import gemm, normal, ops, precision, split
from workbook.spec import Product

LIMIT = 4.0  # of sum |g| over |A + B|: the errors of half a product, beside those of a whole one
# The same where halves are multiplied. Tensor cores draw each |g| toward zero, by 9e-8 of it, which
# does not average: it is seen as many times larger as the sum cancels.
LIMIT_OF_HALVES = 2.0
# in_features and out_features from which a product is halved. Below, a row's few roundings do not
# average, and eager's own error is luck: ours has to be smaller, or the same.
LEAST = (256, 2048)
# The same where three products of halves are made: they err less than eager's one in float32. Of
# fewer features a row's sum cancels now and then, and to do it again there are few blocks.
LEAST_OF_HALVES = (256, 512)
# Of whole products, those left to the reference, as nothing of ours is faster: on a CPU of fewer
# out_features, since oneDNN rounds twice as much as a BLAS; and few weights, multiplications.
ROUGH, FEW, SHORT = 4096, 1 << 20, 1 << 24
BLOCK, ROWS = 1 << 20, 1024  # elements and rows of a block on a CPU: 4 MB stay in its caches
WIDENED = 1 << 22  # weights that are float64 at a time
ELEMENTS = 1 << 28  # of a product at a time on a GPU


def is_folded(weight: Tensor, pool: int) -> bool:
    """True where half a product, or none, stands for weight (N, K) and that pool."""
    return pool == 1 or (pool == 2 and _reach(LEAST, *weight.shape))


def is_halved(weight: Tensor, pool: int) -> bool:
    """`is_folded`, or where three products of halves may stand for weight, on a GPU."""
    few = pool == 2 and weight.is_cuda and _reach(LEAST_OF_HALVES, *weight.shape)
    return few or is_folded(weight, pool)


def _reach(least: tuple[int, int], N: int, K: int) -> bool:
    return K >= least[0] and N >= least[1]


def is_left(x: Tensor, linear: nn.Module, pool: int) -> bool:
    """True where the chain is left to the reference: a whole product, too small to gain from. To be
    asked first, since all else that a drop-in asks takes as long as so small a product."""
    sizes = normal.sizes(x, linear)
    if sizes is None or is_halved(linear.weight, pool):
        return False
    B, K, N = sizes
    if torch.compiler.is_compiling():  # for batches of any size, by the weights alone
        B = 0
    return (not x.is_cuda and N < ROUGH) or _is_small(B, K * N)


def _is_small(rows: int, weights: int) -> bool:
    return weights <= FEW and rows * weights <= SHORT


def multiplied(_: str, route: str, shape: Mapping[str, int]) -> Product | None:
    """What tensor cores multiply, if that is faster: differences of pairs by halves; by TF32, else,
    all features."""
    B, K, N, pool = (shape[name] for name in ("B", "K", "N", "pool"))
    if pool == 2 and _reach(LEAST_OF_HALVES if route == "float32" else LEAST, N, K):
        return Product(N // 2)
    is_whole = pool > 1 and route == "tf32" and not _is_small(B, K * N)
    return Product(N, whole=True) if is_whole else None


def scaled(total: Tensor, scale: float) -> Tensor:
    """total (B,) float64, scaled and rounded once; infinite before it is where eager's sum is."""
    rounded = total.float()
    return torch.where(rounded.isfinite(), (total * scale).float(), rounded * scale)


def directly(x: Tensor, weight: Tensor, bias: Tensor, pool: int, scale: float) -> Tensor:
    """The chain as it is written, in float64, by blocks of windows; pool is at most N."""
    x, used = x.double(), weight.size(0) // pool * pool
    total, step = x.new_zeros(x.size(0)), max(1, WIDENED // (x.size(1) * pool + 1)) * pool
    for first in range(0, used, step):
        last = min(first + step, used)
        z = F.linear(x, weight[first:last].double(), bias[first:last].double())
        total += z.unflatten(1, (-1, pool)).amax(2).sum(1)
    return scaled(total, scale)


def _blocks(rows: int, columns: int, step: int) -> tuple[int, int]:
    """(rows, columns) of a block of the product, columns a multiple of `step`."""
    if rows * columns <= BLOCK:
        return max(rows, 1), max(columns, 1)
    rows = min(rows, ROWS)
    return rows, max(BLOCK // rows // step * step, step)


def run_chain(run: Callable, x: Tensor, parameters: tuple, _: tuple, options: tuple) -> Tensor:
    """A kernel that takes the weights as they are."""
    y = x.new_empty(x.size(0))
    run(ops.adjacent(x), *(p.contiguous() for p in parameters), *options, y)
    return y


def _product(weight: Tensor) -> Callable[..., Tensor]:
    """(x, weight, bias) -> z: how, for the whole weight (N, K); narrow ones as eager does."""
    return gemm.product if weight.size(0) >= ROUGH else F.linear


def run_tail(run: Callable, x: Tensor, parameters: tuple, _: tuple, options: tuple) -> Tensor:
    """The whole product, then a kernel for what is left."""
    weight, bias = parameters
    used = weight.size(0) // options[0] * options[0]
    y, product, rows = x.new_empty(x.size(0)), _product(weight), _rows_at_once(used)
    for first in range(0, x.size(0), rows):
        part = slice(first, first + rows)
        run(product(x[part], weight[:used], bias[:used]), *options, y[part])
    return y


def run_tail_split(
    run: Callable, x: Tensor, parameters: tuple, folded: tuple, options: tuple
) -> Tensor:
    """The whole product by halves of the weight; the kernel behind adds the bias."""
    (weight, bias), x, y = parameters, ops.adjacent(x), x.new_empty(x.size(0))
    halves, bias, rows = split.Halves(*folded), bias.contiguous(), _rows_at_once(weight.size(0))
    for first in range(0, x.size(0), rows):
        part = slice(first, first + rows)
        z = split.added(split.product(x[part], halves, whole=weight))
        run(z, bias, *options, y[part])
    return y


def suits_tail_split(x: Tensor, weight: Tensor, *_: object) -> bool:
    """True where the whole product is large enough for the tensor cores of this GPU, and TF32 will
    do. In float32 it would not: what a row of x loses in halves, and what tensor cores round toward
    zero, is the same for all features, so that their sum does not average it."""
    return precision.chosen_route() == "tf32" and split.suits(x, weight.size(0), whole=True)


def _rows_at_once(features: int) -> int:
    return max(1, ELEMENTS // max(features, 1))


def run_blocks(run: Callable, x: Tensor, parameters: tuple, _: tuple, options: tuple) -> Tensor:
    """The whole product on a CPU, by blocks; the maxima of each while it is in the cache."""
    (weight, bias), (pool, scale) = parameters, options
    used, finish = weight.size(0) // pool * pool, ops.beside(run, "finish")
    y, none = x.new_empty(x.size(0)), x.new_empty(0, dtype=torch.float64)
    flags, nothing = x.new_empty(x.size(0), dtype=torch.uint8), none.new_zeros(())
    product, (rows, columns) = _product(weight), _blocks(x.size(0), used, pool)
    for first in range(0, x.size(0), rows):
        part = x[first : first + rows]
        sums = part.new_zeros((part.size(0), 3), dtype=torch.float64)
        for n in range(0, max(used, 1), columns):
            last = min(n + columns, used)
            z = product(part, weight[n:last], bias[n:last])
            run(part[:, :0], none, z, none, pool, sums)
        finish(sums, nothing, 1, scale, math.inf, *(t[first : first + rows] for t in (y, flags)))
    return y


def run_half_blocks(
    run: Callable, x: Tensor, parameters: tuple, folded: tuple, options: tuple, *,
    direct: Callable, limit: float = LIMIT,
) -> Tensor:  # fmt: skip
    """Half a product on a CPU, by blocks; rows whose sum cancels directly. `direct`: without it."""
    if not is_folded(parameters[0], options[0]):
        return direct(x, *parameters, *options)
    differences, shifts, w_sum, b_sum = folded
    x, y, (pool, scale) = ops.adjacent(x), x.new_empty(x.size(0)), options
    flags, finish = x.new_empty(x.size(0), dtype=torch.uint8), ops.beside(run, "finish")
    rows, columns = _blocks(x.size(0), shifts.size(0), 1)
    for first in range(0, x.size(0), rows):
        part, found, flag = (t[first : first + rows] for t in (x, y, flags))
        sums = part.new_zeros((part.size(0), 3), dtype=torch.float64)
        once = part, w_sum  # the dot product comes along with the first block
        for m in range(0, max(shifts.size(0), 1), columns):
            g = gemm.product(part, differences[m : m + columns])
            run(*once, g, shifts[m : m + columns], 0, sums)
            once = part[:, :0], w_sum[:0]
        if finish(sums, b_sum, pool, scale, limit, found, flag) and pool == 2:
            cancels = flag.bool()
            found[cancels] = directly(part[cancels], *parameters, *options)
    return y


def run_half(
    run: Callable, x: Tensor, parameters: tuple, folded: tuple, options: tuple, *,
    direct: Callable, limit: float = LIMIT,
) -> Tensor:  # fmt: skip
    """Half a product on a GPU, a kernel for what is left, a launch for rows that it flags."""
    if not is_folded(parameters[0], options[0]):
        return direct(x, *parameters, *options)

    def multiply(part: Tensor) -> Tensor:
        return torch.mm(part, folded[0].T)

    return _half(run, x, parameters, folded[1:], options, multiply, limit)


def run_split(
    run: Callable, x: Tensor, parameters: tuple, folded: tuple, options: tuple, *,
    direct: Callable, limit: float = LIMIT_OF_HALVES,
) -> Tensor:  # fmt: skip
    """The same by halves of the differences, on tensor cores."""
    if options[0] != 2 or not is_halved(parameters[0], 2):
        return direct(x, *parameters, *options)
    return _half(
        run, x, parameters, folded[4:], options, lambda part: _by_halves(part, folded), limit
    )


def _by_halves(x: Tensor, folded: tuple) -> Tensor:
    """x D^T (B, M), of its own memory; folded: the halves of D, and more."""
    return split.added(split.product(x, split.Halves(*folded[:4])))


def differences(x: Tensor, folded: tuple, place: str) -> Tensor:
    """g (B, M) = x D^T + c, the differences of pairs; folded: as the kernels of that place want."""
    if place == "hopper":
        return _by_halves(ops.adjacent(x), folded).add_(folded[4].float())
    product = torch.mm(x, folded[0].T) if place == "cuda" else gemm.product(x, folded[0])
    return product.add_(folded[1].float())


def suits_split(x: Tensor, weight: Tensor, bias: Tensor, pool: int, scale: float) -> bool:
    """True where half a product is large enough for the tensor cores of this GPU."""
    least = LEAST_OF_HALVES if precision.chosen_route() == "float32" else LEAST
    return pool == 2 and _reach(least, *weight.shape) and split.suits(x, weight.size(0) // 2)


def _half(
    run: Callable, x: Tensor, parameters: tuple, folded: tuple, options: tuple,
    multiply: Callable, limit: float,
) -> Tensor:  # fmt: skip
    """folded: (shifts, w_sum, b_sum); multiply(x) -> g, the product with the differences."""
    shifts, w_sum, b_sum = folded
    x, y, M = ops.adjacent(x), x.new_empty(x.size(0)), shifts.size(0)
    weight, bias = (p.contiguous() for p in parameters)
    rows, parts = _rows_at_once(M), -(-2 * M // FEATURES)
    for first in range(0, x.size(0), rows):
        part = x[first : first + rows]
        count = part.size(0)
        g = multiply(part)
        flags = part.new_empty(count, dtype=torch.uint8)
        done = part.new_empty(1, dtype=torch.int32)
        partial = part.new_empty((parts, count), dtype=torch.float64)
        run(part, g, shifts, w_sum, b_sum, weight, bias, *options, limit, flags, done, partial,
            y[first : first + rows])  # fmt: skip
    return y


FEATURES = 128  # of a block of the guard's kernel: kGuardFeatures in problem.h
