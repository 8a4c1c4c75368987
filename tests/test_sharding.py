"""The target platform of a trace is set for a block of code in one thread."""

import threading

from tftpu import sharding


def test_the_platform_is_unknown_unless_it_is_set():
    assert sharding.get_platform() is None
    with sharding.compiling_for("tpu"):
        assert sharding.get_platform() == "tpu"
        with sharding.compiling_for(None):
            assert sharding.get_platform() is None
        assert sharding.get_platform() == "tpu"
    assert sharding.get_platform() is None


def test_the_platform_is_set_per_thread():
    seen = []
    with sharding.compiling_for("tpu"):
        thread = threading.Thread(target=lambda: seen.append(sharding.get_platform()))
        thread.start()
        thread.join()
    assert seen == [None]
