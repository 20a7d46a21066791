"""Both forms of the reference kernels on one machine."""

from __future__ import annotations

import pytest
from ssmcore_kernels.reference import conv, replay, ssd, state_update


@pytest.fixture(params=["host", "device"])
def form(request, monkeypatch):
    """The form for CPUs, which looks at slot ids, and the one that never looks at a value."""
    for module in (conv, replay, ssd, state_update):
        monkeypatch.setattr(module, "is_host", lambda tensor: request.param == "host")
    return request.param
