"""`Mox`, a module expression, and `diff`, which compares two."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast, overload

from haiku_implicit.core.messages import type_error, value_error
from haiku_implicit.files.replacing import write_text
from haiku_implicit.mox.edits import edit, parts
from haiku_implicit.mox.edits.replacement import after, around, before, instead
from haiku_implicit.mox.program.program import Piece, Program, checked
from haiku_implicit.mox.program.sites import Site, sites_of
from haiku_implicit.mox.program.tree import Atom, ModuleCall, Node
from haiku_implicit.mox.show import differences, dot, html, outline, view

R = TypeVar("R")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Mox(Program):
    """A module expression: the program of a Haiku model, as a tree of its modules' calls.

    Attributes:
      body: the tree.
      interface: the arguments and results.
      init: the model's `init`.
      implicit: whether the model makes implicit arrays itself.
    """

    def query(self, xpath: str, *, constructors: bool = False) -> Any:
        """Finds nodes of the tree by XPath, in the order in which they run.

        A call of a module is an element `module_call` with the attributes `type` (its class), `name`
        (the last name of its path), `path` (the full path, as in the parameters, also in stacks of
        layers), `method`, `inputs`, `outputs`, and the arguments of its constructor. An equation is an
        element named after its primitive, with its parameters as attributes; an equation that calls a
        function also has the `name` of the function. False and None are left out, so `[@with_bias]` and
        `[not(@with_bias)]` mean what they say. A sequence of equal values, such as a stride `(2, 2)`,
        is written as one value; `stride.given` is the whole sequence. A constructor argument called
        `name`, `type`, `path` or `method` is the attribute `arg.name` and so on.

        Args:
          xpath: an expression of XPath 1.0.
          constructors: whether calls of `__init__` are elements, too.

        Returns:
          A list of nodes, or of texts for attributes; or a number, a text or a boolean.

        Raises:
          ValueError: if it is not an XPath, or compares an attribute with the text 'true' or 'false'.
          ImportError: if lxml is missing.

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
        """The tree as XML, in the form that queries see. It is not a file format; see `save`.

        Raises:
          ImportError: if lxml is missing.
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
        parameters it reads. Consecutive modules that differ only by the numbers in their names share
        one line, and repeated groups of modules are shown once. A loop or a branch with modules in it
        has a line, too. `str(mox)`, and so `print(mox)`, limits the depth to keep the text short.

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
        return outline.text(self._outline, depth)

    def __str__(self) -> str:
        return outline.short_text(self._outline)

    def __repr__(self) -> str:
        own = self._outline
        return f"<{type(self).__name__}: {own.shapes}: {outline.totals(own)}>"

    def to_html(
        self, path: str | os.PathLike[str] | None = None, values: Mapping[str, Any] | None = None
    ) -> str:
        """The expression as an HTML page: a tree that folds, with a search box and colors.

        The page needs no other files and no network. For each module it shows the class, the shapes,
        the parameters that it reads, their bytes as dense arrays, and the floating-point operations
        (`haiku_implicit.mox.show.flops` says how they are counted); below these, the path, the
        equations and the parameters. A search text with a slash is compared with paths, other texts
        with names, classes and primitives.

        Args:
          path: the file to write; None to write no file.
          values: numbers to show in color, by the path of a module (`mlp/~/linear_0`) or a parameter
            (`mlp/~/linear_0/w`), such as quantization errors. A module without a number shows the
            largest number in it. By default, the page shows the bytes of parameters.

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
            raise type_error(
                "values: expected a dictionary of numbers by the path of a module or a parameter, got "
                f"{type(values).__name__}"
            )
        page = html.page(self._outline, values)
        if path is not None:
            write_text(path, page)
        return page

    def to_dot(self, depth: int | None = None) -> str:
        """The expression as a graph, in Graphviz's DOT language (`dot -Tsvg`).

        Boxes are equations, with the names of the parameters that they read; clusters are modules.
        Lines are values that pass from one to another; returned state is left out.

        Args:
          depth: how many levels of modules to draw, the last level as boxes; None for all.

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
        return outline.outline(self.body, self.interface)

    def __getitem__(self, pattern: str) -> list[ModuleCall]:
        """Finds the calls of modules whose path matches a glob: `mox['**/linear_*']`.

        `*` stands for anything within a part of the path, `**` for any number of parts. Other methods
        and properties of a module (`initial_state`, `embeddings`) are left out if the expression calls
        the module itself; XPath finds them: `'//module_call[@method="initial_state"]'`.

        Raises:
          KeyError: if no path matches. The error names similar paths.
        """
        return view.with_path(self.body, pattern)

    @overload
    def select(self, what: type) -> list[ModuleCall]: ...

    @overload
    def select(self, what: Callable[[Node], Any]) -> list[Node]: ...

    def select(self, what: type | Callable[[Node], Any]) -> Sequence[Node]:
        """Finds the calls of a class of modules (or a derived class), or the nodes of a predicate.

        A search by class leaves out other methods of a module, as a glob does.

        Calls of modules have `path` (the full path), `name`, `cls`, `type_name`, `method` and `config`
        (the arguments of the constructor). Equations have `primitive`, `name` and `eqn`. Both have
        `inputs` and `outputs`, whose `aval` is the shape and dtype.

        Args:
          what: a class of modules, or a function of a node that returns whether to choose it.

        Raises:
          TypeError: if `what` is neither a class nor a function.

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
    ) -> Mox:
        """Replaces nodes, in a new expression.

        Args:
          where: the nodes: an XPath, a glob over the paths of modules, a class of modules, a predicate
            of nodes, a node, or a list of these. If one node is inside another, the outermost is
            replaced.
          replacement: takes the node's arguments. A function, which may use Haiku; a class of modules,
            which gets those constructor arguments of the old module that it takes; a function without
            arguments that makes a module; a module expression; a transformed function. None stands for
            a function that returns its argument, and so drops the node.
          path: the path of the replacement's modules and parameters, or a function of the node that
            returns it. By default below the path of the module; for an equation, below the module's
            path and the equation's name. Calls of one module share the new parameters.
          keep_unused: whether to keep parameters and state that nothing reads any more.

        Returns:
          The new expression. Its `init` returns old and new parameters.

        Raises:
          ValueError: if no node is found; if the replacement returns other structures, shapes or
            dtypes; if it makes parameters that the model already has.

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
        return self._edited(where, instead, replacement, path, keep_unused)

    def wrap(self, where: view.Where, function: Callable[..., Any], *, path: Any = None) -> Mox:
        """Wraps nodes in a function, in a new expression.

        Args:
          where: the nodes, as for `sub`.
          function: takes the original node, as a function, and the node's arguments. It may use Haiku,
            and call the original with other arguments of the same structure, shapes and dtypes. The
            state is the state after the last call of the original.
          path: as for `sub`.

        Returns:
          The new expression.

        Example:
          >>> import haiku as hk, jax.numpy as jnp
          >>> from haiku_implicit.mox import make_mox
          >>> mox = make_mox(hk.transform(lambda x: hk.nets.MLP([8, 8])(x)))(jnp.ones((2, 8)))
          >>> skips = mox.wrap(hk.Linear, lambda linear, x: x + linear(x))
        """
        return self._edited(where, around, function, path)

    def insert_before(self, where: view.Where, function: Any, *, path: Any = None) -> Mox:
        """Inserts a function in front of nodes, in a new expression.

        Args:
          where: the nodes, as for `sub`.
          function: a function, a module factory, a module expression or a transformed function. It
            takes the node's positional arguments that are arrays or have arrays in them, and returns
            new values for them: a tuple if there are several.
          path: as for `sub`.
        """
        return self._edited(where, before, function, path)

    def insert_after(self, where: view.Where, function: Any, *, path: Any = None) -> Mox:
        """Inserts a function behind nodes, in a new expression.

        Args:
          where: the nodes, as for `sub`.
          function: a function, a module factory, a module expression or a transformed function. It
            takes the node's result, and returns a new value for it.
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
        return self._edited(where, after, function, path)

    def parameters(self, where: view.Where) -> list[str]:
        """The parameters that nodes read, each as `module/name`.

        A module's parameters are the ones that it, or a node in it, reads otherwise than through its
        arguments. If a module is applied to a parameter of another module (learned queries), this
        parameter is an input, also for the equations in the module. Parameters that a module passes to
        its own methods, or to modules below it, stay its own. An equation outside of modules reads all
        parameters among its operands.

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
        """The state that nodes read or write, each entry as `module/name`.

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

    def hidden_outputs(self, node: Node) -> tuple[Atom, ...]:
        """The variables that a call of a module defines and does not return, but other nodes read.

        They are new state, and values that the model keeps in a Python variable. (The attribute
        `captured` has the variables that a call reads otherwise than through its arguments.)

        Args:
          node: a call, as `query` returns it.
        """
        return parts.hidden_outputs_of(self, node)

    def taps(self, where: view.Where) -> Mox:
        """Adds the values of nodes to the results, in a new expression.

        Args:
          where: the nodes, as for `sub`; nested nodes, too.

        Returns:
          The expression of a function that returns the model's results and a dict of the nodes' results
          by path. Further calls of one module have `:1` and so on behind the path. The value of a node
          in a loop has one more axis in front, for the steps. Derivatives go through the values.

        Raises:
          ValueError: for nodes in branches, which may not run, or in `while` loops, whose number of
            steps is not known. The error says what to do instead.

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

    def truncate(self, where: view.Where) -> Mox:
        """The expression up to one node, whose value is the result: a model's features.

        Later nodes are left out, with their parameters. For a node in a loop, the result is the values
        of all steps.

        Args:
          where: the node, as for `sub`.
        """
        return cast(Mox, parts.truncated(self, self._one(where)))

    def extract(self, where: view.Where, *, layer: int | Sequence[int] | None = None) -> Mox:
        """Extracts one call of a module as an expression with the arguments of the module.

        Its `apply` also takes the parameters of the whole model, and reads its own.

        Args:
          where: the call, as for `sub`.
          layer: the layer, from 0 on, if the call is in a stack (a scan); for nested stacks, a number
            for each, the outermost first.

        Raises:
          ValueError: if the module reads, otherwise than through its arguments, values that are
            computed from the model's arguments, or values that a loop carries from step to step.

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
        return cast(Mox, parts.extracted(self, self._one(where), layer))

    def patch(self, where: view.Where, value: Any) -> Mox:
        """Replaces the results of nodes, in a new expression.

        Args:
          where: the nodes, as for `sub`.
          value: an array, or a tree of arrays like the node's result; or a function of the result. In a
            loop, an array is the value of one step, and is used for all; a function sees each step.

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
        return self._edited(where, instead, lambda *args, **kwargs: value, None, keep_unused=True)

    def share(self, taking: Mapping[str, str]) -> Mox:
        """Lets modules use the parameters of other modules, in a new expression.

        Args:
          taking: maps the path of a module to the path of the module whose parameters it takes. If that
            one takes the parameters of a third module, so does the first.

        Raises:
          ValueError: if a module does not exist, or its parameters have other names, shapes or dtypes;
            if a module would take its own parameters, directly or through others, or the ones of two
            modules.
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
            raise type_error(
                "taking: expected a dictionary, by the path of a module the path of the one whose "
                f"parameters it takes, got {type(taking).__name__}"
            )
        return cast(Mox, parts.shared(self, taking))

    def rename(self, where: view.Where, name: str | Callable[[str], str]) -> Mox:
        """Renames modules, and their parameters and state, in a new expression.

        Args:
          where: calls of modules, as for `sub`. All calls of one module get the same name.
          name: the new last name of the path, the whole new path, or a function of the old path.

        Raises:
          ValueError: if two modules would have the same name.
        """
        return cast(Mox, parts.renamed(self, view.find(self, where), name))

    def _one(self, where: view.Where) -> Node:
        sites = sites_of(self.body, view.find(self, where))
        if len(sites) > 1:
            found = ", ".join(repr(site.node) for site in sites[:5])
            raise value_error(
                f"where: {where!r} is {len(sites)} nodes, and has to be one: {found}. Give one of them"
            )
        return sites[0].node

    def _edited(
        self,
        where: view.Where,
        kind: Callable[[Site, Any], Piece],
        function: Any,
        path: str | Callable[[Node], str] | None,
        keep_unused: bool = False,
    ) -> Mox:
        def piece_of(site: Site) -> Piece:
            return kind(site, function)

        nodes = view.find(self, where)
        return cast(Mox, edit.replace(self, nodes, piece_of, path, keep_unused))


def map_mox(fun: Callable[[Node], R], mox: Mox) -> list[R]:
    """Applies a function to each node of a module expression, in the order in which they run."""
    checked("map_mox(fun, mox)", mox)
    return [fun(node) for node in mox.select(lambda node: True)]


def diff(a: Mox, b: Mox) -> str:
    """Compares two module expressions, and returns the differences as lines.

    It compares arguments, results, parameters, state, and nodes: calls of modules by path, class and
    shapes; equations by primitive, shapes, parameters, and operands with their constants. It does not
    compare `init`, constructor arguments of modules, or derivative rules of functions.

    Args:
      a: a module expression.
      b: another one.

    Returns:
      Lines that begin with `-` for parts of `a` only, and with `+` for parts of `b` only. If a node is
      in both and reads other values, the lines name these. An empty text if the two are equal.

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
