"""What holds for every test."""

from __future__ import annotations

import pytest

from workbook.chains import gemm_batchnorm_scale_softmax_run as batchnorm
from workbook.chains import matmul_maxpool_sum_scale_run as maxpool


@pytest.fixture(autouse=True)
def ours_at_every_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most tests are small: what a drop-in leaves to the reference at their sizes is ours here."""
    if request.node.get_closest_marker("as_sized") is None:
        for chain in (batchnorm, maxpool):
            monkeypatch.setattr(chain, "is_left", lambda *_: False)
