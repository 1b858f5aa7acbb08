"""What a reader makes of folders with models: run by the Python of an old transformers, or by ours.

`python tests/old_reader.py TEXT FOLDER …` prints the ids of the text and the logits for the same
few ids, of each folder; an adapter is read beside the base that it names.
"""

import json
import sys
import traceback
from pathlib import Path


def read(folder, text):
    """The ids of a text, and the logits for ids that every vocabulary has."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name, adapter = folder, folder / "adapter_config.json"
    if adapter.is_file():
        name = json.loads(adapter.read_text())["base_model_name_or_path"]
    model = AutoModelForCausalLM.from_pretrained(name, torch_dtype="auto")
    if adapter.is_file():
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, folder)
    ids = torch.arange(8, 56)[None]
    with torch.no_grad():
        logits = model.eval()(input_ids=ids).logits[0, -2:].float()
    found = {"type": str(model.dtype), "logits": logits.tolist()}
    if (folder / "tokenizer.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(folder)
        found["ids"] = tokenizer(text)["input_ids"]
        found |= {"end": tokenizer.eos_token, "special": tokenizer.all_special_tokens}
    return found


def main():
    """Read every folder; an error is an answer, too."""
    import transformers

    text, answers = sys.argv[1], {}
    for name in sys.argv[2:]:
        try:
            answers[name] = read(Path(name), text)
        except Exception:
            answers[name] = {"error": traceback.format_exc()[-2000:]}
    sys.stdout.write(json.dumps({"version": transformers.__version__, "read": answers}) + "\n")


if __name__ == "__main__":
    main()
