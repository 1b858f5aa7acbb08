"""From sources to batches of token ids, in one global order.

`sources/` reads rows and parses them into documents, `chat/` makes text of conversations and finds
what of it is trained, `tokens/` turns documents into folders of tokens that are whole or absent.
`builders.py` makes tables of samples of them, `samples.py` reads these, `order.py` shuffles,
`mix.py` puts the sources together, and `loader.py` gives each rank its rows of a step. `stream/`
makes a table for each segment of a source that is still being read. The cursor is one global
number. Open `loader.py` first.
"""
