"""Cuts data into inputs, targets and forcings."""

import numpy as np


def extract_inputs_targets_forcings(
    dataset,
    *,
    target_lead_times,
    input_variables,
    target_variables,
    forcing_variables,
    pressure_levels,
    input_duration,
):
    """The last frames, as many as there are lead times of six hours, are the targets."""
    steps = int(target_lead_times.stop.removesuffix("h")) // 6
    hours = np.arange(dataset.sizes["time"]) * 6.0
    progress = np.sin(2 * np.pi * hours / 24)[None].astype(np.float32)
    dataset.data_vars["day_progress_sin"] = (("batch", "time"), progress)
    first, last = (dataset.isel(time=part) for part in (slice(-steps), slice(-steps, None)))
    inputs = first.select(input_variables)
    return inputs, last.select(target_variables), last.select(forcing_variables)
