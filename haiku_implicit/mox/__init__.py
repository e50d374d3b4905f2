"""Module expressions: a Haiku model as a tree of its modules' calls, to see, query and change."""

from haiku_implicit.mox.files import load, save
from haiku_implicit.mox.mox import Mox, eval_mox, make_mox, to_transformed

__all__ = ["Mox", "eval_mox", "load", "make_mox", "save", "to_transformed"]
