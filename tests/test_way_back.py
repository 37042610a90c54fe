"""The ways back that do not run the reference again: that they are taken, where they give way, and
wrong ones, which the rule has to see."""

from __future__ import annotations

import pytest
import torch
from cases import put
from kit import (
    AVG,
    BN,
    BN_TRAIN,
    INF,
    MAX,
    NAN,
    SUM,
    K,
    N,
    X,
    drawn,
    each_problem,
    gradients,
    layer_of,
)
from torch import nn
from way_back import assert_gradients_accurate, gradients_in_double, terms_of

from workbook import ops
from workbook.chains import gemm_batchnorm_scale_softmax_run as bn_run
from workbook.chains import gemm_batchnorm_scale_softmax_run_eval_back as bn_back
from workbook.chains import matmul_avgpool_gelu_scale_max as avg
from workbook.chains import matmul_avgpool_gelu_scale_max_back as avg_back
from workbook.chains import matmul_maxpool_sum_scale_back as max_back

PAIRS = (257, 2049)  # in and out features from which pairs are folded, one feature left over
STATES = ("drawn", "trained", "shifted", "odd ones lose", "ties", "cancelling", "zero",
          "huge bias", "rows of every size")  # fmt: skip
GIVES_WAY = ("a masked feature", "every other feature masked", "an infinite weight",
             "NaN in the last feature")  # fmt: skip


@pytest.fixture
def recomputed(monkeypatch) -> list[str]:
    """Problems whose reference is run for a way back, while this is used."""
    found, usual = [], ops.FusedOp._vjp_of_reference

    def noted(self, *given):
        found.append(self.slug)
        return usual(self, *given)

    monkeypatch.setattr(ops.FusedOp, "_vjp_of_reference", noted)
    return found


def assert_accurate(reference: nn.Module, new: nn.Module, x: torch.Tensor) -> None:
    x = x.clone().requires_grad_()
    true = gradients_in_double(reference, x)
    terms = terms_of(reference, x)
    assert_gradients_accurate(gradients(new, x), gradients(reference, x), true, terms)


@pytest.mark.parametrize("subject", [SUM, AVG, BN, BN_TRAIN, MAX], ids=str)
def test_the_reference_is_not_run_again(subject, recomputed):
    new = subject.new(*PAIRS, options=subject.options)
    gradients(new, drawn((5, PAIRS[0])).requires_grad_())
    assert not recomputed
    y = new(drawn((5, PAIRS[0])).requires_grad_())
    torch.autograd.grad(y.sum(), list(new.parameters()), create_graph=True)
    assert recomputed == [subject.slug], "the control: of gradients that have gradients"


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("scale", [0.5, -1.5])
def test_pairs(state, scale, recomputed):
    reference, new = MAX.twins(*PAIRS, options=(2, scale))
    put(state, reference, new)
    assert_accurate(reference, new, drawn((5, PAIRS[0]), 1))
    assert not recomputed


@pytest.mark.parametrize("state", GIVES_WAY)
def test_pairs_with_weights_that_are_not_finite(state, recomputed):
    """The one feature left over is in no pair: its NaN reaches gradients as 0 times NaN."""
    reference, new = MAX.twins(*PAIRS)
    put(state, reference, new)
    assert_accurate(reference, new, drawn((5, PAIRS[0]), 1))
    assert bool(recomputed) == (state != "NaN in the last feature")


@pytest.mark.parametrize("value", [NAN, INF, -INF, 3e38])
def test_pairs_of_a_row_that_is_not_finite(value):
    reference, new = MAX.twins(*PAIRS)
    x = drawn((5, PAIRS[0]), 1)
    x[2, 3] = value
    assert_accurate(reference, new, x)


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_pairs_of_few_rows(rows):
    reference, new = MAX.twins(*PAIRS)
    assert_accurate(reference, new, drawn((rows, PAIRS[0]), 1))


def near_ties(*models: nn.Module) -> None:
    """For the first row of X, 30 pairs whose difference is what a bias loses when it is rounded."""
    for model in models:
        weight, bias = model.matmul.weight.data, model.matmul.bias.data
        weight[1:60:2] = weight[0:60:2].roll(1, 1)  # the same numbers elsewhere
        exact = (X.double() @ (weight[0:60:2] - weight[1:60:2]).double().T)[0]
        bias[0:60:2] = 0
        bias[1:60:2] = exact.float()


def test_who_wins_by_little_is_found_in_float64():
    """Of a row and pairs that tie but for the rounding of the bias, each one's winner is exact."""
    reference, new = MAX.twins(*PAIRS)
    near_ties(reference, new)
    x, seen = X[:1].clone(), []
    exact = x.double() @ (new.matmul.weight[0:60:2].double() - new.matmul.weight[1:60:2]).T
    exact += new.matmul.bias[0:60:2].double() - new.matmul.bias[1:60:2]
    for found in (gradients(new, x.requires_grad_()), gradients(reference, x)):
        seen.append(found["matmul.bias"][0:60:2] != 0)
    assert torch.equal(seen[0], exact[0] >= 0)
    assert not torch.equal(seen[1], exact[0] >= 0), "the control: float32 cannot tell"


