"""From sources to batches of token ids, in one global order.

`sources/` reads rows, `chat/` makes text of conversations and says which of it is trained,
`tokens/` turns both into folders of tokens that are whole or absent; `samples.py` and its
builders (`whole.py`, `cut.py`, `packing.py`) cut them into samples, `order.py` shuffles,
`dataset.py` mixes the sources, and `loader.py` gives each rank its rows of a step. `stream/` does
this while a source is still being read. The cursor is one global number. Open `loader.py` first.
"""
