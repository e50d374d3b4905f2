"""`Mox`, a module expression, and what is different between two."""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from haiku_implicit.files.replacing import write_text
from haiku_implicit.mox import (
    differences,
    dot,
    edit,
    extract,
    html,
    outline,
    parts,
    view,
)
from haiku_implicit.mox.interface import Path
from haiku_implicit.mox.program import Program, checked
from haiku_implicit.mox.replacement import Replacement, after, around, before, instead
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
        (the last part of its path), `path` (the full one, as in the parameters, in stacks of layers
        too), `method`, `inputs`, `outputs`, and the arguments that it was constructed with. An equation
        is an element named after its primitive, with its parameters as attributes; one that calls a
        function has its `name`. What is False or None is no attribute, so that `[@with_bias]` and
        `[not(@with_bias)]` say what they seem to. A sequence of one value, such as a stride `(2, 2)`,
        is written as this value; `stride.given` has it as it is.
        An argument of a constructor that is called `name`, `type`, `path` or `method` is
        `arg.name` and so on.

        Args:
          xpath: an expression of XPath 1.0.
          constructors: whether calls of `__init__` are elements, too.

        Returns:
          A list of nodes, or of texts for attributes; or a number, a text or a boolean.

        Raises:
          ValueError: if it is not an XPath, or compares an attribute with the text 'true' or 'false'.
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

    def xml(self) -> str:
        """The tree as XML: what queries see. It is not a file format; see `save`.

        Raises:
          ImportError: without lxml.
        """
        return self._view.text()

    @functools.cached_property
    def _view(self) -> view.View:
        return view.View(self.body)

    @functools.cached_property
    def _whole_view(self) -> view.View:
        return view.View(self.body, constructors=True)

    def show(self, depth: int | None = None) -> str:
        """The expression as text: a line for each call of a module, and totals at the end.

        A line has the name of the module, its class, the shapes of arguments and results, and how many
        parameters it reads. Modules that follow one another and differ only by the numbers in their
        names are one line, as are repeated groups of modules. A loop or a branch with modules in it has
        a line, too. `str(mox)`, and so `print(mox)`, is this to the depth at which it stays short.

        Args:
          depth: how many levels of modules to show; None for all.

        Raises:
          ValueError: if `depth` is not a number of levels.

        Example:
          >>> import haiku as hk, jax.numpy as jnp
          >>> from haiku_implicit.mox import make_mox
          >>> mox = make_mox(hk.transform(lambda x: hk.nets.MLP([8, 8, 8, 3])(x)))(jnp.ones((2, 8)))
          >>> print(mox)
          model: f32[2,8] -> f32[2,3]
            mlp: MLP  f32[2,8] -> f32[2,3]  243 parameters
              linear_{0..2} × 3: Linear  f32[2,8] -> f32[2,8]  72 parameters each
              linear_3: Linear  f32[2,8] -> f32[2,3]  27 parameters
          243 parameters (972 B), ... equations, 966 flop
        """
        return outline.text(self._outline, outline.Sizes(self.interface), depth)

    def __str__(self) -> str:
        return outline.short_text(self._outline, outline.Sizes(self.interface))

    def __repr__(self) -> str:
        own, sizes = self._outline, outline.Sizes(self.interface)
        return f"<{type(self).__name__}: {own.shapes}: {outline.totals(own, sizes)}>"

    def to_html(
        self,
        path: str | os.PathLike[str] | None = None,
        values: Mapping[str, Any] | None = None,
    ) -> str:
        """The expression as a page: a tree of modules that folds, with a search box and colors.

        The page needs nothing else, and no network. For each module it shows the class, the shapes,
        the parameters that it reads and their bytes as dense arrays, and the floating-point operations
        (`haiku_implicit.mox.flops` says how they are counted), and below it its path, its equations and
        its parameters. A search without a slash looks at names, classes and primitives, with one at
        paths.

        Args:
          path: the file to write; None for none.
          values: numbers by the path of a module (`mlp/~/linear_0`) or of a parameter
            (`mlp/~/linear_0/w`), to be shown in color, the error of a quantization, say. A module
            without one has the largest of those in it. By default bytes of parameters are shown.

        Returns:
          The page.

        Raises:
          ValueError: if the model has no such path, or a value is not a number.
          TypeError: if `values` is not a dictionary.

        Example:
          >>> import haiku as hk, jax.numpy as jnp
          >>> from haiku_implicit.mox import make_mox
          >>> mox = make_mox(hk.transform(lambda x: hk.nets.MLP([8, 3])(x)))(jnp.ones((2, 4)))
          >>> page = mox.to_html(values={"mlp/~/linear_0/w": 0.02, "mlp/~/linear_1/w": 0.05})
          >>> page[:15], page.count("<details")
          ('<!DOCTYPE html>', 3)
        """
        if not isinstance(values, Mapping | None):
            raise TypeError(
                "values: expected a dictionary of numbers by the path of a module or a parameter, got "
                f"{type(values).__name__}"
            )
        sizes = outline.Sizes(self.interface)
        page = html.page(self._outline, sizes, values)
        if path is not None:
            write_text(path, page)
        return page

    def to_dot(self, depth: int | None = None) -> str:
        """The expression as a graph, in the language of Graphviz (`dot -Tsvg`).

        Boxes are equations, with the names of the parameters that they read, and clusters modules.
        Lines are the values that go from one to another; those of state that is returned are left out.

        Args:
          depth: how many levels of modules to draw, of which the last ones are boxes; None for all.

        Raises:
          ValueError: if `depth` is not a number of levels.

        Example:
          >>> import haiku as hk, jax.numpy as jnp
          >>> from haiku_implicit.mox import make_mox
          >>> mox = make_mox(hk.transform(lambda x: hk.nets.MLP([8, 3])(x)))(jnp.ones((2, 4)))
          >>> print(mox.to_dot(depth=1))
          digraph model {
            node [shape="box", fontname="sans-serif", fontsize="10"];
            graph [fontname="sans-serif", fontsize="10"];
            n0 [label="x", shape="ellipse"];
            n1 [label="mlp\\nMLP"];
            n2 [label="result", shape="ellipse"];
            n0 -> n1;
            n1 -> n2;
          }
          <BLANKLINE>
        """
        return dot.dot(self.body, self.interface, depth)

    def _repr_html_(self) -> str:
        return html.frame(self.to_html())

    @functools.cached_property
    def _outline(self) -> outline.Row:
        return outline.outline(self.body, self.interface, self._params)

    @property
    def _params(self) -> dict[Any, Path]:
        return {v: path for path, slot in self.interface.params.items() for v in slot.atoms}

    def __getitem__(self, pattern: str) -> list[Node]:
        """The calls of modules whose path matches a glob: `mox['**/linear_*']`.

        `*` stands for anything within a part of the path, `**` for any number of parts. Other methods
        and properties of a module (`initial_state`, `embeddings`) are left out if the expression calls
        the module itself; XPath finds them: `'//module_call[@method="initial_state"]'`.

        Raises:
          KeyError: if there is none. It names paths that are close.
        """
        return view.with_path(self.body, pattern)

    def select(self, what: type | Callable[[Node], Any]) -> list[Node]:
        """The calls of a class of modules (and those derived from it), or the nodes of a predicate.

        By class, other methods of a module are left out as by a glob.

        The calls of modules have `path` (the full one), `name`, `cls`, `type_name`, `method` and
        `config` (the arguments of the constructor), equations have `primitive`, `name` and `eqn`; both
        have `inputs` and `outputs`, whose `aval` is the shape and dtype.

        Args:
          what: a class of modules, or a function of a node that returns whether it is chosen.

        Raises:
          TypeError: for anything else.

        Example:
          >>> import haiku as hk, jax.numpy as jnp
          >>> from haiku_implicit.mox import make_mox
          >>> mox = make_mox(hk.transform(lambda x: hk.nets.MLP([8, 3])(x)))(jnp.ones((2, 4)))
          >>> mox.select(lambda node: getattr(node, "config", {}).get("output_size") == 3)
          [<mlp/~/linear_1: Linear: f32[2,8] -> f32[2,3]>]
          >>> mox.select(lambda node: node.name == "dot_general")[1:]
          [<dot_general: f32[2,8], f32[8,3] -> f32[2,3]>]
        """
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
            of nodes, a node, or a list of these. Of nodes within one another the outermost is replaced.
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
        return self._with(
            where, lambda site: instead(site.node, site.path, replacement), path, keep_unused
        )

    def wrap(self, where: view.Where, function: Callable[..., Any], *, path: Any = None) -> "Mox":
        """The expression with a function around nodes.

        Args:
          where: the nodes, as for `sub`.
          function: what is called with the original node, as a function, and the node's arguments. It
            may use Haiku, and call the original with other arguments of the same structure, shapes and
            dtypes. State is what the last call of the original leaves.
          path: as for `sub`.

        Returns:
          The new expression.

        Example:
          >>> import haiku as hk, jax.numpy as jnp
          >>> from haiku_implicit.mox import make_mox
          >>> mox = make_mox(hk.transform(lambda x: hk.nets.MLP([8, 8])(x)))(jnp.ones((2, 8)))
          >>> skips = mox.wrap(hk.Linear, lambda linear, x: x + linear(x))
        """
        return self._around(where, around, function, path)

    def insert_before(self, where: view.Where, function: Any, *, path: Any = None) -> "Mox":
        """The expression with a function in front of nodes.

        Args:
          where: the nodes, as for `sub`.
          function: a function, a module factory, a module expression or a transformed function. It is
            called with the node's positional arguments that are arrays or have arrays in them, and
            returns what is to be there in their place: a tuple where there are several.
          path: as for `sub`.
        """
        return self._around(where, before, function, path)

    def insert_after(self, where: view.Where, function: Any, *, path: Any = None) -> "Mox":
        """The expression with a function behind nodes.

        Args:
          where: the nodes, as for `sub`.
          function: a function, a module factory, a module expression or a transformed function. It is
            called with what the node returns, and returns what is to be there in its place.
          path: as for `sub`.

        Example: adapters of Houlsby et al., 2019 (https://arxiv.org/abs/1902.00751).

          >>> import haiku as hk, jax, jax.numpy as jnp
          >>> from haiku_implicit.mox import make_mox
          >>> def adapter(x):
          ...   return x + hk.Linear(x.shape[-1], name='up')(jax.nn.gelu(hk.Linear(2, name='down')(x)))
          >>> mox = make_mox(hk.transform(lambda x: hk.nets.MLP([8, 8])(x)))(jnp.ones((2, 8)))
          >>> new = mox.insert_after(hk.Linear, adapter)
          >>> sorted(new.init(jax.random.key(0), jnp.ones((2, 8))))[1:3]
          ['mlp/~/linear_0/down', 'mlp/~/linear_0/up']
        """
        return self._around(where, after, function, path)

    def parameters(self, where: view.Where) -> list[str]:
        """The parameters that nodes read: `module/name` of each.

        A module's are those that it, or what is in it, reads otherwise than through its arguments: if
        it is applied to a parameter of another module (learned queries), that one is an input. So it is
        for the equations in it. What a module hands to a method of its own, or below it, stays its own.
        An equation outside of modules reads what it is given.

        Args:
          where: the nodes, as for `sub`.

        Example:
          >>> import haiku as hk, jax, jax.numpy as jnp, haiku_implicit as hki
          >>> from haiku_implicit.mox import make_mox
          >>> model = hk.transform(lambda x: hk.nets.MLP([8, 3])(x))
          >>> x = jnp.ones((2, 4))
          >>> wide = make_mox(model)(x).parameters('//module_call[@output_size > 5]')
          >>> wide
          ['mlp/~/linear_0/b', 'mlp/~/linear_0/w']
        """
        return parts.read_of(self, self.interface.params, view.find(self, where))

    def states(self, where: view.Where) -> list[str]:
        """The state that nodes read or write: `module/name` of each entry.

        Args:
          where: the nodes, as for `sub`.

        Example:
          >>> import haiku as hk, jax.numpy as jnp
          >>> from haiku_implicit.mox import make_mox
          >>> model = hk.transform_with_state(lambda x: hk.ExponentialMovingAverage(0.9)(x))
          >>> make_mox(model)(jnp.ones(3)).states('exponential_moving_average')
          ['exponential_moving_average/average', 'exponential_moving_average/counter',
           'exponential_moving_average/hidden']
        """
        return parts.states_of(self, view.find(self, where))

    def hidden_outputs(self, node: Any) -> tuple[Any, ...]:
        """The variables that a call of a module defines and does not return, but others read.

        They are those of new state, and of values that the model keeps in a Python variable. (What a
        call reads otherwise than through its arguments is its attribute `captured`.)

        Args:
          node: a call, as `query` returns it.
        """
        return parts.hidden_outputs_of(self, node)

    def taps(self, where: view.Where) -> "Mox":
        """The expression that returns values within it, too.

        Args:
          where: the nodes, as for `sub`; those in one another as well.

        Returns:
          The expression of a function that returns the model's results and a dict: for each node, by
          its path, what it returns. More calls of one module have `:1` and so on behind the path. What
          is in a loop has one more axis in front, of its steps. Derivatives go through the values.

        Raises:
          ValueError: for nodes in branches, which may not run, or in `while` loops, whose steps are not
            known in number. The error says what to do instead.

        Example:
          >>> import haiku as hk, jax, jax.numpy as jnp
          >>> from haiku_implicit.mox import make_mox
          >>> model = hk.transform(lambda x: hk.nets.MLP([8, 3])(x))
          >>> x = jnp.ones((2, 4))
          >>> params = model.init(jax.random.key(0), x)
          >>> out, values = make_mox(model)(x).taps('**/linear_*').apply(params, None, x)
          >>> {path: value.shape for path, value in values.items()}
          {'mlp/~/linear_0': (2, 8), 'mlp/~/linear_1': (2, 3)}
        """
        return cast(Mox, parts.with_taps(self, view.find(self, where)))

    def truncate(self, where: view.Where) -> "Mox":
        """The expression up to one node, whose value is the result: a model's features.

        What comes after it is left out, with its parameters. Of a node in a loop, the values of all
        steps are the result.

        Args:
          where: the node, as for `sub`.
        """
        return cast(Mox, parts.truncated(self, self._one(where)))

    def extract(self, where: view.Where, *, layer: int | Sequence[int] | None = None) -> "Mox":
        """One call of a module as an expression of its own, of the arguments of the module.

        Its `apply` takes the parameters of the whole model as well, and reads its own.

        Args:
          where: the call, as for `sub`.
          layer: which layer is meant of a stack (a scan) that the call is in, from 0 on; of stacks in
            one another a number for each, the outermost first.

        Raises:
          ValueError: if the module reads what is computed from the model's arguments beside its own, or
            what a loop carries from step to step.

        Example: the second of three layers, which are one stack in the parameters.

          >>> import haiku as hk, jax, jax.numpy as jnp
          >>> from haiku_implicit.mox import make_mox
          >>> model = hk.transform(lambda x: hk.layer_stack(3)(hk.Linear(4))(x))
          >>> x = jnp.ones((2, 4))
          >>> params = model.init(jax.random.key(0), x)
          >>> second = make_mox(model)(x).extract(hk.Linear, layer=1)
          >>> w = params["__layer_stack_no_per_layer/linear"]["w"]
          >>> bool(jnp.allclose(second.apply(params, None, x), x @ w[1]))
          True
        """
        return cast(Mox, extract.extracted(self, self._one(where), layer))

    def patch(self, where: view.Where, value: Any) -> "Mox":
        """The expression with other values in the place of what nodes return.

        Args:
          where: the nodes, as for `sub`.
          value: an array, or a tree of arrays as the node returns; or a function of what it returns. In
            a loop an array is that of one step, and the same for all; a function sees each step.

        Example: the gradient with respect to a value within a model.

          >>> import haiku as hk, jax, jax.numpy as jnp
          >>> from haiku_implicit.mox import make_mox
          >>> model = hk.transform(lambda x: hk.nets.MLP([8, 3])(x))
          >>> x = jnp.ones((2, 4))
          >>> params, mox = model.init(jax.random.key(0), x), make_mox(model)(x)
          >>> def loss(change):
          ...   return mox.patch('**/linear_0', lambda h: h + change).apply(params, None, x).sum()
          >>> jax.grad(loss)(jnp.zeros((2, 8))).shape
          (2, 8)
        """
        if callable(value):
            return self.insert_after(where, value)
        return self._with(
            where,
            lambda site: instead(site.node, site.path, lambda *args, **kwargs: value),
            None,
            True,
        )

    def share(self, taking: Mapping[str, str]) -> "Mox":
        """The expression in which modules have the parameters of others.

        Args:
          taking: by the path of a module, the path of the one whose parameters it takes. If that takes
            those of a third one, so does the first.

        Raises:
          ValueError: if there is no such module, or its parameters have other names, shapes or dtypes;
            if a module would take its own, directly or by way of others, or those of two.
          TypeError: if `taking` is not a dictionary.

        Example:
          >>> import haiku as hk, jax, jax.numpy as jnp
          >>> from haiku_implicit.mox import make_mox
          >>> x = jnp.ones((2, 8))
          >>> mox = make_mox(hk.transform(lambda x: hk.nets.MLP([8, 8])(x)))(x)
          >>> list(mox.share({"mlp/~/linear_1": "mlp/~/linear_0"}).init(jax.random.key(0), x))
          ['mlp/~/linear_0']
        """
        if not isinstance(taking, Mapping):
            raise TypeError(
                "taking: expected a dictionary, by the path of a module the path of the one whose "
                f"parameters it takes, got {type(taking).__name__}"
            )
        return cast(Mox, parts.shared(self, taking))

    def rename(self, where: view.Where, name: str | Callable[[str], str]) -> "Mox":
        """The expression with other names for modules, and for their parameters and state.

        Args:
          where: calls of modules, as for `sub`. All calls of one module have one name.
          name: the new last part of the path, the whole new path, or a function of the old one.

        Raises:
          ValueError: if two modules would have one name.
        """
        return cast(Mox, parts.renamed(self, view.find(self, where), name))

    def _one(self, where: view.Where) -> Node:
        sites = edit.sites_of(self.body, view.find(self, where))
        if len(sites) > 1:
            found = ", ".join(repr(site.node) for site in sites[:5])
            raise ValueError(
                f"where: {where!r} is {len(sites)} nodes, and has to be one: {found}. Give one of them"
            )
        return sites[0].node

    def _around(self, where: view.Where, kind: Any, function: Any, path: Any) -> "Mox":
        def put(site: edit.Site) -> Replacement:
            return kind(site.place.body, site.node, site.path, function)

        return self._with(where, put, path)

    def _with(
        self,
        where: view.Where,
        put: Callable[[edit.Site], Replacement],
        path: str | Callable[[Node], str] | None,
        keep_unused: bool = False,
    ) -> "Mox":
        return cast(Mox, edit.replace(self, view.find(self, where), put, path, keep_unused))


