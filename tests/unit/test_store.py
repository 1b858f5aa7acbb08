"""Checkpoints: nothing that one names is run, all is on the disk; exports, and what they say."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from isles.checkpoint.card import card_text
from isles.checkpoint.export import export_model
from isles.checkpoint.save import CheckpointManager, read_back, seal
from isles.checkpoint.tensors import disk_failure
from isles.config.resolve import resolve
from isles.config.sections.output import CheckpointConfig
from isles.dist.files import Disks
from isles.dist.world import RankLocation, World
from isles.errors import DataError, TrainingError, UserError
from isles.run.checkpoints import CheckpointInfo, checkpoint_name, describe_file
from isles.run.manifest import MANIFEST, MANIFEST_VERSION, Manifest
from isles.run.paths import RunDir
from isles.run.records import write_record
from isles.run.restarts import checkpoint_to_load
from isles.train import verbs
from tests.deadline import run_program
from tests.each import each
from tests.run_files import load
from tests.small_models import small_model
from tests.unit.test_begin import add_checkpoint


def test_a_full_disk_is_named_before_what_torch_says_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=4096))
    cut = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    what = disk_failure(cut, tmp_path, 0).what
    assert what.startswith("the disk is full, 4.0 KiB free on this disk ([enforce fail")
    refused = OSError(errno.ENOSPC, "No space left on device")
    assert disk_failure(refused, tmp_path, 0).what.startswith("No space left on device; 4.0 KiB")
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1 << 30))
    assert disk_failure(cut, tmp_path, 0).what.startswith("[enforce fail")


def saving(tmp_path: Path, pending: Any, now: Any = time.monotonic) -> CheckpointManager:
    """One whose save of step 4 is under way, and may take half an hour."""
    world = World(0, 0, 1, 1, *[None] * 4, 1.0)  # nothing is sent
    disks = Disks((RankLocation(0, 0, "here"),), (False,))
    config = CheckpointConfig(timeout=1_800.0)
    checkpoints = CheckpointManager(RunDir(tmp_path), world, config, disks, 1, now)
    checkpoints._pending, checkpoints._pending_step = pending, 4
    return checkpoints


def test_a_save_may_take_as_long_as_its_parts_move(tmp_path):
    # An error of a disk of the network is a TimeoutError, as is one of waiting.
    pending = Future[None]()
    pending.set_exception(TimeoutError(110, "Connection timed out"))
    with pytest.raises(TrainingError, match="Connection timed out") as error:
        saving(tmp_path, pending).wait()
    assert "is not over" not in str(error.value)
    pending, looks = Future[None](), iter([0.0, 0.0, 1_900.0])

    def now() -> float:
        """More than half an hour passes between the first look and the last, when it is done."""
        if (seconds := next(looks)) > 0.0:
            pending.set_result(None)
        return seconds

    checkpoints = saving(tmp_path, pending, now)
    checkpoints.moved_at = 1_700.0
    checkpoints.wait()
    assert checkpoints.last_step == 4
    with pytest.raises(TrainingError, match="saving step 4 took more than 1800s"):
        saving(tmp_path, Future(), iter([0.0, 0.0, 1_900.0]).__next__).wait()


def test_what_was_asked_for_is_loaded_until_this_start_has_saved(tmp_path):
    """Whatever the clocks of the hosts say that began the run and wrote the checkpoints."""
    run_dir = RunDir(tmp_path)
    asked = run_dir.checkpoints / checkpoint_name(4)
    second = run_dir.attempt(2)

    def save(step: int, attempt: int, created_at: float) -> None:
        folder = run_dir.checkpoints / checkpoint_name(step)
        folder.mkdir(parents=True)
        manifest = {"version": MANIFEST_VERSION, "step": step, "files": {}, "attempt": attempt}
        write_record(folder / MANIFEST, manifest | {"created_at": created_at})

    second.path.mkdir(parents=True)
    write_record(second.launch, {"begun_at": 10_000.0})
    save(4, 1, 13_600.0)
    assert checkpoint_to_load(run_dir, second, asked, 0) == asked
    assert checkpoint_to_load(run_dir, second, asked, 1) == asked, "an hour ahead"
    save(6, 2, 6_400.0)
    assert checkpoint_to_load(run_dir, second, asked, 1) is None, "an hour behind"
    assert checkpoint_to_load(run_dir, second, None, 1) is None


def test_records_and_checkpoints_are_on_the_disk_before_their_names(tmp_path, monkeypatch):
    safe, unsafe = set[int](), list[str]()
    fsync, replace = os.fsync, Path.replace

    def force(handle: int) -> None:
        safe.add(os.fstat(handle).st_ino)
        fsync(handle)

    def name(path: Path, target: Path) -> Path:
        files = [path, *path.rglob("*")]
        unsafe.extend(file.name for file in files if file.stat().st_ino not in safe)
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", force)
    monkeypatch.setattr(Path, "replace", name)
    partial, final = tmp_path / ".partial-step-00000001", tmp_path / "step-00000001"
    partial.mkdir()
    for part in ("tensors-00000.bin", "rng-00000.safetensors"):
        (partial / part).write_bytes(b"weights")
    files = {file.name: describe_file(file) for file in partial.iterdir()}
    read_back(partial, files)
    seal(partial, final, {"version": 1, "step": 1}, files)
    assert tmp_path.stat().st_ino in safe  # the entry of the name itself
    assert (final / "manifest.json").exists()
    write_record(tmp_path / "a.json", {"step": 1})
    assert unsafe == []
    write_record(tmp_path / "b.json", {"step": 1}, durable=False)
    assert len(unsafe) == 1


TEMPLATE = "{% for m in messages %}{{ m.role }} : {{ m.content }} {% endfor %}assistant :"
RUN = """\
name: tiny
model: {name_or_path: org/base}
data: {sources: [{path: org/data}], seq_length: 32}
training: {max_steps: 20, global_batch_size: 4}
"""


KINDS = ("train", "eval")
EVAL_ROW = {"kind": "eval", "step": 20, "loss": 5.2}


def card_of(
    folder: Path, tokenizer: Any, *overrides: str, rows: Sequence[Any] = (EVAL_ROW,), **options: Any
) -> str:
    """The card of a run that has trained 20 steps and evaluated."""
    run_dir = RunDir(folder / "tiny-1")
    run_dir.path.mkdir(exist_ok=True)
    run_dir.metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    resolved = resolve(load(folder, RUN, *overrides), num_gpus=0, world_size=1)
    manifest = {"tokens": 6441, "samples": 80, "elapsed_s": 3.0, "world_size": 1, "versions": {}}
    checkpoint = CheckpointInfo(folder, 20, Manifest(manifest, {}))
    return card_text(run_dir, resolved, checkpoint, tokenizer, **options)


def tiny_tokenizer(template: str | None = None) -> Any:
    words = ["<unk>", "<end>", "user", "assistant", "Hello", "Once", "upon", "a", "time", ":"]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "<unk>", "eos_token": "<end>", "pad_token": "<end>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **special)
    tokenizer.chat_template = template
    return tokenizer


def front_matter(card: str) -> Any:
    return yaml.safe_load(card.split("---")[1])


def run_snippet(folder: Path, monkeypatch: Any, capsys: Any) -> str:
    """What the README's Python prints, run in its folder."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(folder)
    capsys.readouterr()
    exec(compile(code, "README.md", "exec"), {})
    return str(capsys.readouterr().out)


