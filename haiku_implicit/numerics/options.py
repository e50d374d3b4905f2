"""What users write in options: names of formats, and what belongs to them."""

from typing import Any

from haiku_implicit.numerics import formats


def format_name(name: str, value: Any) -> str | None:
    """The name of a format; that of a recipe ('mxfp4') as it is."""
    if value is None:
        return None
    if isinstance(value, str) and value in formats.RECIPES:
        return value
    try:
        return formats.find(value).name
    except ValueError:
        known = ", ".join([*formats.FORMATS, *formats.RECIPES])
        raise ValueError(f"{name}: expected one of {known}, got {value!r}") from None


def check_operand_format(name: str, value: str | None) -> None:
    known = [f.name for f in formats.FORMATS.values() if _is_of_operands(f)]
    if value is not None and value not in known:
        raise ValueError(f"{name}: expected one of {', '.join(known)}, got {value!r}")


def _is_of_operands(fmt: formats.Format) -> bool:
    """Whether products can be quantized to a format: it has a zero, and one scale is all it needs."""
    return not fmt.offset and fmt.name not in formats.BY_MEAN


def checked_activation(activation: Any) -> str | None:
    """What products of a stored matrix quantize activations to, under the name of its format.

    Args:
      activation: a format, or a format and ',groups' (`QuantizedMatrix.quantize`), or None.

    Raises:
      ValueError: for a format that activations can't have.
    """
    qtype, scales = activation, ""
    if isinstance(activation, str):
        qtype, _, scales = activation.replace(" ", "").partition(",")
    if scales not in ("", "groups"):
        raise ValueError(
            f"activation: expected a format, or a format and ',groups', got {activation!r}"
        )
    name = format_name("activation", qtype)
    check_operand_format("activation", name)
    return f"{name},{scales}" if scales else name
