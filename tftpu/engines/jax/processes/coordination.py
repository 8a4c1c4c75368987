"""Finds the index of this process among several, and starts JAX's coordination of them.

The processes find each other, and exchange short texts, through a service in the first process. Its
address comes from TF_CONFIG, or on a TPU slice of several hosts from JAX's own detection.

JAX aborts a process if the service ends, and gloo aborts it if a peer breaks the connection. This
module makes such a process end with the exit code for a lost host. JAX's heartbeats never end a
process, because `tftpu.engines.jax.processes.watch` notices a lost host first.
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
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage] (private, see above)

from tftpu.engines.jax.processes.watch import Store, Watch
from tftpu.errors import HostLost, UserError
from tftpu.runtime import hosts
from tftpu.runtime.hosts import Task

# Timeout in seconds of JAX's own heartbeats, so long that a missed one never aborts a process.
_NEVER = 10**6
_LEAVING = 300.0  # seconds that a finished process waits for the others to end as well
_REACHED = 2.0  # seconds to wait for a connection to the machine that runs the service
_ANSWERS = 2.0  # seconds that the service keeps running after the coordination has ended
_LATER = 3.0  # seconds after `host_timeout` by which `Watch` has certainly ended the process

# Contains the watch once `start` has run, because JAX can coordinate a process only once.
_started: list[Watch] = []
_handlers: list[Any] = []  # signal handlers for C code; keeps Python from freeing them


def find_slice_task() -> Task:
    """Returns this process's index, and the number of processes, on a TPU slice.

    The number is 1 on a slice of one host, and without a metadata server, as on Colab. If the
    server of a larger slice does not answer, connecting fails later: JAX finds more processes.

    Raises:
        HostLost: the address of the first host was not found.
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
    """Starts the coordination with the other processes; waits until all have connected.

    Later calls return the first call's watch.

    Args:
        task: the index of this process, the number of processes, and the first one's address.
        seconds: the seconds without a sign of life after which a host is lost.

    Raises:
        UserError: the port of the first host is in use.
        HostLost: another host did not connect in time.
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
                f"Host {task.index} of {task.count} waited {hosts.ARRIVE} s for the others to "
                f"connect to host 0 at {address} ({error}): start the same command on all hosts, "
                "each with its own index, and check that they can reach this address."
            ) from error
        _started.append(Watch(Store(client), task.index, task.count, seconds))
        # Runs before JAX's own handler, because the last one registered runs first.
        atexit.register(_leave)
    return _started[0]


def _serve(task: Task) -> None:
    """Starts the service that connects the processes; runs in the first process only."""
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
    """Connects JAX to the other processes, and returns JAX's client.

    `jax.distributed.initialize` has no argument to choose what happens if the service ends.
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
        # jaxlib 0.10.2 aborts before it calls this; then `_exit_as_lost_on_abort` handles SIGABRT.
        missed_heartbeat_callback=lambda status: hosts.exit_as_lost(f"Host 0 was lost: {status}."),
    )
    state.client.connect()
    return state.client


def _leave() -> None:
    """Ends the coordination. All processes leave together, unless one is lost or takes too long."""
    state: Any = distributed.global_state
    if _started[0].leave(_LEAVING):
        state.client.shutdown()  # returns when all processes have called it
        # Waits, because other processes may not have read the service's answer yet.
        if state.service is not None:
            time.sleep(_ANSWERS)
            state.service.shutdown()
    _forget()


def _forget() -> None:
    """Removes the client and service from JAX, which would wait for the others when Python ends."""
    state: Any = distributed.global_state
    state.client = state.service = None


def _exit_as_lost_on_abort(address: str, seconds: float) -> None:
    """Handles SIGABRT: a process that aborts because a host was lost exits as `Watch` would end it.

    JAX aborts if its service ends, and gloo if another host breaks the connection. The handler
    checks the service, and waits for `Watch` to end the process. Other aborts stay unchanged.

    Args:
        address: the address of the service, "HOST:PORT".
        seconds: the seconds without a sign of life after which a host is lost.
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
