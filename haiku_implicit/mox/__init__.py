"""Module expressions: a Haiku model as a tree of module calls, to inspect, query and change."""

from haiku_implicit.mox.files import load, save
from haiku_implicit.mox.make import eval_mox, make_mox, to_transformed
from haiku_implicit.mox.mox import Mox, diff, map_mox

__all__ = ["Mox", "diff", "eval_mox", "load", "make_mox", "map_mox", "save", "to_transformed"]
