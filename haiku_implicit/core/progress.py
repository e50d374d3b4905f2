"""Progress bars on long work: where tqdm is installed, which is optional, and somebody looks on."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from haiku_implicit.core.printable import printable

# Seconds. Work that takes less shows no bar.
_DELAY = 1.0


@contextlib.contextmanager
def bar(doing: str, total: int | None) -> Iterator[Callable[..., Any]]:
    """A bar on stderr, if that is a terminal.

    Args:
      doing: what the bar is labeled with.
      total: how many steps there are; None where that is not known.

    Yields:
      `run(name, fun, *args)`, which is `fun(*args)` as the next step, and shows its name.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        tqdm = None
    if (
        tqdm is None
    ):  # not in the handler: an error of `fun` would be shown below that of the import
        yield lambda name, fun, *args: fun(*args)
        return
    # Each step is shown: the one that takes long may come right after one that does not.
    often: dict[str, Any] = dict(miniters=0, mininterval=0)
    with tqdm(desc=doing, total=total, leave=False, disable=None, delay=_DELAY, **often) as shown:
        done = 0

        def run(name: str, fun: Callable[..., Any], *args: Any) -> Any:
            nonlocal done
            shown.set_postfix_str(printable(name), refresh=False)
            shown.update(done)
            done = 1
            result = fun(*args)
            # JAX may compute on after a call has returned, and the bar would be ahead of it.
            return result if shown.disable else jax.block_until_ready(result)

        yield run
