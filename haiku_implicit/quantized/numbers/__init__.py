"""Numbers in few bits: formats, ranges, scales, codes, and calibration."""
