"""Linear -> average pool over features -> GELU -> scale -> max: a product `pool` times smaller.

    u[i,m] = 1/pool sum_j z[i, m pool + j] = sum_k x[i,k] w[m,k] + b[m],   m < M = N // pool
    y[i] = max_m scale gelu(u[i,m])

The average is linear, so it goes through the matrix product: 2 B K N operations become 2 B K M.
GELU falls, then rises: of all u[i,:] two decide about the maximum, which two depends on the sign
of the scale. The features from M pool on are dropped, as the pool does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbook import gemm, normal, ops, precision, split, sums, variants
from workbook.chains import matmul_avgpool_gelu_scale_max_back as back
from workbook.chains import matmul_avgpool_gelu_scale_max_road as road
from workbook.spec import Problem, Product, Size

__all__ = ["Model", "ModelNew", "fold", "plain", "problem"]

SLUG = "matmul_avgpool_gelu_scale_max"


class Model(nn.Module):
    """x (B, in_features) -> (B,): a Linear, its averages, their GELU, scaled, the largest."""

    def __init__(
        self, in_features: int, out_features: int, pool_kernel_size: int, scale_factor: float
    ) -> None:
        super().__init__()
        self.matmul = nn.Linear(in_features, out_features)
        self.avg_pool = nn.AvgPool1d(kernel_size=pool_kernel_size)
        self.scale_factor = scale_factor

    def forward(self, x: Tensor) -> Tensor:
        x = self.matmul(x)
        x = self.avg_pool(x.unsqueeze(1)).squeeze(1)
        x = F.gelu(x)
        x = x * self.scale_factor
        return torch.max(x, dim=1).values


class ModelNew(Model):
    """The drop-in: constructor, submodules, state_dict and random draws of Model; less product.

    The weights are folded when first used and again after they change. After an edit in place
    through `.data`, which torch hides, call `workbook.refresh(model)`.
    """

    def forward(self, x: Tensor) -> Tensor:
        linear = self._modules["matmul"]
        operands, options = normal.operands(x, linear), _options(self)
        if operands is not None and options is not None and options[0] <= operands[2].size(0):
            return OP(*operands, *options)
        normal.explain(x, linear)
        return super().forward(x)


def _options(model: nn.Module) -> tuple[int, float] | None:
    """(pool, scale) as they are now; None where the reference's forward has to run."""
    pool, scale = model._modules["avg_pool"], model.scale_factor
    if not normal.is_plain(pool, nn.AvgPool1d) or pool.padding not in (0, (0,)) or pool.ceil_mode:
        return None
    size = pool.kernel_size[0] if type(pool.kernel_size) is tuple else pool.kernel_size
    number = type(scale) is float or (type(scale) is int and abs(scale) <= 2**53)
    if not number or type(size) is not int or size < 1 or pool.stride not in (size, (size,)):
        return None
    return size, float(scale)


def fold(dtype: torch.dtype, weight: Tensor, bias: Tensor, pool: int) -> tuple[Tensor, ...]:
    """w (M, K), b (M,) in dtype, w_exact, b_exact in float64: means of `pool` neighbouring rows.

    The last two are for the kernels, and empty where w and b say it all: in another type than
    float32, and for a pool of 1, whose w is the weight itself. Raises RuntimeError, as the pool
    does, where there is no group.
    """
    groups = bias.size(0) // pool if pool > 0 else 0
    if not groups:
        raise RuntimeError(f"pool: got {pool}, wants 1 to out_features = {bias.size(0)}")
    if pool == 1 or torch.is_grad_enabled():  # to ask takes less than to switch it off
        weight, bias = weight.detach(), bias.detach()
    if pool == 1:  # views: who keeps the fold does not keep the parameters
        nothing = bias.new_empty(0, dtype=torch.float64)
        w, b = (t.to(dtype).contiguous() for t in (weight, bias))
        return w, b, nothing, nothing
    return sums.mean_fold(weight, bias, pool, dtype)


def plain(
    x: Tensor, w: Tensor, b: Tensor, w_exact: Tensor, b_exact: Tensor, pool: int, scale: float
) -> Tensor:
    """x (B, K) -> (B,), the folded chain in torch. erfc keeps the digits that 1 + erf loses below
    zero: a half type can still hold such a y."""
    u = torch.addmm(b, x, w.T)
    return (0.5 * scale * u * torch.erfc(-math.sqrt(0.5) * u)).amax(1)


