"""The types in the signatures of the package.

Most of them are `typing.Any` to type checkers and to dispatch, and tell readers which values are meant.
They are that wide because an implicit array has the operators of `jax.Array` only in interpreted code,
and because Python and JAX lack types for trees, results of rules and parameters of primitives.
"""

from typing import Any, TypeVar

import jax
import jax.extend.core
import numpy as np

# A dense array (of JAX or NumPy), an implicit one, or a tracer of either: a field of a type, or an
# operand. As the annotation of a rule's operand it means all of them.
Array = Any

# A pytree: containers and registered classes with arrays at the leaves, implicit ones among them. Users
# register classes of their own, and a single array is a tree, too.
Tree = Any

# The parameters of a model: in Haiku `{module: {name: array}}`. Functions on parameters take any other
# tree of arrays as well, and return a tree of the same structure.
Params = Any

# Such a tree whose containers the result has: to type checkers the result has the argument's type, such
# as `hk.Params`.
SameTree = TypeVar("SameTree")

# The state of a model (in Haiku `{module: {name: array}}`) or of an optimizer (optax's named tuples).
State = Any

# A random key of JAX's new or old kind, or a seed.
Key = jax.Array | np.ndarray | np.integer | int

# The result of a rule: an array, a list of arrays if the primitive has several results, or
# NotImplemented, for which Python has no type.
Result = Any

# A parameter of a primitive, and all parameters of an equation by name. Each primitive has its own.
EqnParam = Any
EqnParams = dict[str, EqnParam]

# Types of JAX, under shorter names: a primitive, the structure of a tree, and the values that JAX takes
# for a dtype and for the precision of a product.
Primitive = jax.extend.core.Primitive
TreeDef = jax.tree_util.PyTreeDef
DType = jax.typing.DTypeLike
Precision = jax.lax.PrecisionLike

# The abstract value of an array in a jaxpr. It has a shape and a dtype; the only class of them that
# `jax.core` documents has neither.
Aval = Any

# A mesh of devices, or only its axes.
MeshLike = jax.sharding.Mesh | jax.sharding.AbstractMesh

# A value as `json` reads and writes it. A reader checks each one, because a file may hold any.
Json = Any
JsonObject = dict[str, Json]
