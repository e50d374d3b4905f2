"""tqdm, or the command that installs it: `pip install .` does not."""

import sys

try:
    from tqdm import tqdm as tqdm
except ImportError:
    sys.exit("error: tqdm is missing; in the folder of this library, pip install '.[progress]'")
