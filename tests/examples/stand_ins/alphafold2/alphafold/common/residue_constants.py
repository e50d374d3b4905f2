"""The order of amino acids and of atoms; of side chains only CB, and aspartate's two oxygens."""

restypes = list("ARNDCQEGHILKMFPSTWYV")
_NAMES = "ALA ARG ASN ASP CYS GLN GLU GLY HIS ILE LEU LYS MET PHE PRO SER THR TRP TYR VAL"
restype_1to3 = dict(zip(restypes, _NAMES.split(), strict=True))
atom_order = dict(N=0, CA=1, C=2, CB=3, O=4, OD1=16, OD2=17)
_ATOMS = ["N", "CA", "C", "O", "CB"]
restype_name_to_atom14_names = {
    name: [*_ATOMS, *(["OD1", "OD2"] if name == "ASP" else ["", ""]), *[""] * 7]
    for name in restype_1to3.values()
}
residue_atom_renaming_swaps = {"ASP": {"OD1": "OD2"}}
