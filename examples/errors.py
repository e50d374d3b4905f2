"""What the programs here raise where a file or a flag cannot be used."""


class InputError(Exception):
    """A file or text that cannot be used; the message is one line that says what is wrong."""