def test_a_prompt_that_the_model_cannot_read(tmp_path, monkeypatch):
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"<{number}>" for number in range(60)])
    monkeypatch.setattr(verbs, "_tokenizer", lambda *_: tokenizer)
    monkeypatch.setattr(verbs, "_load", lambda *_: (small_model(), 1))
    config = SimpleNamespace(adapter=SimpleNamespace(type="none"), data=None)
    options = SimpleNamespace(step=None, seed=0, prompt="Once upon <59>", chat=False)
    with pytest.raises(DataError, match=r"holds '<59>' \(token 69\), the model knows 64"):
        verbs._generate(options, RunDir(tmp_path), SimpleNamespace(config=config))


def test_generate_uses_its_own_settings_alone(tmp_path, monkeypatch, capsys):
    config = SimpleNamespace(adapter=SimpleNamespace(type="none"), data=None)
    config.training = SimpleNamespace(precision="fp32")
    monkeypatch.setattr(verbs, "_tokenizer", lambda *_: tiny_tokenizer())

    def generated(temperature, top_p=0.95, **changes):
        model = small_model(**changes).eval()
        for name, value in changes.items():
            setattr(model.generation_config, name, value)
        monkeypatch.setattr(verbs, "_load", lambda *_: (model, 1))
        options = SimpleNamespace(step=None, seed=0, prompt="Once upon", chat=False)
        options.max_new_tokens, options.temperature, options.top_p = 12, temperature, top_p
        verbs._generate(options, RunDir(tmp_path), SimpleNamespace(config=config))
        return capsys.readouterr().out

    odd = [{"penalty_alpha": 0.6, "top_k": 4}, {"num_return_sequences": 2, "num_beams": 10**6}]
    odd += [{"bad_words_ids": "x"}, {"prompt_lookup_num_tokens": 3}, {"stop_strings": "a"}]
    odd += [{"cache_implementation": "nonsense"}, {"custom_generate": "a/b"}, {"max_length": 1}]
    for temperature in (0.0, 0.8):
        plain = generated(temperature)
        wrong = [changes for changes in odd if generated(temperature, **changes) != plain]
        assert not wrong, wrong
    for temperature, top_p, changes in (
        (0.0, 0.9, {"is_encoder_decoder": True}),
        (0.8, -1.0, {}),
        (float("nan"), 0.9, {}),
    ):
        with pytest.raises(UserError, match="cannot generate with this model") as caught:
            generated(temperature, top_p, **changes)
        assert "--temperature" in caught.value.fix


