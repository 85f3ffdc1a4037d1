"""What the tests of the manifests share."""

from typing import Any

import pytest
from tests.deploy.chart import LAYOUTS, written


@pytest.fixture(params=LAYOUTS)
def manifests(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return written(request.param)
