"""A type whose rules are wrong, by which a comparison shows that it can fail."""

import dataclasses

import haiku_implicit as hki


@dataclasses.dataclass
class Wrong(hki.ImplicitArray):
    """An array with a rule that is wrong by a thousandth."""

    w: hki.ArrayValue

    def compute_shape(self):
        return self.w.shape

    def compute_dtype(self):
        return self.w.dtype

    def materialize(self):
        return self.w


@hki.primitive_handler("dot_general")
def product_of_wrong(primitive, x: hki.ArrayValue, w: Wrong, **params):
    return hki.default_handler(primitive, x, 1.001 * w.w, **params)


@hki.primitive_handler("dot_general")
def product_with_wrong(primitive, w: Wrong, x: hki.ArrayValue, **params):
    return hki.default_handler(primitive, 1.001 * w.w, x, **params)
