"""What is told about Linear -> BatchNorm -> scale -> softmax: steps, omissions, states of weights.

Names as in the code: w weight, b bias, gamma, beta, mean, var, scale, eps. Each step is written out
by itself: none calls the code that it argues for.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from workbook.spec import Step

__all__ = ["PARTS", "STATES", "STEPS", "without"]


def _normalised(z: Tensor, gamma: Tensor, beta: Tensor, mean: Tensor, var: Tensor, eps: float):
    return gamma * (z - mean) / torch.sqrt(var + eps) + beta


def _chain(x, w, b, gamma, beta, mean, var, scale, eps) -> Tensor:
    z = F.batch_norm(F.linear(x, w, b), mean, var, gamma, beta, False, 0.0, eps)
    return F.softmax(scale * z, dim=1)


def _logits(x, w, b, gamma, beta, mean, var, scale, eps) -> Tensor:
    """a z + c, one map a feature."""
    a = gamma * scale / torch.sqrt(var + eps)
    return a * (x @ w.T) + (a * (b - mean) + beta * scale)


def _by_parts(t: Tensor, *, rescaled: bool = True) -> Tensor:
    """Softmax from two parts of a row, each with its own maximum m and sum s."""
    third = max(1, t.size(1) // 3)
    parts = [
        t[:, :third],
        t[:, third:] if t.size(1) > 1 else t.new_full((t.size(0), 1), -torch.inf),
    ]
    m = [part.amax(1, keepdim=True) for part in parts]
    s = [(part - of).exp().sum(1, keepdim=True) for part, of in zip(parts, m, strict=True)]
    most = torch.maximum(*m)
    if not rescaled:
        return (t - most).exp() / (s[0] + s[1])
    return (t - most).exp() / sum(s * (of - most).exp() for s, of in zip(s, m, strict=True))


def _in_weights(x, w, b, gamma, beta, mean, var, scale, eps) -> Tensor:
    a = gamma * scale / torch.sqrt(var + eps)
    return F.softmax(F.linear(x, a.unsqueeze(1) * w, a * (b - mean) + beta * scale), dim=1)


EVAL_STEPS = (
    Step(
        "The chain in eval mode",
        r"y_i = \operatorname{softmax}_n\Big(\kappa_n\Big(\gamma_n \frac{z_{in} + b_n - \mu_n}"
        r"{\sqrt{\sigma^2_n + \epsilon}} + \beta_n\Big)\Big), \quad z_{in} = \sum_k x_{ik} W_{nk}",
        "the definition: mean and variance are the running ones, numbers like any weight",
        _chain,
    ),
    Step(
        "One map a feature",
        r"t_{in} = a_n z_{in} + c_n, \quad a_n = \frac{\gamma_n \kappa_n}"
        r"{\sqrt{\sigma^2_n + \epsilon}}, \quad c_n = a_n (b_n - \mu_n) + \beta_n \kappa_n",
        "an affine map of an affine map is one: bias, mean, variance, both affines and the scale "
        "are two numbers a feature",
        lambda x, *rest: F.softmax(_logits(x, *rest), dim=1),
    ),
    Step(
        "A shift common to a row is nothing",
        r"y_{in} = \frac{e^{t_{in} - m_i}}{\sum_{n'} e^{t_{in'} - m_i}}, \quad m_i = \max_n t_{in}",
        r"$e^{-m_i}$ is in every term above and below; with the maximum no exponent is above 0",
        lambda x, *rest: _shifted(_logits(x, *rest)),
    ),
    Step(
        "The sum, in any pieces",
        r"(m, s) \oplus (m', s') = (M,\; s\, e^{m-M} + s'\, e^{m'-M}), \quad M = \max(m, m')",
        r"both sides stand for the same number $s\,e^{m} + s'\,e^{m'}$, written with the largest "
        "exponent in front; so the order and the grouping are free",
        lambda x, *rest: _by_parts(_logits(x, *rest)),
    ),
    Step(
        "True, and of no use: the map in the weights",
        r"t_{in} = \sum_k x_{ik} (a_n W_{nk}) + c_n",
        "the product is as large as before: this saves a multiplication behind it, and costs a "
        "second copy of W, written anew whenever a statistic moves",
        _in_weights,
    ),
    Step(
        "Tempting and wrong: softmax does not see the scale",
        r"\operatorname{softmax}(\kappa\, t) \stackrel{?}{=} \operatorname{softmax}(t)",
        "it does not see a shift; a factor changes every ratio of two outputs",
        lambda x, w, b, gamma, beta, mean, var, scale, eps: F.softmax(
            _normalised(F.linear(x, w, b), gamma, beta, mean, var, eps), dim=1
        ),
        holds=False,
    ),
    Step(
        "Tempting and wrong: the batch's own mean and variance in eval mode",
        r"\mu_n \stackrel{?}{=} \tfrac1B \textstyle\sum_i z_{in} + b_n",
        "that is train mode: a sample's output must not depend on its neighbours here",
        lambda x, w, b, gamma, beta, mean, var, scale, eps: F.softmax(
            scale * F.batch_norm(F.linear(x, w, b), None, None, gamma, beta, True, 0.0, eps), dim=1
        ),
        holds=False,
    ),
    Step(
        "Tempting and wrong: parts added without rescaling",
        r"(m, s) \oplus (m', s') \stackrel{?}{=} (M,\; s + s')",
        "each sum was taken with the maximum of its own part before it",
        lambda x, *rest: _by_parts(_logits(x, *rest), rescaled=False),
        holds=False,
    ),
)


def _shifted(t: Tensor) -> Tensor:
    e = (t - t.amax(1, keepdim=True)).exp()
    return e / e.sum(1, keepdim=True)


def _batch_chain(x, w, b, gamma, beta, scale, eps) -> Tensor:
    z = F.batch_norm(F.linear(x, w, b), None, None, gamma, beta, True, 0.0, eps)
    return F.softmax(scale * z, dim=1)


def _by(z: Tensor, var: Tensor, gamma: Tensor, beta: Tensor, scale: Tensor, eps: float) -> Tensor:
    return F.softmax(scale * _normalised(z, gamma, beta, torch.zeros_like(var), var, eps), dim=1)


def _centred(x: Tensor, w: Tensor) -> Tensor:
    return (x - x.mean(0)) @ w.T


def _batch_map(x, w, b, gamma, beta, scale, eps) -> Tensor:
    z = _centred(x, w)
    return F.softmax(gamma * scale / torch.sqrt(z.square().mean(0) + eps) * z + beta * scale, dim=1)


TRAIN_STEPS = (
    Step(
        "The chain in train mode",
        r"y_i = \operatorname{softmax}_n\Big(\kappa_n \Big(\gamma_n \frac{z_{in} + b_n - \mu_n}"
        r"{\sqrt{v_n + \epsilon}} + \beta_n\Big)\Big), \quad \mu_n = \tfrac1B \sum_i z_{in} + b_n,"
        r" \quad v_n = \tfrac1B \sum_i (z_{in} + b_n - \mu_n)^2",
        "the definition: mean and variance are those of the batch",
        _batch_chain,
        mode="train",
    ),
    Step(
        "Centre before the product",
        r"z_{in} + b_n - \mu_n = \sum_k x_{ik} W_{nk} - \sum_k \bar x_k W_{nk}"
        r" = \sum_k (x_{ik} - \bar x_k) W_{nk} =: \tilde z_{in}",
        "the mean of a linear map is the map of the mean; the bias is in both, and gone",
        lambda x, w, b, *rest: _by(_centred(x, w), F.linear(x, w, b).var(0, correction=0), *rest),
        mode="train",
    ),
    Step(
        "The variance is one mean of squares",
        r"v_n = \tfrac1B \sum_i \tilde z_{in}^2, \qquad"
        r" \mu_n = \sum_k \bar x_k W_{nk} + b_n \text{ is left to the running mean}",
        "what has mean 0 needs none subtracted",
        lambda x, w, b, *rest: _by(_centred(x, w), _centred(x, w).square().mean(0), *rest),
        mode="train",
    ),
    Step(
        "One map a feature, as in eval mode",
        r"t_{in} = a_n \tilde z_{in} + d_n, \quad"
        r" a_n = \frac{\gamma_n \kappa_n}{\sqrt{v_n + \epsilon}}, \quad d_n = \beta_n \kappa_n",
        "but known only behind the product: nothing of it is a fold",
        _batch_map,
        mode="train",
    ),
    Step(
        "Tempting and wrong: the mean of squares without centring",
        r"v_n \stackrel{?}{=} \tfrac1B \sum_i z_{in}^2",
        "that is the variance plus the square of the mean",
        lambda x, w, b, *rest: _by(_centred(x, w), F.linear(x, w).square().mean(0), *rest),
        holds=False,
        mode="train",
    ),
    Step(
        "Tempting and wrong: the unbiased variance",
        r"v_n \stackrel{?}{=} \tfrac{1}{B-1} \sum_i \tilde z_{in}^2",
        "BatchNorm divides by B where it normalises, by B - 1 only for the running variance",
        lambda x, w, b, *rest: _by(
            _centred(x, w), _centred(x, w).square().sum(0) / (x.size(0) - 1), *rest
        ),
        holds=False,
        mode="train",
    ),
)
STEPS = (*EVAL_STEPS, *TRAIN_STEPS)


# --- what `check` draws and refuses beside ----------------------------------------------------


def _moved(model: nn.Module, g: Generator) -> None:
    """No parameter and no statistic is 0 or 1 any more, but for some gamma that are 0."""
    bn = model.bn
    for tensor, values in (
        (bn.weight, torch.randn(bn.weight.shape, generator=g)),  # of both signs
        (bn.bias, torch.randn(bn.bias.shape, generator=g)),
        (bn.running_mean, torch.randn(bn.running_mean.shape, generator=g)),
        (bn.running_var, torch.randn(bn.running_var.shape, generator=g).exp()),
        (model.scale, 1.5 + 0.5 * torch.rand(model.scale.shape, generator=g)),
    ):
        tensor.copy_(values)
    bn.weight[::7] = 0.0
    bn.num_batches_tracked.fill_(5)


def _far_mean(model: nn.Module, g: Generator) -> None:
    """Statistics far from the batch's, and of every size."""
    _moved(model, g)
    model.bn.running_mean.add_(100.0)
    model.bn.running_var.copy_(torch.exp2(torch.randint(-20, 21, model.bn.bias.shape, generator=g)))


