"""Programs on several devices: processes of their own, as JAX has one number of devices for each."""

import os
import socket
import subprocess
import sys

# Seconds. Only devices that wait for each other for ever take so long.
HANG = 3600

JOIN = """
import sys, jax
jax.config.update("jax_num_cpu_devices", int(sys.argv.pop()))
jax.distributed.initialize(sys.argv.pop(), int(sys.argv.pop()), int(sys.argv.pop()), heartbeat_timeout_seconds=600)
"""


def run_on_devices(program, count, *args):
    """Runs a program on as many devices of this CPU; returns its output, or its error.

    XLA's other flags are those of the tests. (XLA splits programs, and chooses what devices send each other,
    before it optimizes machine code, and these flags leave out the latter alone.)

    Args:
      program: its code.
      count: how many devices.
      *args: its arguments.
    """
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *args],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG,
    )
    return run.stdout.strip() if run.returncode == 0 else run.stderr[-3000:]


def run_together(program, count, *args, devices=1):
    """Runs a program in several processes, each with so many devices, that find each other.

    Returns:
      The output of each of them (gloo prints, too), or the end of its errors.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", JOIN + program, *args]
            + [str(number), str(count), address, str(devices)],
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]
    try:
        texts = [process.communicate(timeout=HANG) for process in running]
    finally:
        for process in running:
            process.kill()
    codes = [process.returncode for process in running]
    return [
        out if not code else error[-3000:] for (out, error), code in zip(texts, codes, strict=True)
    ]