def _algebra(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """The variant `algebra`: in the type of x, and with torch's GELU."""

    def run(x: Tensor) -> Tensor:
        given = _arguments(model)
        w, b, *_ = OP.folded(x.dtype, *given)
        return (F.gelu(torch.addmm(b, x, w.T)) * given[-1]).amax(1)

    return run


def reference(x: Tensor, weight: Tensor, bias: Tensor, pool: int, scale: float) -> Tensor:
    """The original chain as a function of its parameters, differentiable.

    No module is shared behind it: two threads may run it at once.
    """
    parts = SimpleNamespace(
        matmul=lambda x: F.linear(x, weight, bias),
        avg_pool=lambda z: F.avg_pool1d(z, pool),
        scale_factor=scale,
    )
    return Model.forward(parts, x)


def _output(x: Tensor, *arguments: object) -> Tensor:
    return x.new_empty(x.size(0))


def _run_chain(run: Callable, x: Tensor, parameters: tuple, _: tuple, options: tuple) -> Tensor:
    y = _output(x)
    run(ops.adjacent(x), *(p.contiguous() for p in parameters), *options, y)
    return y


def _run_folded(run: Callable, x: Tensor, _: tuple, folded: tuple, options: tuple) -> Tensor:
    y = _output(x)
    run(ops.adjacent(x), *folded[:2], options[1], y)
    return y


def _run_product(run: Callable, x: Tensor, _: tuple, folded: tuple, options: tuple) -> Tensor:
    y = _output(x)
    run(gemm.product(x, *folded[:2]), options[1], y)
    return y


ELEMENTS = 1 << 26  # of u at a time on a GPU


def _parts_of(x: Tensor, folded: tuple, pool: int) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of rows, and the parts of their products: one by TF32, which rounds the factors by
    more than a long sum adds."""
    if precision.chosen_route() == "tf32":
        rows, count = max(1, ELEMENTS // folded[0].size(0)), 1
    else:
        rows, count = gemm.cut(*x.shape, folded[0].size(0), averaged=pool)
    for first in range(0, x.size(0), rows):
        block = slice(first, first + rows)
        yield block, gemm.parts(x[block], folded[0], count)


def _run_parts(run: Callable, x: Tensor, _: tuple, folded: tuple, options: tuple) -> Tensor:
    y = _output(x)
    for block, u_parts in _parts_of(ops.adjacent(x), folded, options[0]):
        run(u_parts, folded[1], options[1], y[block])
    return y


def _run_winner(run: Callable, x: Tensor, _: tuple, folded: tuple, options: tuple) -> Tensor:
    x, y, given = ops.adjacent(x), _output(x), _for_winner(*folded)
    for block, u_parts in _parts_of(x, folded, options[0]):
        run(u_parts, x[block], *given, options[1], y[block])
    return y


def _for_winner(w: Tensor, b: Tensor, w_exact: Tensor, b_exact: Tensor) -> tuple[Tensor, ...]:
    """What the winner's value is computed from. Where the user has chosen TF32 w will do, half the
    bytes."""
    if precision.chosen_route() == "tf32":
        w_exact = b_exact = b_exact[:0]
    return w, b, w_exact, b_exact


@torch.no_grad()
def fold_halves(dtype: torch.dtype, weight: Tensor, bias: Tensor, pool: int) -> tuple[Tensor, ...]:
    """`fold`, and behind it the halves of w, four tensors; float32 weights."""
    if pool == 1:
        folded = fold(dtype, weight, bias, pool)
        return *folded, *split.halved(folded[0])
    halves, w, w_exact = split.halved_means(weight, pool)
    b, b_exact = (t.flatten() for t in sums.group_mean(bias.unsqueeze(1), pool, dtype))
    return w, b, w_exact, b_exact, *halves


def _run_split(run: Callable, x: Tensor, _: tuple, folded: tuple, options: tuple) -> Tensor:
    """A group whose weights are infinite need not win: it is taken as it is."""
    x, y = ops.adjacent(x), _output(x)
    u_parts = split.product(x, split.Halves(*folded[4:]), whole=folded[0])
    run(u_parts, x, *_for_winner(*folded[:4]), options[1], y)
    return y


def _suits_split(x: Tensor, weight: Tensor, bias: Tensor, pool: int, scale: float) -> bool:
    return split.suits(x, weight.size(0) // pool, whole=True)


ROWS, FEATURES = 1024, 512  # of a block on a CPU: 2 MB of u, which stay in the cache
FEW = 12  # features that the kernel multiplies by itself: libraries are slow at so narrow a product


def _run_blocks(run: Callable, x: Tensor, _: tuple, folded: tuple, options: tuple) -> Tensor:
    """The product by blocks of rows and features; each block's tail while it is in the cache."""
    (w, b, *_), x, y, scale = folded, ops.adjacent(x), _output(x), options[1]
    count = w.size(0)
    if count <= FEW or (count <= FEATURES and x.size(0) <= ROWS):  # one block, nothing to keep
        u = gemm.product(x, w, b) if count > FEW else None
        run(u, x, *folded, 0, scale, None, None, y)
        return y
    for first in range(0, x.size(0), ROWS):
        rows = x[first : first + ROWS]
        ends = rows.new_empty((rows.size(0), 2))
        at = rows.new_empty((rows.size(0), 2), dtype=torch.int64)
        for m in range(0, count, FEATURES):
            u = gemm.product(rows, w[m : m + FEATURES], b[m : m + FEATURES])
            run(u, rows, *folded, m, scale, ends, at, y[first : first + ROWS])
    return y


SMALL = 1 << 22  # multiplications of u that are done in float64 on a CPU


def _pooled(x: Tensor, *arguments: object) -> tuple[Tensor, Tensor]:
    """(u (B, M) in float64, w (M, K) in the type of x), u as accurate as eager's own averages."""
    place = OP.place(x, *arguments) if x.dtype is torch.float32 else ""
    form = OP.forms["split"] if place == "hopper" else None
    w, b, w_exact, b_exact, *halves = OP.folded(x.dtype, *arguments, form=form)
    b, x = (b_exact if b_exact.numel() else b), ops.adjacent(x)
    if place == "hopper":  # three products by TF32, too: who wins is worth them
        u = split.product(x, split.Halves(*halves), whole=w, products=3).sum(0, dtype=torch.float64)
    elif place == "cuda":
        folded, pool = (w, b, w_exact, b_exact), arguments[2]
        u = x.new_empty((x.size(0), w.size(0)), dtype=torch.float64)
        for block, parts in _parts_of(x, folded, pool):
            torch.sum(parts, 0, dtype=torch.float64, out=u[block])
    elif place and x.size(0) * w.numel() > SMALL:
        u = gemm.short_chains(x)(w)
    elif place:
        u = back.equal(torch.mm(x.double(), (w_exact if w_exact.numel() else w.double()).T))
    else:
        u = torch.mm(x, w.T)
    return u.double() + b, w


def _vjp(
    grad: Tensor, _: object, needed: Sequence[bool], x: Tensor, weight: Tensor, bias: Tensor,
    pool: int, scale: float,
) -> tuple[Tensor | None, ...] | None:  # fmt: skip
    if ops.is_watched() or x.dtype not in (torch.float32, torch.float64):
        return None  # a tracer can not look the fold up
    u, w = _pooled(x, weight, bias, pool, scale)
    return back.vjp(grad, needed, (x, weight, bias), u, w, pool, scale)


def _arguments(model: nn.Module) -> tuple:
    return model.matmul.weight, model.matmul.bias, *_options(model)


OP = ops.FusedOp(
    SLUG,
    "(Tensor x, Tensor weight, Tensor bias, int pool, float scale) -> Tensor",
    fold=fold,
    plain=plain,
    reference=reference,
    output=_output,
    arguments=_arguments,
    forms={
        "chain": ops.Form(_run_chain, ("-DWB_CHAIN",), reads="before"),
        "folded": ops.Form(_run_folded, ("-DWB_FOLDED",)),
        "product": ops.Form(_run_product, ("-DWB_PRODUCT",)),
        "parts": ops.Form(_run_parts, ("-DWB_PARTS",)),
        "winner": ops.Form(_run_winner, ("-DWB_WINNER",)),
        "split": ops.Form(_run_split, ("-DWB_WINNER",), fold=fold_halves, suits=_suits_split),
        "blocks": ops.Form(_run_blocks),
    },
    kernels={
        "cpu": ops.Kernel("blocks", ("cpu.cpp",), (*sums.MEAN_FOLD, *sums.GROUP_MEAN)),
        "cuda": ops.Kernel("winner", ("05_winner_in_double.cu",), sums.GROUP_MEAN),
        "hopper": ops.Kernel(
            "split", ("05_winner_in_double.cu",), (*split.SHARED, *sums.GROUP_MEAN)
        ),
    },
    fold_options=1,  # the pool: a scale may change at each call
    # In float32 one sum may carry more rounding than eager's mean of them.
    computes={**ops.COMPUTES, torch.float32: torch.float64},
    vjp=_vjp,
)


def _drop_in(model: nn.Module) -> nn.Module:
    return problem.drop_in(model)


problem = Problem(
    slug=SLUG,
    title="Linear → avgpool → GELU → scale → max",
    question="What is left of a matrix product whose outputs are averaged, and of a GELU whose "
    "largest value is wanted?",
    Model=Model,
    ModelNew=ModelNew,
    sizes={
        "laptop": Size("laptop", (2048, 2048, 16, 2.0), 256),
        "small": Size("small", (8192, 8192, 16, 2.0), 16),
        "paper": Size("paper", (8192, 8192, 16, 2.0), 1024),
        "wide": Size("wide", (8192, 32768, 16, 2.0), 256),
    },
    steps=road.steps(reference),
    work=road.WORK,
    variants=(
        *variants.standard(OP, _drop_in, algebra=_algebra),
        *road.ladder(OP),
        *road.wrong(OP),
    ),
    omissions=road.OMISSIONS,
    arguments=_arguments,
    fold=lambda model: fold(torch.float32, *_arguments(model)[:3]),
    yardsticks={
        "torch.addmm(b, x, w)": lambda x, w, b, *_: torch.addmm(b, x, w.T),
        "the product alone": lambda x, w, b, *_: gemm.product(x, w, b),
    },
    bare=lambda model, x: variants.bare(OP, model, x),
    multiplied=lambda mode, route, shape: Product(shape["N"] // shape["pool"], whole=True),
    fold_halves=lambda model: fold_halves(torch.float32, *_arguments(model)[:3]),
    rung_of_text=lambda *source: variants.rung_of_text(OP, *source),
    dims=("pool",),
    edges=road.EDGES,
    states=road.STATES,
)
