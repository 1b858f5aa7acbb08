"""Scripts from the templates in `launch/templates`."""

from __future__ import annotations

import shlex

from jinja2 import Environment, PackageLoader, StrictUndefined


def fill_template(name: str, /, **values: object) -> str:
    """The text of a template; a value that it names and that is missing is an error of ours."""
    environment = Environment(
        loader=PackageLoader("isles.launch"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        comment_start_string="<#",  # ${#name[@]} is bash's
        comment_end_string="#>",
        autoescape=False,  # shell scripts; values are quoted for the shell
    )
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    return environment.get_template(name).render(**values)
