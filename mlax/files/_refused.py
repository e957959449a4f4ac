"""Refused: a file was not taken, and why."""


class Refused(ValueError):
    """A file is damaged, is no file of arrays, or asks for what no honest file asks; the words name it and say why."""
