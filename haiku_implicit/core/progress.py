"""Progress bars for long work, in a terminal and with tqdm, which is optional."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from haiku_implicit.core.messages import printable

# In seconds. Shorter work shows no bar.
_DELAY = 1.0


@contextlib.contextmanager
def bar(doing: str, total: int | None) -> Iterator[Callable[..., Any]]:
    """Shows a bar on stderr, if stderr is a terminal.

    Args:
      doing: the label of the bar.
      total: the number of steps, or None if it is unknown.

    Yields:
      `run(name, fun, *args)`, which shows the name, and runs `fun(*args)` as the next step.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        tqdm = None
    if tqdm is None:  # not in the handler, which would chain an error of `fun` to the ImportError
        yield lambda name, fun, *args: fun(*args)
        return
    # Shows each step, since a long one may follow right after a short one.
    often: dict[str, Any] = dict(miniters=0, mininterval=0)
    with tqdm(desc=doing, total=total, leave=False, disable=None, delay=_DELAY, **often) as shown:
        done = 0

        def run(name: str, fun: Callable[..., Any], *args: Any) -> Any:
            nonlocal done
            shown.set_postfix_str(printable(name), refresh=False)
            shown.update(done)
            done = 1
            result = fun(*args)
            # JAX may go on computing after a call returns, and the bar would be ahead of it.
            return result if shown.disable else jax.block_until_ready(result)

        yield run
