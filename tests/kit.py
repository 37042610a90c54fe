"""What the tests of the drop-ins share: subjects, twins, weights and inputs, the assertions.

A subject is one problem with options and a mode of its own; a test that is about any drop-in takes
each of them. Nothing here calls the code under test to decide what is right: that is `definitions`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import definitions
import pytest
import torch
from torch import Tensor, nn

import workbook as wb
from workbook import tools

LEAST = 2e-7  # the relative error that is allowed whatever eager's own is
ROUNDING = {torch.float64: 1e-12, torch.float32: LEAST, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DTYPES = list(ROUNDING)
INF, NAN = float("inf"), float("nan")

# in_features, out_features, rows: odd, and beyond where a chain starts to fold at all.
K, N, B = 257, 1025, 5

needs_compiler = pytest.mark.skipif(tools.compiler() is None, reason="no C++ compiler here")
needs_nvcc = pytest.mark.skipif(tools.nvcc() is None, reason="no nvcc here")
needs_inductor = pytest.mark.skipif(
    " " in torch.__path__[0], reason="torch.compile can't build below a path with a space"
)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]


# --- subjects ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """A problem, the options of its constructor (what follows in and out features), a mode.

    linear: the attribute of its Linear. Written: the module and the formula that say what is right.
    """

    name: str
    slug: str
    linear: str
    written: type[nn.Module]
    formula: Callable[[nn.Module, Tensor], Tensor]
    options: tuple = ()
    mode: str = "eval"
    wide: tuple = ()  # options from 1000 features on, where those above would hide most of them

    def __str__(self) -> str:
        return self.name

    @property
    def Model(self) -> type[nn.Module]:
        return wb.problem(self.slug).Model

    @property
    def ModelNew(self) -> type[nn.Module]:
        return wb.problem(self.slug).ModelNew

    @property
    def has_statistics(self) -> bool:
        """A call writes buffers: BatchNorm in training."""
        return self.mode == "train" and self.written is definitions.BatchNormSoftmax

    def new(self, K: int, N: int, *, seed: int = 0, options: tuple | None = None) -> nn.Module:
        """A drop-in in the subject's mode, drawn after `seed`."""
        torch.manual_seed(seed)
        if options is None:
            options = self.wide if N >= 1000 and self.wide else self.options
        model = self.ModelNew(K, N, *options)
        return model.train(self.mode == "train")

    def twins(
        self,
        K: int,
        N: int,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        options: tuple | None = None,
    ) -> tuple[nn.Module, nn.Module]:
        """The reference and the drop-in, with equal parameters that share no memory."""
        new = self.new(K, N, seed=seed, options=options).to(device, dtype)
        return reference_of(new), new

    def layer(self, model: nn.Module) -> nn.Linear:
        return getattr(model, self.linear)

    def with_options(self, *options: object) -> Subject:
        return replace(self, options=options, wide=())


_SUM = ("matmul_sum_max_mean_logsumexp", "linear", definitions.SumChain, definitions.sum_chain)
_AVG = ("matmul_avgpool_gelu_scale_max", "matmul", definitions.AvgPoolGelu)
_BN = ("gemm_batchnorm_scale_softmax", "gemm", definitions.BatchNormSoftmax)
_MAX = ("matmul_maxpool_sum_scale", "matmul", definitions.MaxPoolSum, definitions.max_pool_sum)
_AVG, _BN = (*_AVG, definitions.avg_pool_gelu), (*_BN, definitions.batchnorm_softmax)

SUM = Subject("sum", *_SUM)
AVG = Subject("avgpool", *_AVG, (3, 2.0))
BN = Subject("bn", *_BN)
BN_TRAIN = Subject("bn-train", *_BN, mode="train")
MAX = Subject("maxpool", *_MAX, (2, 0.5))
# Each path that a problem has: of the scale's sign, of the pool's width, of the mode.
SUBJECTS = [
    SUM,
    AVG,
    # Of hundreds of windows one is always near the minimum of GELU: three are wide.
    Subject("avgpool-negative", *_AVG, (4, -1.5), wide=(341, -1.5)),
    BN,
    BN_TRAIN,
    MAX,
    Subject("maxpool-3", *_MAX, (3, -1.5)),
]
PROBLEMS = [SUM, AVG, BN, MAX]
each = pytest.mark.parametrize("subject", SUBJECTS, ids=str)
each_problem = pytest.mark.parametrize("subject", PROBLEMS, ids=str)


