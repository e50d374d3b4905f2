"""The arguments and results of a module expression, as Haiku's trees and as flat lists of arrays."""

import collections
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Var

from haiku_implicit.core import transform
from haiku_implicit.core.array import dense_struct, is_implicit
from haiku_implicit.core.literals import as_literal
from haiku_implicit.core.messages import see, type_error, value_error
from haiku_implicit.core.transform import Static
from haiku_implicit.core.typing import Array, Aval, Key, Tree
from haiku_implicit.mox.program import marks
from haiku_implicit.mox.program.constants import identical, same_structure

# A module's name and the name of an entry.
Path = tuple[str, str]


class Slot(NamedTuple):
    """One argument or result: its structure, and the variables of its arrays."""

    tree: Static
    atoms: tuple[Any, ...]

    @property
    def filled(self) -> Tree:
        """The tree with the variables in it."""
        return self.tree.merge(self.atoms)

    def arrays_of(self, value: Any, label: str = "") -> list[Array]:
        """The arrays in a value for the slot, after checks: see `checked`."""
        return checked(label, self.tree, [v.aval for v in self.atoms], value)


# The fields of an interface, with their names in texts: first the arguments, then the results.
ARGUMENTS = dict(params="parameter", state="state", rng="rng", args="arguments")
RESULTS = dict(results="results", new_state="new state")
# The fields with a slot for each module and name.
ENTRIES = ("params", "state", "new_state")
# Stands for the path of another field's only slot.
WHOLE: Path = ("", "")

# The signature of a function that takes any arguments.
ANY_ARGUMENTS = inspect.signature(lambda *args, **kwargs: None)


