"""A batch."""

import chex


@chex.dataclass(frozen=True)
class DataBatch:
    dna_sequence: chex.Array | None = None
    organism_index: chex.Array | None = None
    splice_sites: chex.Array | None = None
    atac: chex.Array | None = None
    atac_mask: chex.Array | None = None