# --- models and inputs ------------------------------------------------------------------------


def drawn(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal values from a generator of their own."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


X = drawn((B, K), seed=9)


def reference_of(new: nn.Module) -> nn.Module:
    """The reference with what `new` has now, parameters, options and mode, in memory of its own."""
    reference = copy.deepcopy(new)
    reference.__class__ = subject_of(new).Model
    return reference


def subject_of(model: nn.Module) -> Subject:
    """The problem that a model, reference or drop-in, belongs to."""
    return next(s for s in PROBLEMS if isinstance(model, s.Model))


def truth(model: nn.Module, x: Tensor) -> Tensor:
    """y in float64 from the definition, with what the model has at this moment."""
    with torch.no_grad():
        return subject_of(model).formula(model, x)


def layer_of(model: nn.Module) -> nn.Linear:
    return getattr(model, subject_of(model).linear)


# --- assertions -------------------------------------------------------------------------------


def _as_rows(y: Tensor) -> Tensor:
    return y.reshape(y.size(0), -1) if y.dim() and y.numel() else y.reshape(y.numel(), 1)


def errors(y: Tensor, true: Tensor, slack: Tensor | None = None) -> tuple[float, float]:
    """Relative error of the whole, in the 2-norm, and of the worst row; 0/0 is no error.

    Of a difference, one step of the type's least number does not count, nor `slack` (rows).
    """
    step = torch.finfo(y.dtype).smallest_normal * torch.finfo(y.dtype).eps
    y, true = _as_rows(y.double()), _as_rows(true)
    difference = ((y - true).abs() - step).clamp_min(0)
    unit = true.abs().max().clamp_min(1e-300)  # a square must not underflow
    rows, sizes = (difference / unit).norm(dim=1), (true / unit).norm(dim=1)
    rows = rows if slack is None else (rows - slack / unit).clamp_min(0)
    whole = rows.norm() / sizes.norm() if rows.any() else rows.sum()
    return whole.item(), torch.where(rows == 0, 0.0, rows / sizes).max().item()


def assert_accurate(y: Tensor, eager: Tensor, true: Tensor, slack: Tensor | None = None) -> None:
    """At most twice eager's own error, or what one rounding of the type costs: whole and rows.

    Rows finite in eager are finite; rows that can't be finite are not. A row that only eager has
    not finite (it overflowed on its way) may be finite here if it is right. slack (rows): an error
    that is allowed beside.
    """
    assert y.shape == eager.shape and y.dtype == eager.dtype and y.device == eager.device
    if not y.numel():
        return
    finite = _as_rows(eager).isfinite().all(1)
    ours, possible = _as_rows(y).isfinite().all(1), _as_rows(true.to(y.dtype)).isfinite().all(1)
    assert ours[finite].all(), "a row that eager has finite is not"
    assert not ours[~finite & ~possible].any(), "a row that can't be finite is"
    y, eager, true = _as_rows(y), _as_rows(eager), _as_rows(true)
    least = ROUNDING[y.dtype]
    slack = torch.zeros(y.size(0)).to(true) if slack is None else slack.nan_to_num()
    saved = ours & ~finite
    if saved.any():
        # Below -8 torch's GELU is 0 in float64 too: its 1 + erf has no digits left there.
        allowed = (0.01 + least) * true[saved].abs() + slack[saved].unsqueeze(1) + 1e-13
        away = (y[saved].double() - true[saved]).abs()
        assert (away <= allowed).all(), "finite where eager is not, wrong"
    if not finite.any():
        return
    got, own = errors(y[finite], true[finite], slack[finite]), errors(eager[finite], true[finite])
    for name, g, e in zip(("whole", "worst row"), got, own, strict=True):
        assert g <= max(2 * e, least), f"{name}: error {g:.3g}, eager's own {e:.3g}"


def slack_of(model: nn.Module, x: Tensor) -> Tensor:
    """(rows) the rounding that single rows may show by bad luck, where eager's own had good luck.

    The rule compares with eager's error, which for a few rows near zero is a matter of chance.
    Four roundings of the type that is computed in, of each term; sixteen of float64, in which the
    truth is rounded too. None for the sum chain, which is computed in float64.
    """
    if x.dtype != torch.float64 and isinstance(model, SUM.Model):
        return torch.zeros(x.size(0), dtype=torch.float64, device=x.device)
    with torch.no_grad():
        moves = definitions.sensitivity(model, x, subject_of(model).formula)
    return _roundings(x.dtype) * moves


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the buffers as they are now."""
    return {name: b.detach().clone() for name, b in model.named_buffers()}


def assert_buffers(
    model: nn.Module,
    reference: nn.Module,
    before: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
    true: Mapping[str, tuple[Tensor, Tensor]],
) -> None:
    """The buffers after a call of each; before: model's and reference's; true: `buffers_after`.

    Those that the reference leaves alone keep their bits; where there is no truth (a batch that has
    no variance) they are the reference's.
    """
    theirs, ours = dict(reference.named_buffers()), dict(model.named_buffers())
    assert list(ours) == list(theirs)
    for name, wanted in theirs.items():
        got = ours[name]
        assert got.dtype == wanted.dtype and got.shape == wanted.shape, name
        try:
            if _same(wanted, before[1][name]):
                assert _same(got, before[0][name]), "written where the reference writes nothing"
            elif name in true and wanted.is_floating_point():
                _assert_statistics(got, wanted, *true[name])
            else:
                torch.testing.assert_close(got, wanted, equal_nan=True)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def _assert_statistics(got: Tensor, eager: Tensor, true: Tensor, slack: Tensor) -> None:
    seen = eager.isfinite()
    assert got.isfinite()[seen].all(), "not finite where eager is"
    assert not got.isfinite()[~true.isfinite()].any(), "finite where it can't be"
    given = (t[seen].unsqueeze(0) for t in (got, eager, true))
    assert_accurate(*given, slack[seen].norm().unsqueeze(0))


def buffers_after(model: nn.Module, x: Tensor) -> Mapping[str, tuple[Tensor, Tensor]]:
    """(value in float64, slack of all) of the buffers that one call leaves; {} if it writes none.

    The slack is that of `slack_of`, and a step of the least number for each term.
    """
    bn = getattr(model, "bn", None)
    writes = bn is not None and bn.training and getattr(bn, "running_mean", None) is not None
    if not writes or not isinstance(x, Tensor) or x.dim() != 2 or x.size(0) < 2:
        return {}
    if not x.is_floating_point():
        return {}
    with torch.no_grad():
        true = outcome(lambda: definitions.buffers_after(model, x))[0] or {}
        moves = outcome(lambda: definitions.sensitivity_of_buffers(model, x))[0] or {}
    terms = x.size(1) * torch.finfo(x.dtype).smallest_normal * torch.finfo(x.dtype).eps
    slack = {n: _roundings(x.dtype) * m.nan_to_num() + terms for n, m in moves.items()}
    return {n: (v, slack.get(n, torch.zeros_like(v))) for n, v in true.items()}


def _roundings(dtype: torch.dtype) -> float:
    return 16 * 2.0**-53 if dtype == torch.float64 else 4 * 2.0**-24


def assert_fresh(new: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> None:
    """`new` computes with the weights that `model` has at this moment."""
    reference = reference_of(model)
    true, true_buffers = truth(reference, x), buffers_after(reference, x)
    slack, before = slack_of(reference, x), (buffers_of(model), buffers_of(reference))
    with torch.no_grad():
        assert_accurate(new(x), reference(x), true, slack)
    assert_buffers(model, reference, before, true_buffers)


def outcome(function: Callable[[], Tensor]) -> tuple[Tensor | None, type | None, str]:
    """(value, None, "") or (None, class of the exception, its text)."""
    try:
        return function(), None, ""
    except Exception as error:
        return None, type(error), str(error)


def strides(y: Tensor) -> list[int]:
    """Of the dimensions whose stride means something."""
    return [stride for size, stride in zip(y.shape, y.stride(), strict=True) if size > 1]


def assert_like(
    reference: nn.Module, new: Callable, x: object, *, model: nn.Module | None = None
) -> str:
    """The same value and buffers, or an exception of the same class; its text is returned.

    model: the drop-in itself, where `new` is its compiled form.
    """
    model = new if model is None else model
    with torch.no_grad():  # each call is judged by itself: both start from the same statistics
        for theirs, ours in zip(reference.buffers(), model.buffers(), strict=True):
            theirs.copy_(ours)
    known = isinstance(x, Tensor) and x.dim() == 2 and x.layout is torch.strided
    known = known and x.is_floating_point()
    true, slack, true_buffers = None, None, buffers_after(reference, x)
    if known:
        true = outcome(lambda: truth(reference, x))[0]
        slack = outcome(lambda: slack_of(reference, x))[0]
    before = buffers_of(model), buffers_of(reference)
    wanted, wanted_error, _ = outcome(lambda: reference(x))
    got, error, text = outcome(lambda: new(x))
    assert error is wanted_error, f"{error} instead of {wanted_error}: {text}"
    assert_buffers(model, reference, before, {} if wanted is None else true_buffers)
    if wanted is None:
        return text
    assert got.shape == wanted.shape and got.dtype == wanted.dtype and got.device == wanted.device
    assert got.requires_grad == wanted.requires_grad and strides(got) == strides(wanted)
    if true is not None and true.shape == wanted.shape and wanted.is_floating_point():
        assert_accurate(got.detach(), wanted.detach(), true, slack)
        nan = x.isnan().any(1)
        if nan.any() and got.size(0) == x.size(0):
            assert got[nan].isnan()[wanted[nan].isnan()].all(), "a NaN of its row is lost"
    else:
        torch.testing.assert_close(got, wanted, equal_nan=True)
    return ""


def gradients(model: Callable, x: Tensor, *, weigh: Tensor | None = None, of=None) -> dict:
    """Gradients of x and of every parameter by name; None where none is wanted.

    The outputs are weighed, or a softmax's rows, which sum to 1, would have none. of: the module
    behind a compiled one.
    """
    of = model if of is None else of
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_(x.requires_grad)
    for p in of.parameters():
        p.grad = None
    y = model(x)
    if weigh is None:
        weigh = drawn(tuple(y.shape), 4).to(y)
    (y * weigh).sum().backward()
    return {"x": x.grad, **{name: p.grad for name, p in of.named_parameters()}}


def side_by_side(ours: Mapping, theirs: Mapping) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name, ours, the reference's) of gradients that there are: the same ones, of like shape and
    type."""
    assert list(ours) == list(theirs)
    for name, wanted in theirs.items():
        got = ours[name]
        assert (got is None) == (wanted is None), name
        if wanted is not None:
            assert got.shape == wanted.shape and got.dtype == wanted.dtype, name
            yield name, got, wanted


def assert_gradients_close(ours: Mapping, theirs: Mapping, tolerance: float = 1e-5) -> None:
    """Each within `tolerance` of the reference's, in the 2-norm; not finite in the same places."""
    for name, got, wanted in side_by_side(ours, theirs):
        finite = wanted.isfinite()
        assert torch.equal(got.isfinite(), finite), f"{name}: finite in other places"
        got, wanted = got[finite].double(), wanted[finite].double()
        error = (got - wanted).norm()
        assert error <= tolerance * wanted.norm() + 1e-30, f"{name}: {error:.3g} away"


def assert_opens_well(file: Path, formula: str, most: int) -> None:
    """A kernel's file is short and says what it computes, who owns what, and what it moves."""
    lines = file.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= most
    assert lines[0].startswith("// ") and all(len(line) <= 120 for line in lines)
    text = "\n".join(lines)
    assert "torch" not in re.sub("//.*", "", text), "the binding alone knows torch"
    if not file.stem.startswith("wrong"):
        for wanted in (formula, "Who owns what:", "Moves:"):
            assert re.search(wanted, text), wanted


def assert_argument_is_named(
    run: Callable, given: dict, name: str, change: Callable, named: str
) -> None:
    """An op that takes `given` refuses one changed argument, and says which, and what it wants."""
    run(*given.values())
    with pytest.raises(RuntimeError, match=rf"^{named}: (got .*; )?wants "):
        run(*{**given, name: change(given[name])}.values())
