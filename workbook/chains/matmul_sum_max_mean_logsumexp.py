"""Linear -> sum -> max -> mean -> logsumexp -> logsumexp: one dot product a sample.

    y[i] = sum_n (sum_k x[i,k] W[n,k] + b[n]) = sum_k x[i,k] w_sum[k] + b_sum

The sum over features is linear, so it goes through the matrix product: 2 B K N operations become
2 B K. Max, mean and logsumexp over one element are the identity, also for infinities and NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from workbook import controls, normal, ops, paths, sums, variants
from workbook.chains import matmul_sum_max_mean_logsumexp_run as run
from workbook.chains.matmul_sum_max_mean_logsumexp_run import fold
from workbook.limits import Work, gemm_work
from workbook.spec import Problem, Size, Step, Variant

__all__ = ["Model", "ModelNew", "fold", "plain", "problem"]

SLUG = "matmul_sum_max_mean_logsumexp"


class Model(nn.Module):
    """x (B, in_features) -> (B, 1): a Linear, its sum over features, and four reductions of one."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        x = torch.sum(x, dim=1, keepdim=True)
        x = torch.max(x, dim=1, keepdim=True)[0]
        x = torch.mean(x, dim=1, keepdim=True)
        x = torch.logsumexp(x, dim=1, keepdim=True)
        x = torch.logsumexp(x, dim=1, keepdim=True)
        return x


class ModelNew(Model):
    """The drop-in: constructor, submodules, state_dict and random draws of Model; one dot product.

    The weights are folded when first used and again after they change. After an edit in place
    through `.data`, which torch hides, call `workbook.refresh(model)`.
    """

    def forward(self, x: Tensor) -> Tensor:
        operands = normal.operands(x, self._modules["linear"])
        if operands is not None:
            return OP(*operands)
        normal.explain(x, self.linear)
        return super().forward(x)


def plain(x: Tensor, w_sum: Tensor, b_sum: Tensor, *_: Tensor) -> Tensor:
    """x (B, K) -> (B, 1), the folded chain in torch: one matrix-vector product."""
    return torch.addmv(b_sum.expand(x.size(0)), x, w_sum).unsqueeze(1)


def reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The original chain as a function of its parameters, differentiable.

    No module is shared behind it: two threads may run it at once.
    """
    return Model.forward(SimpleNamespace(linear=lambda x: _rows(x, weight, bias)), x)


def _vjp(
    grad: Tensor, kept: Sequence[Tensor], needed: Sequence[bool],
    x: Tensor, weight: Tensor, bias: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    (y,), w_sum = kept, None
    if needed[0] and ops.is_watched():  # a tracer can not look the fold up
        w_sum = weight.sum(0, dtype=torch.float64)
    elif needed[0]:
        w_sum = OP.folded(OP.dtype, weight, bias)[0]
    return run.vjp(grad, y, needed, x, weight, bias, w_sum)


def _output(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty((x.size(0), 1))


def _arguments(model: nn.Module) -> tuple[Tensor, Tensor]:
    return model.linear.weight, model.linear.bias


OP = ops.FusedOp(
    SLUG,
    "(Tensor x, Tensor weight, Tensor bias) -> Tensor",
    fold=fold,
    plain=plain,
    reference=reference,
    output=_output,
    arguments=_arguments,
    forms={
        "chain": ops.Form(run.run_chain, ("-DWB_CHAIN",), reads="before"),
        "folded": ops.Form(run.run_folded),
        "short chains": ops.Form(run.run_short),
    },
    kernels={
        "cpu": ops.Kernel(
            "short chains",
            ("cpu.cpp",),
            ("sum_fold/sum_fold.cpp", "rounded_dot/rounded_dot.cpp", *sums.COLUMN_SUM),
        ),
        "cuda": ops.Kernel("folded", ("05_whole_row_in_flight.cu",), sums.COLUMN_SUM),
    },
    dtype=torch.float64,  # K numbers can afford it
    computes={**ops.COMPUTES, torch.float32: torch.float64},
    vjp=_vjp,
    reads_y=True,
)


def _rows(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias)


STEPS = (
    Step(
        "The chain",
        r"y_i = \operatorname{lse}\big(\operatorname{lse}\big(\operatorname{mean}\big(\max\big("
        r"\sum_{n} z_{in}\big)\big)\big)\big), \quad z_{in} = \sum_{k} x_{ik} W_{nk} + b_n",
        "the definition; each reduction after the sum runs over one element",
        lambda x, weight, bias: reference(x, weight, bias),
    ),
    Step(
        "Reductions over one element",
        r"\max(s) = s, \quad \operatorname{mean}(s) = s/1 = s, \quad"
        r" \operatorname{lse}(s) = s + \log e^{s-s} = s",
        "a set of one has itself as maximum and mean; the logsumexp subtracts its maximum first",
        lambda x, weight, bias: _rows(x, weight, bias).sum(1, keepdim=True),
    ),
    Step(
        "Distribute the sum",
        r"y_i = \sum_n \sum_k x_{ik} W_{nk} + \sum_n b_n",
        "a sum of sums, in any order",
        lambda x, weight, bias: (x.unsqueeze(1) * weight).sum((1, 2)).unsqueeze(1) + bias.sum(),
    ),
    Step(
        "Exchange the sums",
        r"y_i = \sum_k x_{ik} \underbrace{\sum_n W_{nk}}_{w_k} + \underbrace{\sum_n b_n}_{\beta}",
        "x does not depend on n: the inner sum belongs to the weights alone, once",
        lambda x, weight, bias: plain(x, weight.sum(0), bias.sum()),
    ),
    Step(
        "Tempting and wrong: normalise the sum to a mean",
        r"y_i \stackrel{?}{=} \operatorname{mean}_n z_{in}",
        "the mean in the chain runs over one element, not over the N features: off by the factor N",
        lambda x, weight, bias: _rows(x, weight, bias).mean(1, keepdim=True),
        holds=False,
    ),
    Step(
        "Tempting and wrong: logsumexp over the features",
        r"y_i \stackrel{?}{=} \log \sum_n e^{z_{in}}",
        "the order matters: the features are gone before the first logsumexp sees anything",
        lambda x, weight, bias: _rows(x, weight, bias).logsumexp(1, keepdim=True),
        holds=False,
    ),
)


def _before(B: int, K: int, N: int) -> Work:
    """The Linear with its output written, then read by the sum."""
    return gemm_work(B, K, N) + Work(float(B * N), 4.0 * B * N, 4.0 * B)


def _after(B: int, K: int, N: int) -> Work:
    """x once, the folded weights once, in double; y."""
    return Work(2.0 * B * K, 4.0 * B * K + 8.0 * K, 4.0 * B)


def _fold(B: int, K: int, N: int) -> Work:
    """The chain after the algebra, and all weights read once."""
    return _after(B, K, N) + Work(float(K * N), 4.0 * K * N + 4.0 * N, 8.0 * K)


def _drop_in(model: nn.Module) -> nn.Module:
    return problem.drop_in(model)


def _literal_log_exp(model: nn.Module) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        y = OP.run_plain(x, *_arguments(model), dtype=torch.float64)
        return torch.log(torch.exp(torch.log(torch.exp(y))))

    return run


def _controls() -> tuple[Variant, ...]:
    folder = paths.kernels() / SLUG
    return (
        Variant(
            "wrong_literal_log_exp",
            "torch",
            "logsumexp typed as log(exp(x))",
            _literal_log_exp,
            wrong="exp overflows float32 above 88: a large row becomes inf",
        ),
        controls.fold_in_init(OP),
        variants.rung(
            OP,
            folder / "wrong_one_block.cu",
            "launched as <<<1, batch>>>",
            wrong="a block has at most 1024 threads: a batch above 1024 is not launched",
        ),
        variants.rung(
            OP,
            folder / "wrong_log_exp.cu",
            "log(exp(x)) in the kernel",
            wrong="expf overflows above 88: a large row becomes inf",
        ),
    )


CYCLES_OF_AN_ADD = 4  # latency of one floating-point addition on today's CPUs
CPU_HZ = 3.0e9
DRAM_LATENCY_MS = 0.8e-3  # of a load that misses every cache of an H100, unloaded
SM_HZ, SMS = 1.7e9, 132  # H100 SXM under load


def _chain_of_adds(adds_per_row: Callable[[int, int], int]) -> Callable:
    def predict(shape: dict, ceilings: object) -> float:
        adds = shape["B"] * adds_per_row(shape["K"], shape["N"])
        return adds * CYCLES_OF_AN_ADD / (torch.get_num_threads() * CPU_HZ) * 1e3

    return predict


def _times_floor(factor: float) -> Callable:
    def predict(shape: dict, ceilings: object) -> float:
        return _after(**shape).bytes / ceilings.read_gbs / 1e6 * factor + ceilings.launch_ms

    return predict


def _ladder() -> tuple[Variant, ...]:
    folder = paths.kernels() / SLUG
    return (
        variants.rung(
            OP,
            folder / "cpu_01_row_at_a_time.cpp",
            "the chain as written: all N outputs of a row, then their sum",
            form="chain",
            sample=16,
            predict=_chain_of_adds(lambda K, N: K * N),
        ),
        variants.rung(
            OP,
            folder / "cpu_02_folded_one_chain.cpp",
            "the row-sum folded: one dot product a row, one chain of additions",
            form="folded",
            predict=_chain_of_adds(lambda K, N: K),
        ),
        variants.rung(
            OP,
            folder / "cpu.cpp",
            "several rows at a time, vectors of partial sums, memory asked ahead",
            form="folded",
            predict=_times_floor(1.1),
        ),
        variants.rung(
            OP,
            folder / "01_row_in_shared.cu",
            "the chain as written: the whole output row in shared memory, block per sample",
            form="chain",
            # a load of a warp touches 32 cache lines, one a cycle
            predict=lambda s, c: s["B"] * s["K"] * s["N"] / (SMS * SM_HZ) * 1e3,
        ),
        variants.rung(
            OP,
            folder / "02_fold_thread_per_sample.cu",
            "the row-sum folded, one thread per sample",
            # nothing in flight: one trip to memory for each sector of 8 floats
            predict=lambda s, c: s["K"] / 8 * DRAM_LATENCY_MS,
        ),
        variants.rung(
            OP,
            folder / "03_block_shared_tree.cu",
            "block per sample, a tree in shared memory",
            predict=_times_floor(1.5),
        ),
        variants.rung(
            OP,
            folder / "04_vector_warp_shuffle.cu",
            "16-byte loads, warp shuffles, four rows in flight",
            predict=_times_floor(1.2),
        ),
        variants.rung(
            OP,
            folder / "05_whole_row_in_flight.cu",
            "one wave of blocks, as many loads in flight as registers hold",
            predict=_times_floor(1.0),
        ),
    )


def _double_rows(model: nn.Module, x: Tensor) -> Tensor:
    return _rows(x, model.linear.weight, model.linear.bias)


problem = Problem(
    slug=SLUG,
    title="Linear → sum → max → mean → logsumexp → logsumexp",
    question="How much of a matrix product is left when only the sum of its rows is wanted?",
    Model=Model,
    ModelNew=ModelNew,
    sizes={
        "laptop": Size("laptop", (2048, 2048), 256),
        "small": Size("small", (8192, 8192), 16),
        "paper": Size("paper", (8192, 8192), 1024),
        "wide": Size("wide", (32768, 4096), 1024),
    },
    steps=STEPS,
    work={"before": _before, "after": _after, "fold": _fold},
    variants=(*variants.standard(OP, _drop_in), *_ladder(), *_controls()),
    omissions={
        "bias left out": lambda m, x: (x @ m.linear.weight.T).sum(1, keepdim=True),
        "sum left out (first feature)": lambda m, x: _double_rows(m, x)[:, :1],
        "mean instead of sum": lambda m, x: _double_rows(m, x).mean(1, keepdim=True),
        "first 10% of K left out": lambda m, x: _rows(
            x[:, x.size(1) // 10 :], m.linear.weight[:, x.size(1) // 10 :], m.linear.bias
        ).sum(1, keepdim=True),
        "last feature left out": lambda m, x: _double_rows(m, x)[:, :-1].sum(1, keepdim=True),
    },
    arguments=_arguments,
    fold=lambda model: fold(torch.float64, *_arguments(model))[:2],
    yardsticks={
        "torch.sum(x)": lambda x, w_sum, b_sum: x.sum(),
        "torch.mv(x, w)": lambda x, w_sum, b_sum: torch.mv(x, w_sum),
    },
    bare=lambda model, x: variants.bare(OP, model, x),
    rung_of_text=lambda text, device, form="": variants.rung_of_text(
        OP, text, device, form or "folded"
    ),
)
