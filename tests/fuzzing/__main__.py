"""Changes files at random, reads them with one loader, and prints what is not a clean error or a tree.

python -m tests.fuzzing --loader=load_gguf --seconds=600
python -m tests.fuzzing --loader=load_gguf --replay=kept/1
"""

import collections
import os
import pathlib
import sys
import tempfile
import time
from typing import Any

from absl import app, flags
from tqdm import tqdm

from tests.fuzzing import fuzz, loaders

_LOADER = flags.DEFINE_enum("loader", None, list(loaders.LOADERS), "What reads the files.")
_SECONDS = flags.DEFINE_float("seconds", 600, "For how long.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Of what is drawn.", lower_bound=0)
_KEEP = flags.DEFINE_string("keep", None, "A folder for files that are not read well.")
_REPLAY = flags.DEFINE_string(
    "replay", None, "A folder that such a run kept: it is read once more."
)
flags.mark_flag_as_required("loader")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    if _REPLAY.value:
        found = fuzz.run(loaders.LOADERS[_LOADER.value], os.path.abspath(_REPLAY.value))
        print(found)
        sys.exit(found.wrong is not None)
    keep = pathlib.Path(_KEEP.value or tempfile.mkdtemp())
    ends: collections.Counter[str] = collections.Counter()
    lines, wrong, worst = set(), {}, fuzz.Outcome("", "", None, 0, 0, 0, 0.0)
    most = growth = worst
    with tqdm(total=round(_SECONDS.value), disable=None, unit="s") as bar:
        start = time.monotonic()
        for found in fuzz.fuzzed(_LOADER.value, _SEED.value, _SECONDS.value):
            for outcome, files in found:
                ends[outcome.what] += 1
                lines.add(outcome.where)
                worst = max(worst, outcome, key=lambda x: x.seconds)
                most = max(most, outcome, key=lambda x: x.memory)
                growth = max(growth, outcome, key=lambda x: x.growth)
                if outcome.wrong and (key := (outcome.where, outcome.wrong[:15])) not in wrong:
                    wrong[key] = outcome
                    kept = _kept(keep / str(len(wrong)), files)
                    print(f"{kept}: {outcome.wrong[:600]} ({outcome.where})\n", flush=True)
            bar.update(min(round(time.monotonic() - start), bar.total) - bar.n)
            bar.set_postfix(cases=sum(ends.values()), wrong=len(wrong))
    errors = ", ".join(f"{n:,} {what}" for what, n in ends.most_common() if what != "loaded")
    print(
        f"{_LOADER.value}, seed {_SEED.value}, {_SECONDS.value:.0f} s: {sum(ends.values()):,} cases, "
        f"{ends['loaded']:,} loaded, {errors}, raised at {len(lines) - 1} lines\n"
        f"most memory {most.memory:,} bytes, for {most.size:,} bytes of files; the process grew by at "
        f"most {growth.growth:,} bytes, for {growth.size:,}; the longest took {worst.seconds:.2f} s\n"
        f"{len(wrong)} violations"
    )
    sys.exit(len(wrong) > 0)


def _kept(folder: pathlib.Path, files: dict[str, Any]) -> pathlib.Path:
    folder.mkdir(parents=True, exist_ok=True)
    loaders.write(files, str(folder))
    return folder


if __name__ == "__main__":
    app.run(main)