def _large_logits(model: nn.Module, g: Generator) -> None:
    """Beyond 88, where exp overflows, and one output near 1."""
    _moved(model, g)
    model.scale.mul_(100.0)


def _masked(model: nn.Module, g: Generator) -> None:
    """A feature that is left out by a bias of -inf: its output is 0, or the row is NaN."""
    model.gemm.bias[::5] = -float("inf")


STATES = {
    "batchnorm moved": _moved,
    "masked features": _masked,
    "statistics far off": _far_mean,
    "large logits": _large_logits,
}


# Parts that may be left out, and what is said of it.
PARTS = {
    "batchnorm": "BatchNorm left out",
    "scale": "scale left out",
    "bias": "bias left out (BatchNorm's in train mode)",
    "input": "uniform, 1/N",
    "first_features": "first tenth of K left out",
    "last_outputs": "last tenth of the outputs left out",
}


def without(part: str, model: nn.Module, x: Tensor) -> Tensor:
    """The chain with a part left out, in the model's mode and the type of x."""
    bn, features = model.bn, x.size(1) // 10 + 1
    if part == "first_features":
        x = torch.cat([torch.zeros_like(x[:, :features]), x[:, features:]], 1)
    z = F.linear(x, model.gemm.weight, None if part == "bias" else model.gemm.bias)
    if part != "batchnorm":
        z = bn(z)
    if part == "bias" and bn.training:  # the Linear's is gone there by itself
        z = z - bn.bias
    y = F.softmax(z if part == "scale" else model.scale * z, dim=1)
    if part == "last_outputs":
        y[:, -(y.size(1) // 10 + 1) :] = 0
    return torch.full_like(y, 1 / y.size(1)) if part == "input" else y
