"""`Mox`, a module expression, with `make_mox`, `eval_mox` and `to_transformed`."""

import dataclasses
import difflib
import functools
from collections.abc import Callable
from typing import Any, cast

import haiku as hk
import jax

from haiku_implicit.mox import edit, view
from haiku_implicit.mox.program import ANY_KEY, Program, program_of, with_shapes
from haiku_implicit.mox.replacement import function_for
from haiku_implicit.mox.tree import Node


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Mox(Program):
    """A module expression: the program of a Haiku model, as a tree of its modules' calls.

    Attributes:
      body: the tree.
      interface: what goes in and comes out.
      init: the model's `init`.
      implicit: whether it is the program of a model that makes implicit arrays itself.
    """

    def query(self, xpath: str, *, constructors: bool = False) -> Any:
        """What an XPath finds in the tree, in the order in which it runs.

        A call of a module is an element `module_call` with the attributes `type` (its class), `name`
        (the last part of its path), `path`, `method`, `inputs`, `outputs`, and the arguments that it
        was constructed with. An equation is an element named after its primitive, with its parameters
        as attributes; one that calls a function has its `name`. What is False or None is no
        attribute, so that `[@with_bias]` and `[not(@with_bias)]` say what they seem to. A sequence of
        one value, such as a stride `(2, 2)`, is written as this value; `stride.given` has it as it is.
        An argument of a constructor that is called `name`, `type`, `path` or `method` is
        `arg.name` and so on.

        Args:
          xpath: an expression of XPath 1.0.
          constructors: whether calls of `__init__` are elements, too.

        Returns:
          A list of nodes, or of texts for attributes; or a number, a text or a boolean.

        Raises:
          ValueError: if it is not an XPath.
          ImportError: without lxml.

        Example:
          >>> import haiku as hk, jax.numpy as jnp
          >>> from haiku_implicit.mox import make_mox
          >>> mox = make_mox(hk.transform(lambda x: hk.nets.MLP([8, 3])(x)))(jnp.ones((2, 4)))
          >>> mox.query('//module_call[@type="Linear" and @output_size > 5]')
          [<mlp/~/linear_0: Linear: f32[2,4] -> f32[2,8]>]
          >>> mox.query('count(//dot_general)'), mox.query('//module_call/@name')
          (2.0, ['mlp', 'linear_0', 'linear_1'])
        """
        return (self._whole_view if constructors else self._view).query(xpath)

    @functools.cached_property
    def _view(self) -> view.View:
        return view.View(self.body)

    @functools.cached_property
    def _whole_view(self) -> view.View:
        return view.View(self.body, constructors=True)

    def __getitem__(self, pattern: str) -> list[Node]:
        """The calls of modules whose path matches a glob: `mox['**/linear_*']`.

        Raises:
          KeyError: if there is none.
        """
        found: list[Node] = [x for x in view.calls(self.body) if view.matches_glob(x.path, pattern)]
        if not found:
            paths = sorted({x.path for x in view.calls(self.body)})
            close = difflib.get_close_matches(pattern, paths) or paths[:5]
            raise KeyError(f"no module has the path {pattern!r}. There are {', '.join(close)}")
        return found

    def select(self, what: type | Callable[[Node], Any]) -> list[Node]:
        """The calls of a class of modules (and those derived from it), or the nodes of a predicate."""
        return view.select(self.body, what)

    def sub(
        self,
        where: view.Where,
        replacement: Any,
        *,
        path: str | Callable[[Node], str] | None = None,
        keep_unused: bool = False,
    ) -> "Mox":
        """The expression with something else in the place of nodes. The original is left as it is.

        Args:
          where: the nodes: an XPath, a glob over the paths of modules, a class of modules, a predicate
            of nodes, a node, or a list of nodes. Of nodes within one another the outermost is
            replaced.
          replacement: what is called with the node's arguments: a function, which may use Haiku; a
            class of modules, made with those of the old one's constructor arguments that it takes; a
            function of no arguments that makes a module; a module expression; a transformed function.
            None stands for a function that returns its argument, and so drops the node.
          path: where the replacement's modules and parameters are, or a function of the node. By
            default below the path of the module; for an equation, below its name in that of its
            module. Calls of one module share what is created.
          keep_unused: whether parameters and state that nothing reads any more are kept.

        Returns:
          The new expression. Its `init` gives the new parameters beside the old ones.

        Raises:
          ValueError: if there is no such node; if the replacement returns other structures, shapes or
            dtypes; if it makes parameters that the model has already.

        Example:
          >>> import haiku as hk, jax, jax.numpy as jnp
          >>> from haiku_implicit.mox import eval_mox, make_mox
          >>> model = hk.transform(lambda x: hk.nets.MLP([8, 3])(x))
          >>> x = jnp.ones((2, 4))
          >>> mox = make_mox(model)(x)
          >>> smooth = mox.sub('//custom_jvp_call[@name="relu"]', jax.nn.gelu)
          >>> smooth.query('count(//function)')
          1.0
        """
        nodes = view.find(self, where)
        if not nodes:
            raise ValueError(f"where: nothing in the expression is {where!r}")

        def function_of(site: edit.Site) -> edit.ArrayFunction:
            return function_for(site.node, replacement, site.path)

        new = edit.replace(self, nodes, function_of, path, keep_unused)
        return cast(Mox, new)


