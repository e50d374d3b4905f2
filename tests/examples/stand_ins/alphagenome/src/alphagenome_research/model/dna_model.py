"""The organisms."""

import enum


class Organism(enum.Enum):
    HOMO_SAPIENS = 9606
