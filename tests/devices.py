"""Programs on several devices: processes of their own, as JAX has one number of devices for each."""

import os
import subprocess
import sys


def run_on_devices(program, count, *args, optimized=True):
    """Runs a program on as many devices of this CPU; returns what it printed, or its error.

    Args:
      program: its code.
      count: how many devices.
      *args: its arguments.
      optimized: False: XLA spends less on compiling.
    """
    flags = f"--xla_force_host_platform_device_count={count}"
    if not optimized:
        flags += " --xla_backend_optimization_level=0"
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *args],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    return run.stdout.strip() if run.returncode == 0 else run.stderr[-3000:]