def test_merging_is_refused_where_there_is_no_adapter(tmp_path):
    run_dir, resolved = RunDir(tmp_path / "tiny-1"), resolve(load(tmp_path, RUN), num_gpus=0)
    add_checkpoint(run_dir, 20)
    options = SimpleNamespace(step=None, push_to_hub=None, output=None, merge_adapter=True)
    with pytest.raises(UserError, match="did not train an adapter") as caught:
        verbs._export(options, run_dir, resolved)
    assert (caught.value.where, caught.value.fix) == ("--merge-adapter", "leave it out")


def unread(folder: Path, wanted: torch.Tensor | None) -> None:
    """Do without the process that reads an export."""


@each(
    (False, 9000, 4),  # embeddings have 8192 bytes, and the largest matrix 6144
    (True, 9000, 4),
    (False, 1000, 15),  # a larger tensor has a file of its own
    (False, 10**9, 1),
)
def test_weights_in_several_files_load_to_the_same_model(tied, limit, least, *, tmp_path):
    model, folder = small_model(tie_word_embeddings=tied).eval(), tmp_path / "model"
    export_model(model, tiny_tokenizer(), folder, max_shard_bytes=limit, verify=unread)
    files = {file.name: file for file in folder.glob("*.safetensors")}
    assert len(files) >= least
    if limit == 9000:
        assert all(file.stat().st_size < limit + 2000 for file in files.values()), "with its names"
    index = folder / "model.safetensors.index.json"
    if least == 1:
        assert list(files) == ["model.safetensors"] and not index.exists()
    else:
        assert set(json.loads(index.read_text())["weight_map"].values()) == set(files)
    again = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.arange(20)[None]
    assert torch.equal(again(ids).logits, model(ids).logits)


PROGRAM = """
import pathlib, sys
from isles.checkpoint.export import export_model
from tests.small_models import small_model
from tests.unit.test_begin import add_checkpoint
export_model(small_model(), None, pathlib.Path(sys.argv[1]), max_shard_bytes=10**9)
print([name for name in ("deepspeed", "mlflow") if name in sys.modules])
"""


@pytest.mark.long
def test_an_export_does_not_import_deepspeed(tmp_path):
    """Which takes seconds, and brings MLflow with it where that is installed."""
    done = run_program([sys.executable, "-c", PROGRAM, tmp_path / "model"])
    assert done.stdout.strip().endswith("[]"), done.stdout + done.stderr


@each((tiny_tokenizer(), "Once upon a time"), (tiny_tokenizer(TEMPLATE), "\n"), (None, "64"))
def test_the_snippet_of_the_card_works(tokenizer, printed, *, tmp_path, monkeypatch, capsys):
    folder, model = tmp_path / "model", small_model()
    model.generation_config.max_length = 40
    # transformers itself refuses to save this, once it was changed.
    model.generation_config.temperature = 0.6
    card = card_of(tmp_path, tokenizer)
    export_model(model, tokenizer, folder, max_shard_bytes=10**9, card=card, verify=unread)
    assert printed in run_snippet(folder, monkeypatch, capsys)
    if tokenizer is not None:
        template = tokenizer.chat_template
        assert ("apply_chat_template" in card) == (template is not None)
        assert AutoTokenizer.from_pretrained(folder).chat_template == template
        generation = json.loads((folder / "generation_config.json").read_text())
        # 2 is the default of the class, and no end to this tokenizer; 1 is.
        assert generation["max_length"] == 40 and generation["eos_token_id"] == 1
        assert generation["temperature"] == 0.6


