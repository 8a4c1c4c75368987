"""The target platform of a trace is set for a block of code in one thread."""

import threading

from tftpu.tpu import target


def test_the_platform_is_unknown_unless_it_is_set():
    assert target.platform() is None
    with target.compiling_for("tpu"):
        assert target.platform() == "tpu"
        with target.compiling_for(None):
            assert target.platform() is None
        assert target.platform() == "tpu"
    assert target.platform() is None


def test_the_platform_is_set_per_thread():
    seen = []
    with target.compiling_for("tpu"):
        thread = threading.Thread(target=lambda: seen.append(target.platform()))
        thread.start()
        thread.join()
    assert seen == [None]
