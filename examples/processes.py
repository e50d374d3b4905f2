"""Starts processes that train together, connects them, and saves their parts.

One machine stands in for several here: `start` runs this program `count` times. With
several machines, each of them runs it once, with its number and the address of the first one.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import jax

import haiku_implicit as hki
from errors import InputError


def start(count: int) -> None:
    """Runs this program in `count` processes, and waits for them.

    If one ends too early, the others would wait for its messages, so they are stopped. All are stopped
    if this process gets SIGTERM.

    Raises:
      InputError: if one has failed; the message has the way out.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    common = [sys.executable, *sys.argv, f"--coordinator=127.0.0.1:{port}"]
    running = [subprocess.Popen([*common, f"--process_id={i}"]) for i in range(count)]
    print("processes", *(process.pid for process in running), flush=True)
    try:
        while any(codes := [process.poll() for process in running]) or None in codes:
            failed = [i for i, code in enumerate(codes) if code]
            if failed:
                ends = ", ".join(f"process {i} with {codes[i]}" for i in failed)
                raise InputError(
                    f"ended too early: {ends} (-n: killed by signal n); the others were stopped. With "
                    "--checkpoint the same command goes on from what was saved last"
                )
            time.sleep(0.05)
    finally:
        for process in running:
            process.kill()
            process.wait()


def join(coordinator: str | None, count: int, number: int, timeout: int) -> None:
    """Joins the other processes.

    Args:
      coordinator: `host:port` of process 0.
      count: the number of processes.
      number: the number of this process.
      timeout: the seconds without a heartbeat from a process after which the others end.
    """
    if coordinator is None:
        raise InputError("--process_id needs --coordinator, the host and a port of process 0")
    jax.distributed.initialize(coordinator, count, number, heartbeat_timeout_seconds=timeout)


class OneFile:
    """Checkpoints by `hki.save`: one file, which each save replaces, with the parts' files next to it.

    Args:
      folder: a folder that all processes see.
    """

    def __init__(self, folder: str):
        os.makedirs(folder, exist_ok=True)
        self.path = os.path.join(folder, "run.safetensors")

    def save(self, run: Any) -> None:
        """Saves a tree, of which each process writes its part."""
        hki.save(self.path, run)

    def load(self, like: Any) -> Any:
        """Returns the last saved tree, with the sharding of `like`; None if there is nothing."""
        if not os.path.exists(self.path):
            return None
        places = jax.tree.map(lambda x: getattr(x, "sharding", None), like)
        return hki.load(self.path, like=like, shardings=places)


class Steps:
    """Checkpoints by Orbax: a folder for each step; the last two are kept.

    Args:
      folder: a folder that all processes see.
    """

    def __init__(self, folder: str):
        from orbax import checkpoint  # this import takes seconds

        options = checkpoint.CheckpointManagerOptions(max_to_keep=2)
        self.ocp = checkpoint
        self.manager = checkpoint.CheckpointManager(os.path.abspath(folder), options=options)

    def save(self, run: Any) -> None:
        """Saves a tree, of which each process writes its part."""
        self.manager.save(run.step, args=self.ocp.args.StandardSave(run))
        self.manager.wait_until_finished()

    def load(self, like: Any) -> Any:
        """Returns the last saved tree, with the sharding of `like`; None if there is nothing."""
        step = self.manager.latest_step()
        if step is None:
            return None
        return self.manager.restore(step, args=self.ocp.args.StandardRestore(like))


STORES = {"hki": OneFile, "orbax": Steps}
