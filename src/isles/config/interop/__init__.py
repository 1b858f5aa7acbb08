"""Files of other tools.

`deepspeed.py` reads a DeepSpeed JSON and makes the one that DeepSpeed is started with, or that a
script of the user's own takes; `deepspeed.yaml` lists its keys; `accelerate.py` writes the FSDP
settings of the Hugging Face Trainer. Open `deepspeed.py` first.
"""
