"""Traces a model again and again, and prints what is alive after; the same with dense parameters.

python -m tests.retraces --count=10000
python -m tests.retraces --count=10000 --ways=functions --nodense
"""

import multiprocessing

from absl import app, flags
from tqdm import tqdm

from tests.retraces import count

_COUNT = flags.DEFINE_integer("count", 10_000, "How many traces.", lower_bound=10)
WAYS = ["functions", "shapes"]
_WAYS = flags.DEFINE_multi_enum("ways", WAYS, WAYS, "What is new each time.")
_DENSE = flags.DEFINE_bool("dense", True, "Whether dense parameters are measured, too.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    points = sorted({_COUNT.value // 10, _COUNT.value // 2, _COUNT.value})
    context = multiprocessing.get_context("spawn")
    print("| new | parameters | traces | of this library | jaxprs | objects | process |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for way in _WAYS.value:
        for dense in (True, False) if _DENSE.value else (False,):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=count.work, args=(dense, way, _COUNT.value, points, sender)
            )
            process.start()
            sender.close()
            kind = "dense" if dense else "implicit"
            with tqdm(total=_COUNT.value, disable=None, desc=f"{way}, {kind}") as bar:
                done = 0
                while done < _COUNT.value:
                    before, (done, alive) = done, receiver.recv()
                    if alive:
                        print(f"| {way} | {kind} | {done:,} | {_row(alive)} |", flush=True)
                    bar.update(done - before)
            process.join()


def _row(alive: count.Alive) -> str:
    counts = f"{alive.objects:,} | {alive.jaxprs:,} | {alive.everything:,}"
    return f"{counts} | {alive.resident / 1e6:,.1f} MB"


if __name__ == "__main__":
    app.run(main)
