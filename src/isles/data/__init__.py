"""From sources to batches of token ids, in one global order.

`sources/` reads rows and parses them into documents. `chat/` renders conversations as text and
finds the trained part. `tokens/` turns documents into folders of tokens, each complete or absent.
`builders.py` makes tables of samples, `samples.py` reads them, and `order.py` shuffles them.
`mix.py` combines the sources, and `loader.py` gives each rank its rows of a step. `stream/` makes a
table for each segment of a source that is still being read. The cursor is one global number. Open
`loader.py` first.
"""
