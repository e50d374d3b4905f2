"""The tracks that heads predict, with the names of AlphaGenome's."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlphaGenomeOutputMetadata:
    splice_sites: Any = None
    atac: Any = None


def load(organism):
    return AlphaGenomeOutputMetadata(splice_sites=list("abcde"), atac=list("abc"))
