"""The order of amino acids and of atoms."""

restypes = list("ARNDCQEGHILKMFPSTWYV")
atom_order = dict(N=0, CA=1, C=2, CB=3, O=4)
