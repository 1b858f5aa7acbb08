"""What `isles top` draws, at every size: whole figures, inside the window."""

from __future__ import annotations

from isles.monitor.live import cells
from isles.monitor.live.drawing import LARGE, NAMES, SMALLEST, View, draw, note_lines
from isles.monitor.live.model import Head, Point, RankRow, Snapshot
from tests.made_watch import made

SIZES = [
    (width, height) for width in (*range(SMALLEST[0], 220, 7), 80, 200) for height in (16, 24, 60)
]


def figures() -> set[str]:
    """Every word of every cell and head of the tables."""
    shown, found = made(nodes=2, gpus=6), {"-"}
    for columns, rows in (
        (cells.RANK_COLUMNS, shown.ranks),
        (cells.HOST_COLUMNS, shown.hosts),
        (cells.LINK_COLUMNS, shown.links),
        (cells.CLUSTER_COLUMNS, shown.clusters),
    ):
        for column in columns:
            found |= set(column.head.split())
            for row in rows:
                found |= set(column.text(row).split())
    return found


def test_no_figure_is_cut_and_nothing_is_outside_the_window() -> None:
    whole, shown, seen = figures(), made(nodes=2, gpus=6), set[str]()
    for width, height in SIZES:
        for table in range(len(NAMES)):
            view = View(table=table)
            while True:
                drawn = draw(shown, view, (width, height), age_s=0.0, error="")
                assert len(drawn.lines) <= height - 1, (width, height)
                is_large = width >= LARGE[0] and height >= LARGE[1]
                tables = {index for index, _ in drawn.rows.values()}
                assert tables == (set(range(4)) if is_large else {table}), (width, height)
                for number, line in enumerate(drawn.lines):
                    assert line.cell_len <= width, (width, height, line.plain)
                    if number in drawn.rows:
                        words = {w for w in line.plain.lstrip("▸").split() if w[0] not in "░█▚·"}
                        rest = {w for w in words - whole if not w.endswith("…")}
                        assert not rest, (width, height, line.plain)
                        seen |= words
                if not drawn.has_more_columns:
                    break
                view.tables[table].shift += 1
    assert {"91", "1120", "32×8", "50%", "944.0", "4000"} <= seen


def test_rows_are_sorted_filtered_and_chosen_by_what_they_are() -> None:
    shown, view = made(clusters=1, nodes=2), View()
    table = view.tables[0]

    def ranks() -> list[int]:
        drawn = draw(shown, view, (200, 60), age_s=0.0, error="")
        lines = [drawn.lines[y].plain for y, (index, _) in drawn.rows.items() if index == 0]
        return [int(line[1:].split()[0]) for line in lines]

    working = sorted((0, 1, 3, 4), key=lambda rank: shown.ranks[rank].use or 0)
    table.sort = "use"
    assert ranks()[:4] == working[::-1], "the largest first"
    table.is_reversed = True
    assert ranks()[2:] == working
    table.sort, table.is_reversed = "mark", False
    assert ranks() == [2, 5, 3, 4, 0, 1], "what has none is last"
    table.is_reversed = True
    assert ranks()[-2:] == [0, 1]
    view.filter, table.sort, table.is_reversed = "NODE-02 thrott", "", False
    assert ranks() == [4]
    view.filter, table.index, table.chosen = "", 2, None
    ranks()
    fewer = shown.model_copy(update={"ranks": shown.ranks[1:]})
    drawn = draw(fewer, view, (80, 24), age_s=0.0, error="")
    assert isinstance(drawn.chosen, RankRow) and drawn.chosen.rank == 2, "the same, elsewhere"


def test_notes_and_a_run_of_which_little_is_known() -> None:
    notes = [f"note {number} " + "word " * 20 for number in range(5)]
    lines = [line.plain for line in note_lines(notes, 80, 3)]
    assert len(lines) == 3 and lines[0].startswith(" ! note 0") and "4 more" in lines[-1]
    assert note_lines((), 80, 3) == []
    # A terminal is not told what a machine has put into a name.
    odd = RankRow(rank=0, host="a\x1b[2Jb", note="[bold]x")
    curve = (Point(step=1, loss=float("nan")), Point(step=2, loss=1.0), Point(step=3, loss=None))
    for run in (Head(), Head(name="a\x1bb", state="queued", step=1, loss=float("inf"))):
        shown = Snapshot(run=run, curve=curve, ranks=(odd,), notes=("a\nb\x07",))
        for size in SIZES:
            lines = draw(shown, View(), size, age_s=99.0, error="x").lines
            text = "\n".join(line.plain for line in lines)
            assert "\x1b" not in text and "\x07" not in text and "nothing new for 1m 39s" in text
    assert "a\\u001b[2Jb" in text and "°C" not in text, "what is not known has no column"