@dataclasses.dataclass(frozen=True, eq=False)
class Interface:
    """The arguments and results of a module expression.

    Attributes:
      leading: the first arguments of `apply`: "params", "state", "rng", or some of these.
      signature: the signature of the Haiku function.
      params: the parameters.
      state: the state.
      rng: the random key.
      args: the arguments of the Haiku function, by name.
      results: its results.
      new_state: the returned state.
    """

    leading: tuple[str, ...]
    signature: inspect.Signature
    params: Mapping[Path, Slot]
    state: Mapping[Path, Slot]
    rng: Slot
    args: Slot
    results: Slot
    new_state: Mapping[Path, Slot]

    def slots(self, field: str) -> Mapping[Path, Slot]:
        """The slots of a field, by path; the only slot of a field has the path `WHOLE`."""
        found = getattr(self, field)
        return found if field in ENTRIES else {WHOLE: found}

    def _atoms(self, fields: Iterable[str]) -> tuple[Any, ...]:
        return tuple(v for field in fields for x in self.slots(field).values() for v in x.atoms)

    @property
    def invars(self) -> tuple[Any, ...]:
        """The variables of all arguments, in their order."""
        return self._atoms(ARGUMENTS)

    @property
    def returns(self) -> tuple[Any, ...]:
        """The variables of all results, in their order."""
        return self._atoms(RESULTS)

    @property
    def inputs(self) -> tuple[Var, ...]:
        """The variables of the Haiku function's arguments, in the order of its signature."""
        named = self.args.filled
        ordered = jax.tree.leaves([named[name] for name in self.signature.parameters])
        own = set(self.args.atoms)
        return tuple(x for x in ordered if isinstance(x, Var) and x in own)

    @property
    def has_state(self) -> bool:
        """Whether the model has state, and returns a new one."""
        return "state" in self.leading

    def state_after(self, defined: set[Any]) -> dict[Path, Slot]:
        """The returned state of a part of the model: the old state if its new value is not defined."""
        return {
            path: slot if defined.issuperset(slot.atoms) else self.state[path]
            for path, slot in self.new_state.items()
            if path in self.state or defined.issuperset(slot.atoms)
        }

    def without(self, params: Container[Path], state: Container[Path]) -> "Interface":
        """The interface without these parameters, and without this state."""
        gone = dict(params=params, state=state, new_state=state)
        rest = {
            field: {path: x for path, x in self.slots(field).items() if path not in paths}
            for field, paths in gone.items()
        }
        return dataclasses.replace(self, **rest)  # type: ignore[arg-type]

    def with_atoms(self, fields: Iterable[str], atoms: Iterable[Any]) -> "Interface":
        """The interface with these atoms in the slots of fields, in order."""
        rest = iter(atoms)

        def filled(slot: Slot) -> Slot:
            return Slot(slot.tree, tuple(itertools.islice(rest, slot.tree.num_arrays)))

        return dataclasses.replace(self, **self._each(fields, filled))

    def _each(self, fields: Iterable[str], fun: Callable[[Slot], Any]) -> dict[str, Any]:
        """The results of a function of the slots of fields."""
        found = {
            field: {path: fun(slot) for path, slot in self.slots(field).items()} for field in fields
        }
        return {field: x if field in ENTRIES else x[WHOLE] for field, x in found.items()}

    def arguments(self, arrays: Sequence[Array]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of `apply`, positional and by keyword, with these arrays in them."""
        values = self._values(ARGUMENTS, arrays)
        bound = inspect.BoundArguments(self.signature, collections.OrderedDict(values["args"]))
        return [*(values[name] for name in self.leading), *bound.args], bound.kwargs

    def merge_results(self, arrays: Sequence[Array]) -> Tree:
        """The return value of `apply`, with these arrays in it."""
        arrays = [literal.array() if (literal := as_literal(x)) else x for x in arrays]
        values = self._values(RESULTS, arrays)
        return (values["results"], values["new_state"]) if self.has_state else values["results"]

    def _values(self, fields: Iterable[str], arrays: Iterable[Array]) -> dict[str, Tree]:
        """The values of fields, with these arrays in them."""
        rest = iter(arrays)
        values = self._each(fields, lambda slot: slot.tree.merge(rest))
        return {field: nested(x) if field in ENTRIES else x for field, x in values.items()}

    def of_init(self, params: Mapping[Path, Array], state: Mapping[Path, Array]) -> Tree:
        """The return value of `init`: the model's own entries among these."""
        pairs = (self.params, params), (self.state, state)
        own = [nested({path: entries[path] for path in slots}) for slots, entries in pairs]
        return tuple(own) if self.has_state else own[0]

    def split(self, draws: Callable[[], bool], args: Any, kwargs: Any) -> list[Array]:
        """The arrays in the arguments of `apply`, checked.

        Args:
          draws: whether results depend on the random key.
          args: the positional arguments of `apply`.
          kwargs: the keyword arguments.

        Raises:
          TypeError: if arguments are missing, or too many.
          ValueError: if an argument has a wrong structure, shape or dtype, or a wrong constant.
        """
        given, arrays = self._named(args, kwargs), list[Any]()
        for kind, slots in (("params", self.params), ("state", self.state)):
            entries = by_path(given.get(kind), kind)
            for path, slot in slots.items():
                if path not in entries:
                    raise value_error(
                        f"{kind}: there is no {'/'.join(path)!r}, which the model reads. Pass all that "
                        "init gives"
                    )
                arrays += slot.arrays_of(entries[path], f"{kind}: {'/'.join(path)}")
        arrays += self.rng.arrays_of(key_like(given.get("rng"), self.rng.atoms, draws), "rng")
        return arrays + self.args.arrays_of(given["args"])

    @property
    def apply_signature(self) -> inspect.Signature:
        """The signature of `apply`."""
        kind = inspect.Parameter.POSITIONAL_ONLY
        leading = [inspect.Parameter(name, kind) for name in self.leading]
        return self.signature.replace(parameters=[*leading, *self.signature.parameters.values()])

    def _named(self, args: Any, kwargs: Any) -> dict[str, Any]:
        names = [name for name in self.leading if name not in kwargs]
        if len(args) < len(names):
            missing = ", ".join(names[len(args) :])
            raise type_error(f"missing: {missing}. The arguments are {self.apply_signature}")
        first = dict(zip(names, args, strict=False))
        first |= {name: kwargs[name] for name in self.leading if name in kwargs}
        rest = {name: x for name, x in kwargs.items() if name not in self.leading}
        try:
            named = named_arguments(self.signature, args[len(names) :], rest)
        except TypeError as e:
            raise type_error(f"{e}. The arguments are {self.apply_signature}") from None
        return dict(first, args=named)


def named_arguments(signature: inspect.Signature, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of the Haiku function by their names, with defaults.

    Raises:
      TypeError: if they do not fit the signature, or are not trees.
    """
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    for name, x in bound.arguments.items():
        try:
            jax.tree.structure(x)
        except (TypeError, ValueError) as e:
            raise type_error(f"{name}: expected arrays in a tree of JAX's. {e}") from None
    return dict(bound.arguments)


def by_path(tree: Tree, kind: str = "params") -> dict[Path, Array]:
    """The entries of Haiku's parameters or state, by module and name.

    Raises:
      TypeError: if the tree is something else.
    """
    tree = {} if tree is None else tree
    if not (isinstance(tree, Mapping) and all(isinstance(x, Mapping) for x in tree.values())):
        raise type_error(
            f"{kind}: expected what init gives, a dictionary by module and name, got "
            f"{type(tree).__name__}"
        )
    return {(module, name): x for module, entries in tree.items() for name, x in entries.items()}


def nested(entries: Mapping[Path, Array]) -> dict[str, dict[str, Array]]:
    """Haiku's parameters or state, from entries by module and name."""
    out: dict[str, dict[str, Array]] = {}
    for (module, name), x in entries.items():
        out.setdefault(module, {})[name] = x
    return out


def by_variable(slots: Mapping[Path, Slot]) -> dict[Any, Path]:
    """The paths of parameters or state, by variable."""
    return {v: path for path, slot in slots.items() for v in slot.atoms}


def unread(slots: Mapping[Path, Slot], read: Mapping[Var, int]) -> set[Path]:
    """The paths of the slots whose variables are not read; `read` says how often each one is."""
    return {path for path, slot in slots.items() if not any(read[v] for v in slot.atoms)}


def slot_of(x: Any) -> Slot:
    """The structure of an argument, and its arrays; implicit arrays as their dense shapes."""
    tree, arrays = marks.split(transform.tree_map_with_implicit(dense_struct, x), is_array)
    return Slot(tree, tuple(arrays))


def slots_of(entries: Any) -> dict[Path, Slot]:
    """The slots of Haiku's parameters or state."""
    return {path: slot_of(x) for path, x in by_path(entries).items()}


def is_array(x: Any) -> bool:
    """Whether a leaf is traced. Anything else is a part of the expression."""
    return transform.is_value(x) or isinstance(x, jax.ShapeDtypeStruct | jax.core.ShapedArray)


def type_of(x: Any) -> Aval:
    """The type of an array or a variable; a type stays the same."""
    if isinstance(x, jax.ShapeDtypeStruct | jax.core.ShapedArray):
        return x
    return x.aval if isinstance(x, Var) else jax.typeof(x)


def key_like(key: jax.Array | None, variables: Sequence[Any], draws: Callable[[], bool]) -> Array:
    """Converts a random key to the program's kind. None gives any key, if no result depends on it."""
    if not variables:
        if key is not None:
            raise value_error(
                "rng: the expression was made without a key, and got one. Make another: rng=key"
            )
        return None
    (variable,) = variables
    typed = jax.dtypes.issubdtype(variable.aval.dtype, jax.dtypes.prng_key)
    if key is None:
        if draws():
            raise value_error(
                "rng: the expression draws random numbers, and got None for a key. Pass a key, or make "
                "one without: rng=None"
            )
        return jax.random.key(0) if typed else np.zeros(variable.aval.shape, variable.aval.dtype)
    key = as_key(key)
    if not is_array(key):
        return key
    if jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key if typed else jax.random.key_data(key)
    return jax.random.wrap_key_data(key) if typed else key


def as_key(key: Key) -> Array:
    """A random key; an integer is used as a seed."""
    return jax.random.PRNGKey(key) if isinstance(key, int) else key


def checked(label: str, tree: Static, avals: Sequence[Aval], value: Any) -> list[Array]:
    """The arrays in an argument, after checking its structure, shapes and dtypes.

    Weak types are not checked, as in JAX's ahead-of-time compilation.
    """
    leaves, treedef = transform.tree_flatten_with_implicit(value)
    if not same_structure(treedef, tree.treedef):
        raise value_error(_other_structure(label, tree.merge(avals), value))
    expected, arrays = iter(avals), []
    for i, (x, static) in enumerate(zip(leaves, tree.leaves, strict=True)):
        where = functools.partial(_name_of_leaf, label, value, i)
        if static is not None:
            if not identical(x, static[0]):
                raise ValueError(
                    f"{where()}: the expression was made for {static[0]!r}, got {x!r}. {_ANOTHER}"
                    f" {see('another-expression')}"
                )
            continue
        aval = next(expected)
        x = jnp.asarray(x) if isinstance(x, np.ndarray | np.generic) else x
        if not is_array(x) or x.shape != aval.shape or x.dtype != aval.dtype:
            raise ValueError(
                f"{where()}: the expression was made for {_brief(aval)}, got {_brief(x)}. {_ANOTHER}"
                f" {see('another-expression')}"
            )
        weak = getattr(x, "weak_type", False) and not aval.weak_type
        arrays.append(jax.lax.convert_element_type(x, aval.dtype) if weak else x)
    return arrays


_ANOTHER = "Make another one for other arguments"


def _other_structure(label: str, expected: Any, value: Any) -> str:
    """The error message for an argument with a wrong structure; without a label, for the first one."""
    if not label:
        structures = [{k: _described(x) for k, x in tree.items()} for tree in (expected, value)]
        other = [k for k in value if structures[0].get(k) != structures[1][k]]
        if not other:
            return (
                "the arguments: the expression was made for containers of other classes, which have "
                f"the same names and fields. {_ANOTHER}, or load it with types="
                f" {see('another-expression')}"
            )
        label = other[0]
        expected, value = expected.get(label), value[label]
    return (
        f"{label}: the expression was made for {_described(expected)}, got {_described(value)}. "
        f"{_ANOTHER}"
        f" {see('another-expression')}"
    )


def _described(x: Any) -> str:
    return described(slot_of(x).tree)


def described(tree: Static) -> str:
    """A structure in a readable form: `(array, {'a': array})`."""
    return repr(tree.merge([_Shown("array")] * tree.num_arrays))


class _Shown(str):
    """A text that is shown without quotes."""

    def __repr__(self) -> str:
        return str(self)


def _brief(x: Any) -> str:
    shaped = hasattr(x, "shape") and hasattr(x, "dtype")
    return f"{x.dtype}[{','.join(map(str, x.shape))}]" if shaped else repr(x)


def _name_of_leaf(label: str, value: Any, index: int) -> str:
    paths, _ = jax.tree_util.tree_flatten_with_path(value, is_leaf=is_implicit)
    path = paths[index][0]
    if label:
        return label + jax.tree_util.keystr(path)
    return str(path[0].key) + jax.tree_util.keystr(path[1:])
