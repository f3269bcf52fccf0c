"""Fixtures that tests of launches share."""

from __future__ import annotations

from typing import Any

import pytest

from fusedoptim.launch.sycl import SyclKernel


@pytest.fixture
def sycl_launches(monkeypatch: pytest.MonkeyPatch) -> list[SyclKernel]:
    """The kernels that SYCL has launched, in order."""
    launches: list[SyclKernel] = []
    submit = SyclKernel.submit

    def noting(kernel: SyclKernel, *arguments: Any) -> bool:
        launches.append(kernel)
        return submit(kernel, *arguments)

    monkeypatch.setattr(SyclKernel, "submit", noting)
    return launches
