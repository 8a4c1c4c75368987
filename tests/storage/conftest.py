"""A bucket on loopback, as Google's client and TensorFlow see it."""

import pytest

from tests.support.fakes import gs_proxy


@pytest.fixture(scope="module")
def _bucket(tmp_path_factory):
    with gs_proxy.bucket(tmp_path_factory.mktemp("certificates")) as (service, _):
        yield service
