"""Context parallel and position embeddings that change with the length of what a rank sees."""

from __future__ import annotations

from pathlib import Path

from isles.config.rules.shape import check_shape
from tests.each import each
from tests.run_files import load
from tests.unit.test_config_strategy import GOOD, LLAMA

ROPE = {"rope_type": "longrope", "original_max_position_embeddings": 1024}


@each(
    ("shape", "seq_length", "cp_size", "is_refused"),
    [
        ({"rope_parameters": ROPE}, 2048, 2, True),
        ({"rope_parameters": ROPE}, 1024, 2, False),
        ({"rope_parameters": ROPE}, 2048, 1, False),
        (
            {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 1024},
            2048,
            2,
            True,
        ),
        ({"rope_parameters": {"rope_type": "llama3"}}, 2048, 2, False),
    ],
)
def test_pieces_must_not_take_other_frequencies(
    tmp_path: Path, shape: dict[str, object], seq_length: int, cp_size: int, is_refused: bool
) -> None:
    strategy = f"strategy={{kind: fsdp, cp_size: {cp_size}}}"
    loaded = load(tmp_path, GOOD, strategy, f"data.seq_length={seq_length}")
    found = [v.what for v in check_shape(loaded.config, {**LLAMA, **shape})]
    assert [what for what in found if "longrope" in what] == found
    assert bool(found) == is_refused