def test_a_large_mean_costs_the_way_back_no_digits(monkeypatch):
    reference, new = BN_TRAIN.twins(K, N)
    x = (drawn((64, K), 1) + 1000).requires_grad_()
    true, theirs = gradients_in_double(reference, x), gradients(reference, x)

    def worst() -> float:
        """Of our errors over the reference's."""
        ours = gradients(new, x)
        away = [[(g[n] - t).norm() for g in (ours, theirs)] for n, t in true.items()
                if n != "gemm.bias"]  # fmt: skip
        return max((a / b).item() for a, b in away)

    assert worst() < 0.1
    for name in ("_whole_batch", "_batch_halves"):  # these kernels have a centre of their own
        monkeypatch.setattr(bn_run, name, lambda: None)
    monkeypatch.setattr(bn_back, "centre", lambda x: x.new_zeros(x.size(1)))
    assert worst() > 0.1, "the control: x as it is"


@pytest.mark.parametrize("subject", [BN, BN_TRAIN], ids=str)
@pytest.mark.parametrize("state", ["drawn", "trained", "shifted"])
def test_a_product_that_was_not_kept_is_made_again(subject, state, monkeypatch):
    """As where the way there was torch's own."""
    reference, new = subject.twins(K, N)
    put(state, reference, new)
    usual, runs = ops.FusedOp.run_kernel, []

    def run(*given, kept):
        runs.append(len(kept) if kept is not None else -1)
        return usual(*given)

    monkeypatch.setattr(ops.FusedOp, "run_kernel", run)
    assert_accurate(reference, new, X)
    assert 0 in runs, "a way there, with a way back, that keeps nothing"


@pytest.mark.parametrize("subject", [AVG, MAX], ids=str)
def test_an_output_may_be_edited_before_the_way_back(subject):
    """As in the reference: nothing of it is read."""
    for model in subject.twins(*PAIRS):
        y = model(drawn((5, PAIRS[0])).requires_grad_())
        y.mul_(2)
        y.sum().backward()


@each_problem
@pytest.mark.parametrize("which", ["x", "weight"])
def test_memory_of_gradients_is_laid_out_as_the_references(subject, which):
    found = []
    for model in subject.twins(*PAIRS, options=subject.options):
        x, layer = drawn((PAIRS[0], 5), 1), layer_of(model)
        x = (x.T if which == "x" else x.T.contiguous()).requires_grad_()
        if which == "weight":
            layer.weight = nn.Parameter(layer.weight.detach().T.contiguous().T)
        y = model(x)
        grads = torch.autograd.grad((y * drawn(tuple(y.shape), 4)).sum(), [x, *model.parameters()])
        found.append([g.stride() for g in grads])
    if subject is not SUM:
        assert found[0] == found[1]


# --- wrong ones ---------------------------------------------------------------------------------


def _second_of_two(g, *_):
    return g > 0


def _undivided(means, like, pool):
    return USUAL(means * pool, like, pool)


def _left_over_too(means, like, pool):
    found = USUAL(means, like, pool)
    found[means.size(0) * pool :] = means[-1]
    return found


def _whole(x, c, out):
    return torch.sub(x, c, out=out)


USUAL = avg_back._ungrouped
WRONG = {
    "the second of two that tie": (MAX, max_back, "_first_wins", _second_of_two, "ties"),
    "not divided by the pool": (AVG, avg_back, "_ungrouped", _undivided, "drawn"),
    "a feature left over": (AVG, avg_back, "_ungrouped", _left_over_too, "drawn"),
    "x - c, not half of it": (BN_TRAIN, bn_back, "halves", _whole, "drawn"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_way_back_is_seen(name, monkeypatch):
    subject, module, function, wrong, state = WRONG[name]
    # Of 2048 rows one of 683 groups wins for each: the last of few has to be among them.
    size = (PAIRS[0], 7) if subject is AVG else PAIRS
    reference, new = subject.twins(*size, options=subject.options)
    put(state, reference, new)
    x = drawn((5, PAIRS[0]), 1)
    assert_accurate(reference, new, x)
    monkeypatch.setattr(module, function, wrong)
    with pytest.raises(AssertionError, match="error"):
        assert_accurate(reference, new, x)


@pytest.mark.parametrize("rows", [0, 1, 700])
def test_the_means_of_a_gpu_on_any_number_of_rows(rows, monkeypatch):
    """Its products are of torch: they run here, too."""
    monkeypatch.setattr(avg.OP, "place", lambda *a: "cuda")
    x, weight, bias = drawn((rows, 300), 1), drawn((2100, 300), 2), drawn((2100,), 3)
    u, _ = avg._pooled(x, weight, bias, 16, 2.0)
    z = x.double() @ weight.double().T + bias.double()
    true = z[:, :2096].unflatten(1, (131, 16)).mean(2)
    assert u.shape == (rows, 131) and u.dtype is torch.float64
    torch.testing.assert_close(u, true, rtol=1e-5, atol=1e-5)
    grads = avg._vjp(torch.rand(rows), (), (True,) * 3, x, weight, bias, 16, 2.0)
    assert [g.shape for g in grads] == [x.shape, weight.shape, bias.shape]
