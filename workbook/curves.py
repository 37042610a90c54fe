"""How the error of a way to multiply floats grows: over promotion, over K, over families.

`measure` takes any product(x, weight, promote), a kernel or a model of one, holds it against
float64 beside the device's own float32 product, and returns records of kind "curve":

    method         fp16x3, fp16x1, ffma, ...
    how            sweep: promotion, depth or family; promote: the interval; limit_rows;
                   outputs, outputs_eager: errors of the worst column of z, one output feature;
                   drift_eager, as value
    shape, family  B, K, N; a name of operands.FAMILIES
    rel_error...   whole and worst row; rel_error_eager... of the float32 product
    value          drift: (sum |z| - exact sum) / exact sum, below 0 where z is drawn toward zero
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Generator, Tensor

from workbook import errors, journal, machine, precision
from workbook.journal import Record, Records
from workbook.operands import FAMILIES

__all__ = ["DEPTHS", "PROMOTIONS", "SLUG", "drift", "measure"]

SLUG = "split_product"  # the records' problem: data/<card>/split_product.jsonl
UNIT = "drift of sum |z|"
PROMOTE = 64  # what the kernels use
DEPTH = 8192  # of the sweeps over promotion and families
PROMOTIONS = tuple(64 << step for step in range(8))  # the last one, 8192, is never
DEPTHS = (1, 7, 64, 4096, 131072)
SWEEPS = ("promotion", "depth", "family")

Product = Callable[[Tensor, Tensor, int], Tensor]


def drift(z: Tensor, exact: Tensor) -> float:
    """(Σ|z| - Σ|exact|) / Σ|exact|: below 0 where results are drawn toward zero."""
    return (z.double().abs().sum() / exact.abs().sum() - 1).item()


def measure(
    product: Product,
    *,
    method: str,
    implementation: str = "",
    device: str | torch.device = "cpu",
    rows: tuple[int, int] = (64, 64),
    sweeps: Sequence[str] = SWEEPS,
    depth: int = DEPTH,
    depths: Sequence[int] = DEPTHS,
    families: Sequence[str] = tuple(FAMILIES),
    seed: int = 0,
    **about: object,
) -> Records:
    """The curves of product(x, weight, promote) -> z, on x (B, K) and weight (N, K) of `device`.

    rows: B and N, small, as the oracle is in float64; depth: K of the sweeps over promotion and
    families; depths: of the sweep over K. about: other fields of the records, such as
    kernels_digest. A call that raises is kept with its reason. Nothing is written here: that is
    journal.append(records, journal.place(records[0], folder)).
    """
    unknown = sorted({*sweeps} - {*SWEEPS})
    if unknown:
        raise ValueError(f"sweeps: got {', '.join(unknown)}; want some of {', '.join(SWEEPS)}")
    where, found, case = torch.device(device), Records(), None
    about = {
        "implementation": implementation, "device": where.type, "card": machine.card(where),
        "clocks": machine.clocks(where), "run": journal.new_run(), **machine.provenance(), **about,
    }  # fmt: skip
    for sweep, family, k, promote in _points(sweeps, depth, depths, families):
        if case is None or case[0] != (family, k):
            g = Generator().manual_seed(seed)
            x, weight = (t.to(where) for t in FAMILIES[family](rows[0], k, rows[1], g))
            exact = x.double() @ weight.double().T
            with precision.using_route("float32"):
                case = (family, k), x, weight, exact, x @ weight.T
        _, x, weight, exact, eager = case
        found.append(
            Record(
                kind="curve", problem=SLUG, variant="product", method=method, route="float32",
                dtype="float32", family=family, seed=seed,
                shape={"B": rows[0], "K": k, "N": rows[1]},
                **_judged(lambda: product(x, weight, promote), eager, exact, sweep, promote),  # noqa: B023
                **about,
            )
        )  # fmt: skip
    return found


def _points(
    sweeps: Sequence[str], depth: int, depths: Sequence[int], families: Sequence[str]
) -> Iterator[tuple[str, str, int, int]]:
    """(sweep, family, K, promotion) of every point, those of equal inputs together."""
    if "promotion" in sweeps:
        yield from (("promotion", "uniform", depth, p) for p in PROMOTIONS if p <= depth)
    if "depth" in sweeps:
        yield from (("depth", "uniform", k, PROMOTE) for k in depths)
    if "family" in sweeps:
        yield from (("family", family, depth, PROMOTE) for family in families)


def _judged(
    call: Callable[[], Tensor], eager: Tensor, exact: Tensor, sweep: str, promote: int
) -> dict[str, object]:
    """What a record says of one call."""
    own = errors.errors_of(eager, exact)
    limits = errors.limits_of(own)
    how = {"sweep": sweep, "promote": promote, "limit_rows": limits[1]}
    how |= {"outputs_eager": errors.errors_of(eager.T, exact.T)[1]}
    how |= {"drift_eager": drift(eager, exact)}
    said = {"rel_error_eager": own[0], "rel_error_eager_rows": own[1], "limit": limits[0]}
    try:
        z = call()
    except (RuntimeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        return said | {"how": how, "passed": False, "reason": reason}
    ours = errors.errors_of(z, exact)
    how["outputs"] = errors.errors_of(z.T, exact.T)[1]
    said |= {"how": how, "rel_error": ours[0], "rel_error_rows": ours[1]}
    reason = errors.excess(ours, own, limits)
    return said | {"value": drift(z, exact), "unit": UNIT, "passed": not reason, "reason": reason}
