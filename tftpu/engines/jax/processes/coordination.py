"""Finds this process's place among several, and starts JAX's coordination of them.

The processes find each other, and exchange short texts, through a service in the first process. Its
address comes from TF_CONFIG, or on a TPU slice of several hosts from JAX's own detection.

JAX aborts a process when the service is gone, and gloo aborts it when a peer breaks the connection.
Here such a process ends with the exit code of a lost host. JAX's heartbeats never end a process,
because `tftpu.engines.jax.processes.watch` notices a lost host first.
"""

import atexit
import contextlib
import ctypes
import signal
import socket
import time
from typing import Any

import jax
from jax._src import clusters, distributed  # private modules; tested with JAX 0.10.2
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage] (as the others)

from tftpu.engines.jax.processes.watch import Store, Watch
from tftpu.errors import HostLost, UserError
from tftpu.runtime import hosts
from tftpu.runtime.hosts import Task

# Seconds between JAX's own heartbeats, in effect never: a missed one ends processes abruptly.
_NEVER = 10**6
_LEAVING = 300.0  # seconds that a process that ends waits for the others
_REACHED = 2.0  # seconds to wait for an answer of the machine that runs the service
_ANSWERS = 2.0  # seconds that the service keeps running after the coordination has ended
_LATER = 3.0  # seconds after which `Watch` has certainly ended the process

# Holds the watch once a process has started: JAX coordinates a process only once.
_started: list[Watch] = []
_handlers: list[Any] = []  # callbacks that the system calls; keeps Python from freeing them


def find_slice_task() -> Task:
    """Returns the place of this process on a TPU slice; a slice of one host has a single place.

    The place is also single without a metadata server, as on Colab. If the server of a slice with
    several hosts does not answer, JAX finds more processes than this function.

    Raises:
        HostLost: the first host has no address.
    """
    with contextlib.suppress(OSError):
        for kind in clusters.ClusterEnv._cluster_types:
            if "tpu" in kind.name and kind.is_env_present() and kind.get_process_count() > 1:
                try:
                    address = kind.get_coordinator_address(hosts.ARRIVE, None)
                except RuntimeError as error:
                    raise HostLost(f"Host 0 of the slice was not found: {error}.") from error
                return Task(kind.get_process_id(), kind.get_process_count(), address)
    return Task()


def start(task: Task, seconds: float) -> Watch:
    """Starts the coordination with the other processes, once; waits until all have arrived.

    Args:
        task: the place of this process among several.
        seconds: the seconds without a sign of life after which a host is lost.

    Raises:
        UserError: the port of the first host is in use.
        HostLost: another host did not arrive.
    """
    if not _started:
        address = task.coordinator
        _exit_as_lost_on_abort(address, seconds)
        if task.chief:
            _serve(task)
        try:
            with hosts.reported_if_long(task, hosts.ARRIVE):
                client = _connect_task(task)
        except RuntimeError as error:
            _forget()
            raise HostLost(
                f"Host {task.index} of {task.count} waited {hosts.ARRIVE} s for the others, which "
                f"meet at {address} of host 0 ({error}): start the same command on all hosts, each "
                "with its own index, and let them reach that address."
            ) from error
        _started.append(Watch(Store(client), task.index, task.count, seconds))
        # Runs before JAX's own handler, because the last one registered runs first.
        atexit.register(_leave)
    return _started[0]


def _serve(task: Task) -> None:
    """Starts the service through which the processes find each other, in the first of them."""
    port = int(task.coordinator.rpartition(":")[2])
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:  # tries the port first, because JAX may crash if it cannot serve
        socket.create_server(("", port), family=family, dualstack_ipv6=both).close()
    except OSError as error:
        raise UserError(
            f"Host 0 cannot serve the other hosts at port {port} ({error.strerror}): end the "
            "process that uses the port, or name another port in TF_CONFIG."
        ) from error
    state: Any = distributed.global_state
    state.service = _jax.get_distributed_runtime_service(
        f"[::]:{port}", task.count, heartbeat_timeout=_NEVER, shutdown_timeout=hosts.ARRIVE
    )


def _connect_task(task: Task) -> Any:
    """Connects JAX to the others as `jax.distributed.initialize` does; returns JAX's client.

    That function has no argument to choose what happens when the service is gone.
    """
    # JAX would catch SIGTERM, which `tftpu.runtime.preemption` handles.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    state: Any = distributed.global_state
    state.process_id, state.num_processes = task.index, task.count
    state.coordinator_address = task.coordinator
    state.client = _jax.get_distributed_runtime_client(
        task.coordinator,
        task.index,
        init_timeout=hosts.ARRIVE,
        heartbeat_timeout=_NEVER,
        shutdown_timeout=hosts.ARRIVE,
        shutdown_on_destruction=False,
        use_compression=True,
        # jaxlib 0.10.2 aborts before it calls a function of Python: see `_exit_as_lost_on_abort`.
        missed_heartbeat_callback=lambda status: hosts.exit_as_lost(f"Host 0 was lost: {status}."),
    )
    state.client.connect()
    return state.client


def _leave() -> None:
    """Ends the coordination. All processes leave together, unless one is lost or takes too long."""
    state: Any = distributed.global_state
    if _started[0].leave(_LEAVING):
        state.client.shutdown()  # returns when all processes have called it
        # The other processes may not have read the service's answer yet.
        if state.service is not None:
            time.sleep(_ANSWERS)
            state.service.shutdown()
    _forget()


def _forget() -> None:
    """Removes the client and service from JAX, which would wait for the others when Python ends."""
    state: Any = distributed.global_state
    state.client = state.service = None


def _exit_as_lost_on_abort(address: str, seconds: float) -> None:
    """Makes an abort after the loss of a host end the process with the exit code for that.

    JAX aborts when its service is gone, and gloo when another host breaks the connection. `Watch`
    soon notices the loss and ends the process. Other aborts stay unchanged.

    Args:
        address: the address of the service.
        seconds: the seconds after which a host is lost.
    """
    host, _, port = address.rpartition(":")

    def exit_if_lost(_: int) -> None:
        end = time.monotonic() + seconds + _LATER
        while time.monotonic() < end:
            try:
                socket.create_connection((host.strip("[]"), int(port)), _REACHED).close()
            except OSError as error:
                hosts.exit_as_lost(f"Host 0 was lost: {error}.")
            time.sleep(0.2)

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(exit_if_lost)
    _handlers.append(handler)
    library = ctypes.CDLL(None)
    library.signal.restype = ctypes.c_void_p
    library.signal(signal.SIGABRT, handler)