def test_the_snippet_of_an_adapter_works(tmp_path, monkeypatch, capsys):
    from peft import LoraConfig, get_peft_model

    base, folder = tmp_path / "base", tmp_path / "adapter"
    small_model().save_pretrained(base)
    loaded = AutoModelForCausalLM.from_pretrained(base)
    get_peft_model(loaded, LoraConfig(task_type="CAUSAL_LM", r=2)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    card = card_of(tmp_path, tiny_tokenizer(), "adapter.type=lora", kind="adapter")
    (folder / "README.md").write_text(card)
    assert run_snippet(folder, monkeypatch, capsys).strip()
    head = front_matter(card)
    assert head["library_name"] == "peft" and "lora" in head["tags"]
    assert "this is only the adapter" in card


def test_a_card_says_what_is_known_and_nothing_else(tmp_path):
    card = card_of(tmp_path, tiny_tokenizer())
    head = front_matter(card)
    assert head["library_name"] == "transformers" and head["pipeline_tag"] == "text-generation"
    assert head["base_model"] == "org/base" and head["datasets"] == ["org/data"]
    assert "license" not in head and "language" not in head
    assert "| validation loss | 5.2000 |" in card and "perplexity" not in card
    assert "| tokens | 6.4k |" in card and "name: tiny" in card
    shape = ("model.name_or_path=llama-2m", "model.init=scratch", "data.sources=[{type: fake}]")
    fresh = card_of(tmp_path, None, *shape)
    assert "base_model" not in front_matter(fresh) and "datasets" not in front_matter(fresh)
    assert "trained from random weights" in fresh
    method = ("training.method=dpo", "adapter.type=qlora", "data.sources.0.type=preference")
    dpo = card_of(tmp_path, tiny_tokenizer(TEMPLATE), *method, repo="me/x")
    assert {"dpo", "qlora", "conversational"} <= set(front_matter(dpo)["tags"])
    assert 'folder = "me/x"' in dpo and "# x" in dpo and "2305.18290" in dpo


def test_what_is_no_export_is_not_replaced(tmp_path):
    thesis = tmp_path / "notes" / "thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("years of work")
    with pytest.raises(UserError, match="is not an isles export"):
        export_model(small_model(), None, thesis.parent, max_shard_bytes=10**9)
    assert thesis.read_text() == "years of work" and not list(tmp_path.glob(".partial*"))
    base, own = tmp_path / "base", tmp_path / "own"
    small_model().save_pretrained(base)
    card = card_of(tmp_path, None)
    for _ in range(2):  # an export of isles is replaced
        export_model(small_model(), None, own, max_shard_bytes=10**9, card=card, verify=unread)
    (own / "notes.txt").write_text("mine")
    for folder in (base, own):
        before = (folder / "model.safetensors").read_bytes()
        with pytest.raises(UserError, match="is not an isles export"):
            export_model(small_model(), None, folder, max_shard_bytes=10**9, verify=unread)
        assert (folder / "model.safetensors").read_bytes() == before


def test_a_card_of_odd_metrics_has_the_figures_that_are_numbers(tmp_path):
    odd = (None, True, -1, 1e308, "x", "\ud800", [], {}, [1], {"a": 1}, 10**400, float("nan"))
    rows: list[Any] = [*odd]
    for key in ("kind", "step", "loss", "perplexity"):
        rows += [{**EVAL_ROW, "kind": kind, key: odd_one} for odd_one in odd for kind in KINDS]
    wrong = []
    for row in rows:
        try:
            card_of(tmp_path, None, rows=[row]).encode()
        except Exception as error:
            wrong.append(f"{row}: {error!r:.200}")
    assert not wrong, "\n".join(wrong)
    card = card_of(tmp_path, None, rows=[*rows * 200, {**EVAL_ROW, "perplexity": "|\n# x"}])
    assert "| validation loss | 5.2000 |" in card and "# x" not in card
