"""The handlers under a stand-in for the CUDA driver, built once for each module."""

import pytest

from tests.native.stand_in import handlers
from tests.native.stand_in.handlers import Driver


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    try:
        return handlers.build(tmp_path_factory.mktemp("libraries"))
    except handlers.UnavailableError as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def loaded_driver(libraries):
    return Driver(libraries.driver)


@pytest.fixture
def driver(loaded_driver):
    loaded_driver.pretend()
    loaded_driver.take()
    return loaded_driver
