"""Text of strangers in messages: one line, without characters that command a terminal."""

import re
import unicodedata

# control characters, marks that reorder text, line and paragraph separators, lone surrogates
_UNSAFE = {"Cc", "Cf", "Zl", "Zp", "Cs"}
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_LOGIN = re.compile(r"://[^/\s]*@")
_MOST = 1500  # characters of a text
_MOST_SHOWN = 80  # characters of a value


def one_line(text: str) -> str:
    r"""The text with control characters written as escapes, without logins in URLs, and without the
    middle of a long one.

    >>> one_line("a\x1b[2Jb\n"), one_line("http://me:secret@a/b")
    ('a\\x1b[2Jb\\n', 'http://...@a/b')
    """
    text = _LOGIN.sub("://...@", text)
    if len(text) > _MOST:
        text = f"{text[: _MOST // 2]} ... {text[-_MOST // 2 :]}"
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escaped(character) for character in text)


def shown(value: object) -> str:
    """A value as messages show it, at most 80 characters."""
    try:
        text = one_line(repr(value))
    except (ValueError, RecursionError):  # an integer of more than 4,300 digits; deep lists
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."


def not_utf8(text: str) -> str:
    r"""The first byte that is not UTF-8, in words; "" if there is none.

    Python reads such a byte of a command line as half of a surrogate pair.

    >>> not_utf8("\udcff")
    'byte 0xff at character 1'
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        byte = f"byte 0x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"\\u{code:04x}"
        return f"{byte} at character {error.start + 1}"
    return ""


def _escaped(character: str) -> str:
    if character in _SHORT:
        return _SHORT[character]
    if unicodedata.category(character) not in _UNSAFE:
        return character
    code = ord(character)
    return (
        f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
    )
