"""Read the first rows of each source for `isles check`: `python -m isles.train.first_rows`.

The process reads a run's config as JSON from stdin and writes one line of JSON. For each source of
local files the line has the source's number, its path and its number of rows, and `notes` and
`error` as text. The process prepares and downloads nothing.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

from isles.config.files import may_be_huggingface_id
from isles.config.sections.data import SourceConfig
from isles.config.sections.run import RunConfig
from isles.data.show import field_notes
from isles.data.sources.find import open_source
from isles.data.sources.rows import Tally
from isles.data.tokens.encode import Encoder, encode_each
from isles.errors import UserError
from isles.train.data import describe_tokenizer, make_tokenizer

HEAD_ROWS = 200
"""Number of rows of each source."""


def main() -> None:
    """Print the first rows' results for all sources."""
    logging.disable(logging.WARNING)
    config = RunConfig.model_validate_json(sys.stdin.read())
    sys.stdout.write(json.dumps(list(heads(config))) + "\n")


def heads(config: RunConfig) -> Iterator[dict[str, Any]]:
    """Check the first rows of each source of local files."""
    tokenizer = None
    for number, source in enumerate(config.data.sources):
        if source.type == "fake" or may_be_huggingface_id(str(source.path)):
            continue
        head: dict[str, Any] = {"number": number, "path": source.path, "rows": 0, "notes": []}
        try:
            if tokenizer is None:
                # The result of a row depends on the chat template, but not on the text that a
                # tokenizer is trained on.
                tokenizer = make_tokenizer(config, [""])
                describe_tokenizer(config, tokenizer)
            tally = _tally(source, tokenizer, config.data.max_bad_fraction)
            head["rows"] = tally.num_rows
            # Only after the last row is it certain that a field is in no row.
            record = {key: value for key, value in tally.record().items() if key != "ignored"}
            head["notes"] = list(field_notes(number, source, record))
            tally.judge(is_all=False)
        except UserError as error:
            head["error"] = {"what": f"{error.where}: {error.what}", "fix": error.fix}
        yield head


def _tally(source: SourceConfig, tokenizer: Any, max_bad_fraction: float) -> Tally:
    opened, encoder = open_source(source, streams=True), Encoder(source, tokenizer)
    tally = Tally(opened.name, max_bad_fraction)
    rows = list(islice(opened.rows(encoder.parser), HEAD_ROWS))
    encode_each(rows, encoder, tally)
    return tally


if __name__ == "__main__":
    main()
