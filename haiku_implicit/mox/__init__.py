"""Module expressions: a Haiku model as a tree of its modules' calls, to see, query and change."""

from haiku_implicit.mox.files import load, save
from haiku_implicit.mox.mox import Mox, diff, eval_mox, make_mox, map_mox, to_transformed

__all__ = ["Mox", "diff", "eval_mox", "load", "make_mox", "map_mox", "save", "to_transformed"]
