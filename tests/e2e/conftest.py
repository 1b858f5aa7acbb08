"""The pretend hosts of the tests that need them, one set for each module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab.hosts import Lab, hosts


@pytest.fixture(scope="module")
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A laptop, and three machines or as many as the module's NUM_HOSTS; modules add to them."""
    number = getattr(request.module, "NUM_HOSTS", 3)
    with hosts(tmp_path_factory.mktemp("lab"), number) as made:
        yield made