def map_mox(fun: Callable[[Node], Any], mox: Mox) -> list[Any]:
    """What a function gives for each node of a module expression, in the order in which they run."""
    checked("map_mox(fun, mox)", mox)
    return [fun(node) for node in mox.select(lambda node: True)]


def diff(a: Mox, b: Mox) -> str:
    """What is different between two module expressions, as lines.

    Arguments, results, parameters and state are compared, and nodes: calls of modules by path, class
    and shapes, equations by primitive, shapes, parameters, operands and the constants among these. Not
    compared are `init`, what modules were constructed with, and derivative rules of functions.

    Args:
      a: a module expression.
      b: another one.

    Returns:
      Lines that begin with `-` for what only `a` has, and with `+` for what only `b` has. If a node is
      in both and reads other values, the lines say which. An empty text if there is no difference.

    Raises:
      TypeError: if these are not module expressions.

    Example:
      >>> import haiku as hk, jax, jax.numpy as jnp
      >>> from haiku_implicit.mox import diff, make_mox
      >>> mox = make_mox(hk.transform(lambda x: jnp.sin(hk.Linear(3)(x))))(jnp.ones((2, 4)))
      >>> print(diff(mox, mox.sub('//sin', jnp.cos)))
      -<sin: f32[2,3] -> f32[2,3]>
      +<sin: function: f32[2,3] -> f32[2,3]>
      +  <cos: f32[2,3] -> f32[2,3]>
      >>> twice = make_mox(hk.transform(lambda x: x * 2.0))(jnp.ones(3))
      >>> thrice = make_mox(hk.transform(lambda x: x * 3.0))(jnp.ones(3))
      >>> print(diff(twice, thrice))
      -<mul: f32[3], f32[] -> f32[3]>: operand 1 is 2.0
      +<mul: f32[3], f32[] -> f32[3]>: operand 1 is 3.0
    """
    for mox in (a, b):
        checked("diff(mox, other_mox)", mox)
    return "\n".join(differences.differences(a, b))
