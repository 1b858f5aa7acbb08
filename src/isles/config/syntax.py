"""What a YAML syntax error means, in plain words."""

from __future__ import annotations

import yaml

_QUOTE = "put the text in quotes"
_INDENT = "give keys of one section the same number of spaces at the start of their lines"

# (part of PyYAML's problem, what, fix); the first that is found counts.
_PROBLEMS = (
    ("found character '\\t'", "a tab stands where spaces must", "indent with spaces"),
    ("found a tab character", "a tab stands where spaces must", "indent with spaces"),
    ("cannot start any token", "a value cannot begin with this character", _QUOTE),
    (
        "mapping values are not allowed here",
        "a ':' stands where no key can be",
        "check the indentation of this line and the one above; text that holds ': ' needs quotes",
    ),
    (
        "could not find expected ':'",
        "this line is no 'key: value'",
        "put ': ' behind the key, or indent the line as part of the value above",
    ),
    ("sequence entries are not allowed here", "a '- ' stands where no list can be", _INDENT),
    ("expected <block end>", "this line does not fit the lines above", _INDENT),
    ("expected ',' or ']'", "a list in [ ] is not closed", "put ',' between items, ']' behind"),
    ("expected ',' or '}'", "a mapping in { } is not closed", "put ',' between keys, '}' behind"),
    (
        "found unexpected end of stream",
        "a quote is opened here and never closed",
        "close the quote; text with an apostrophe goes in double quotes",
    ),
    (
        "found unexpected document separator",
        "a quote is opened here and never closed",
        "close the quote; text with an apostrophe goes in double quotes",
    ),
    (
        "found unknown escape character",
        "this backslash escape does not exist",
        "use single quotes, in which a backslash is a backslash",
    ),
    (
        "expected escape sequence",
        "this backslash escape is not complete",
        "use single quotes, in which a backslash is a backslash",
    ),
    ("expected the node content", "a value is missing here", "write the value, or null"),
    ("undefined tag handle", "a value cannot begin with '!'", _QUOTE),
    ("expected '<document start>'", "this line does not fit the lines above", _INDENT),
    (
        "expected alphabetic or numeric character",
        "a value cannot begin with '*' or '&'",
        _QUOTE,
    ),
)


def explain_syntax(error: yaml.MarkedYAMLError) -> tuple[str, str, yaml.Mark | None]:
    """What is wrong, how to mend it, and where it begins (None: PyYAML does not say)."""
    problem = error.problem or error.context or "it cannot be read"
    mark = error.problem_mark or error.context_mark
    if "quoted scalar" in (error.context or "") and "unexpected" in problem:
        mark = error.context_mark  # the end of the file says nothing; the open quote does
    for part, what, fix in _PROBLEMS:
        if part in problem:
            return what, fix, mark
    return f"not valid YAML: {problem}", "compare the line with the lines around it", mark
