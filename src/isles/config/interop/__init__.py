"""Files of other tools.

`deepspeed.py` reads a DeepSpeed JSON, compares it with the run file by the tables of
`deepspeed.yaml`, and makes DeepSpeed's settings. `export.py` writes JSON for scripts that run
without isles. Open `deepspeed.py` first.
"""
