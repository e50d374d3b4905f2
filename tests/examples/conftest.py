import pathlib
import sys

# As for the scripts of examples/, which import each other by their bare names.
sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))

# Models with the features and names of other people's, which scripts import.
collect_ignore = ["stand_ins"]