@dataclasses.dataclass(frozen=True)
class _Maker:
    """Makes module expressions of a transformed function: see `make_mox`."""

    transformed: Any

    def __call__(
        self, *args: Any, params: Any = None, state: Any = None, rng: Any = ANY_KEY, **kwargs: Any
    ) -> Mox:
        given = dict(params=params, state=state, rng=rng)
        program = program_of(self.transformed, args, kwargs, **given)
        return Mox(program.body, program.interface, program.init, program.implicit)


@dataclasses.dataclass(frozen=True)
class _MultiMaker:
    """The same for each function of a multi-transform.

    Attributes:
      transformed: the multi-transform.
      apply: its tree of functions, each of which makes the expression of one of them.
    """

    transformed: Any

    @functools.cached_property
    def apply(self) -> Any:
        has_state = isinstance(self.transformed, hk.MultiTransformedWithState)
        kind: Any = hk.TransformedWithState if has_state else hk.Transformed
        return jax.tree.map(
            lambda apply: _Maker(kind(self.transformed.init, apply)), self.transformed.apply
        )

    def __call__(
        self, *args: Any, params: Any = None, state: Any = None, rng: Any = ANY_KEY, **kwargs: Any
    ) -> Any:
        given = dict(params=params, state=state, rng=rng)
        given = with_shapes(self.transformed, args, kwargs, **given)
        return jax.tree.map(lambda make: make(*args, **given, **kwargs), self.apply)


def make_mox(transformed: Any) -> Callable[..., Any]:
    """Makes the module expression of a transformed Haiku function.

    A function with a derivative rule of its own keeps it. Only JAX's transformations *within* the
    model see such a rule with the model's modules, as in a jitted model.

    Args:
      transformed: what `hk.transform`, `hk.transform_with_state`, `hk.multi_transform`,
        `hk.multi_transform_with_state`, `hk.without_apply_rng` or `transform_implicit` returns.

    Returns:
      A function of the arguments of the Haiku function: arrays or `jax.ShapeDtypeStruct`s; anything
      else (flags, numbers, strings) becomes a part of the expression. It takes `params=`, `state=` and
      `rng=`, too; without them their shapes come from `init`, which takes longer than making.
      `rng=None` makes the expression of the model without a key.

      Of a multi-transform, it gives a tree of expressions, like `apply`. Its attribute `apply` is the
      tree of the functions that make one each: for functions of different arguments.

    Raises:
      TypeError: for anything else.

    Example:
      >>> import haiku as hk, jax, jax.numpy as jnp
      >>> from haiku_implicit.mox import eval_mox, make_mox
      >>> model = hk.transform(lambda x: hk.nets.MLP([8, 3])(x))
      >>> x = jnp.ones((2, 4))
      >>> mox = make_mox(model)(x)
      >>> params = model.init(jax.random.key(0), x)
      >>> bool((eval_mox(mox, params, None, x) == model.apply(params, None, x)).all())
      True

      Functions that share parameters, each with its own arguments:

      >>> def coder():
      ...   encoder, decoder = hk.Linear(2, name="encoder"), hk.Linear(4, name="decoder")
      ...   return lambda x: decoder(encoder(x)), (encoder, decoder)
      >>> coder = hk.multi_transform(coder)
      >>> params = coder.init(jax.random.key(0), x)
      >>> encode, decode = make_mox(coder).apply
      >>> encode(x, params=params).select(hk.Linear)
      [<encoder: Linear: f32[2,4] -> f32[2,2]>]
    """
    if isinstance(transformed, hk.MultiTransformed | hk.MultiTransformedWithState):
        return _MultiMaker(transformed)
    if not isinstance(transformed, hk.Transformed | hk.TransformedWithState):
        raise TypeError(
            "transformed: expected what hk.transform, hk.transform_with_state, hk.multi_transform or "
            f"transform_implicit returns, got {type(transformed).__name__}. A function is "
            "transformed first: make_mox(hk.transform(f))"
        )
    return _Maker(transformed)


def eval_mox(mox: Mox, *args: Any, **kwargs: Any) -> Any:
    """Runs a module expression: what the `apply` of its model gives, bit for bit.

    Compiled, it is the same program, but for loops that do nothing except hand a value through modules,
    which JAX would leave out. Called eagerly, each of its equations is a program of its own, where
    functions of `jax.numpy` are one: XLA may round a number there that it fuses with another here.

    Args:
      mox: the module expression.
      *args: as for the model's `apply`: parameters, state where there is one, the random key, and the
        arguments of the Haiku function, of the shapes that the expression was made with.
      **kwargs: as for `apply`.

    Returns:
      What `apply` returns.

    Raises:
      TypeError: if there are too few arguments, or too many.
      ValueError: if an argument is not what the expression was made for.
    """
    return mox.apply(*args, **kwargs)


def to_transformed(mox: Mox) -> hk.Transformed | hk.TransformedWithState:
    """A module expression as a transformed function again.

    Returns:
      `hk.Transformed`, or `hk.TransformedWithState` where the model has state. `apply` is that of
      `eval_mox`.
    """
    return mox.transformed()
