"""Text that comes from outside: UTF-8, or refused."""

from ggraph import InputError


def utf8(raw: bytes, where: str) -> str:
    """Bytes as text. InputError with the offset of what is not UTF-8."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{where} is not UTF-8: {error.reason} {raw[error.start]:#04x} at offset {error.start}"
        ) from None


def argument(text: str, where: str) -> str:
    """An argument of the command line. Bytes that Python took for no text, and hides in characters
    that are none, are UTF-8 in a terminal whose locale is not. InputError with the offset of what
    is not UTF-8 either."""
    return utf8(text.encode("utf-8", "surrogateescape"), where)
