"""The platform that is traced for is set for a block of code and a thread."""

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


def test_another_thread_does_not_see_it():
    seen = []
    with target.compiling_for("tpu"):
        thread = threading.Thread(target=lambda: seen.append(target.platform()))
        thread.start()
        thread.join()
    assert seen == [None]
