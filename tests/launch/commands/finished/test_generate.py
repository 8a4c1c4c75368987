"""`tftpu generate` on a small run."""

import io
import json
import sys

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.support.models.generation import language_model
from tftpu.errors import UserError
from tftpu.inference.rows import build_rows
from tftpu.inference.sampling import Sampling
from tftpu.inference.writer import Writer
from tftpu.input_pipelines.sources import Texts, Tokens
from tftpu.launch.commands.finished import generate
from tftpu.launch.main import main
from tftpu.launch.run import texts

SMALL = ("layers=1", "width=32", "heads=2", "context=64")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> str:
    workdir = str(tmp_path_factory.mktemp("run"))
    sizes = [f"--config.model.{size}" for size in SMALL]
    steps = ("steps=4", "steps_per_loop=2", "eval_every=4", "log_every=4", "checkpoint_every=4")
    options = [f"--config.train.{option}" for option in steps]
    warmup = "--config.optimizer.warmup_steps=1"
    context = "--config.data.context=64"
    words = ["train", "--config=python_gpt", f"--workdir={workdir}", context, warmup]
    assert main([*words, *sizes, *options]) == 0
    return workdir


def printed(capsys, *words: str) -> str:
    assert main(["generate", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_a_prompt_is_continued_and_the_same_seed_writes_the_same(run, capsys):
    words = [f"--workdir={run}", "--prompt=def f(", "--tokens=80"]
    assert main(["generate", *words]) == 0
    found, activity = capsys.readouterr()
    assert f"Loading {run} ...\nCompiling ..." in activity  # though nobody is at a terminal
    assert activity.endswith("The text ended at --tokens=80.\n")
    assert found.startswith("def f(") and 40 < len(found) <= 87
    assert printed(capsys, *words) == found
    assert printed(capsys, *words, "--seed=1") != found


@pytest.mark.slow
def test_a_file_of_prompts_becomes_json_lines(run, capsys, tmp_path):
    """Forty of them, so that they are continued in two parts."""
    prompts = [f"x{n} = " for n in range(39)] + ["é"]
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join([*prompts, "", ""]))
    words = [f"--workdir={run}", f"--input={path}", "--tokens=10", "--temperature=0"]
    lines = [json.loads(line) for line in printed(capsys, *words).splitlines()]
    assert [line["prompt"] for line in lines] == prompts
    assert all(line["tokens"] == 10 for line in lines)
    for line in lines[0], lines[39]:
        alone = [f"--prompt={line['prompt']}", "--tokens=10", "--temperature=0"]
        assert printed(capsys, words[0], *alone) == f"{line['prompt']}{line['text']}\n"


@pytest.mark.slow
def test_a_tokenizer_of_ones_own_and_its_stop(run, capsys, tmp_path):
    words = {f"w{number}": number for number in range(256)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    path = str(tmp_path / "tokenizer.json")
    tokenizer.save(path)
    asked = [f"--workdir={run}", "--prompt=w1 w2", "--temperature=0", f"--tokenizer={path}"]
    found = printed(capsys, *asked, "--tokens=12").removeprefix("w1 w2 ").split()
    assert len(found) == 12 and set(found) <= set(words)
    assert main(["generate", *asked, "--tokens=12", f"--stop={found[0]}"]) == 0
    stopped = capsys.readouterr()
    assert stopped.out.strip() == "w1 w2"
    assert stopped.err.endswith("The text ended by its end token after 0 tokens.\n")


@pytest.mark.slow
def test_json_lines_hold_prompts_of_several_lines(run, capsys, tmp_path):
    path = tmp_path / "prompts.jsonl"
    prompt = "x = 1\n\x0cy = 2\n"
    path.write_text(json.dumps({"prompt": prompt, "more": 1}) + "\n")
    words = [f"--workdir={run}", f"--input={path}", "--tokens=3"]
    [line] = printed(capsys, *words).splitlines()
    assert json.loads(line)["prompt"] == prompt


def list_prompts(own_field: str, row: dict[str, str]) -> list[str]:
    """Returns the prompts of a table of one row, for a run whose own prompts are in a field."""
    options = generate.Options(workdir="run", input="p.jsonl")
    data = Texts(train_text="a.jsonl", prompt=own_field, field="answer")
    return generate._list_prompts(options, json.dumps(row).encode(), data)


def test_prompts_may_be_in_the_field_of_the_runs_own():
    assert list_prompts("question", {"question": "a", "answer": "b"}) == ["a"]
    assert list_prompts("question", {"question": "a", "prompt": "c"}) == ["c"]
    unnamed = {"": "0", "text": "a"}  # as a table's index
    for own_field, missing in ("", "prompt"), ("question", "question"):
        with pytest.raises(UserError, match=f"the record has no field '{missing}', only "):
            list_prompts(own_field, unnamed)


def test_a_character_of_a_byte_ends_a_text_of_bytes():
    data, codec = Tokens(train_text="a.txt"), texts.ByteCodec()
    assert texts.find_stop_tokens(data, codec, "\n", None) == [10]
    assert texts.find_stop_tokens(data, codec, None, None) == []
    with pytest.raises(UserError, match="--stop=é has 2 bytes, and each token of this run is a b"):
        texts.find_stop_tokens(data, codec, "é", None)


@pytest.mark.slow
def test_a_line_with_values_that_are_not_finite_has_an_error_of_its_own(capsys):
    model = language_model("llama", vocabulary=256, layers=1)
    table = model.get_layer("tokens_embed").embeddings
    values = np.array(table)
    values[ord("!")] = np.nan
    table.assign(values)
    prompts = ["!", "a"]
    rows = build_rows([[*prompt.encode()] for prompt in prompts], 3, Sampling(0), 0)
    with pytest.raises(UserError, match="not finite"):
        generate._print_lines(Writer(model), texts.ByteCodec(), prompts, rows)
    bad, good = map(json.loads, capsys.readouterr().out.splitlines())
    assert "not finite" in bad["error"] and bad["tokens"] == 0
    assert "error" not in good and good["tokens"] == 3


@pytest.mark.medium
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\n\nb\n", "p.txt holds no prompt"),
        ("", "line 1 of"),
        ("{", "p.jsonl is not JSON"),
        ('{"prompt": "\\ud800x"}', "p.jsonl contains an unpaired surrogate"),
        (
            '{"text": "x"}',
            "field 'prompt', only ['text']. Rename the field that holds the prompt, or",
        ),
    ],
)
def test_a_file_without_prompts_is_refused(run, capsys, tmp_path, text, message):
    path = tmp_path / ("p.jsonl" if text.startswith("{") else "p.txt")
    path.write_text(text)
    assert main(["generate", f"--workdir={run}", f"--input={path}"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_prompt_may_be_longer_than_the_context_and_hold_any_byte(run, capsys):
    found = printed(capsys, f"--workdir={run}", f"--prompt={'a' * 100}\udcff", "--tokens=5")
    assert found.startswith("a" * 100)


def test_lines_of_json_hold_what_the_output_cannot_show(monkeypatch):
    line = {"prompt": "é \udcff"}
    for encoding in "ascii", "utf-8":
        output = io.TextIOWrapper(io.BytesIO(), encoding)
        monkeypatch.setattr(sys, "stdout", output)
        assert json.loads(generate._as_json(line).encode(encoding)) == line
    assert generate._as_json({"prompt": "é"}) == '{"prompt": "é"}'


def test_a_prompt_that_ends_in_the_sign_of_the_unfinished_is_not_repeated(tmp_path):
    tokenizer = Tokenizer(models.BPE({"Ð": 0, "\u00b8": 1, "ï": 2, "¿": 3, "½": 4, "a": 5}, []))
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    path = str(tmp_path / "tokenizer.json")
    tokenizer.save(path)
    decode = texts.TokenizerFile(path).build_decoder([5, 2, 3, 4])  # "a\ufffd"
    assert [decode([0]), decode([1]), decode([5])] == ["", "и", "a"]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Give either --prompt=TEXT or --input=FILE"),
        (["--prompt="], "--prompt is empty, and has no token to continue"),
        (["--prompt", ""], "--prompt is empty, and has no token to continue"),
        (["--prompt=a", "--input=b"], "Give either --prompt=TEXT or --input=FILE"),
        (["--input=/nowhere"], "--input=/nowhere cannot be read: "),
        (["--prompt=a", "--top_p=2"], "top_p=2.0: give a probability above 0 and at most 1"),
        (["--prompt=a", "--tokens=0"], "--tokens"),
        (["--prompt=a", "--tokenizer=/nowhere"], "path of that tokenizer.json: --tokenizer=FILE."),
    ],
)
def test_what_cannot_be_continued_is_said_in_a_sentence(run, capsys, words, message):
    assert main(["generate", f"--workdir={run}", *words]) == 2
    said = capsys.readouterr().err
    assert message in said and "Traceback" not in said


@pytest.mark.parametrize(("prompt", "is_said"), [("Q?\\nA:", True), ("Q?\nA:", False)])
def test_a_backslash_that_may_be_meant_as_a_new_line_is_said(capsys, prompt, is_said):
    options = generate.Options(workdir="run", prompt=prompt)
    generate._read_input(options)
    assert ("holds a backslash and an n" in capsys.readouterr().err) is is_said


def test_what_would_control_a_terminal_is_shown_as_a_sign():
    assert generate.replace_control_characters("a\x1b[2J\tb\r\n") == "a\ufffd[2J\tb\ufffd\n"


CONFIG = """\
from tftpu.config import Experiment, OptimizerConfig, TrainConfig
from tftpu.input_pipelines.sources import Tokens
from tftpu.models.sizes import GPT


def get_config():
    return Experiment(
        model=GPT("tiny", vocabulary=256, context=32, layers=1, width=32, heads=2),
        data=Tokens("texts", 8, context=32, train_text="FOLDER/a.txt", eval_text="FOLDER/b.txt"),
        optimizer=OptimizerConfig(name="adamw"),
        train=TrainConfig(epochs=1, log_every=1),
    )
"""


@pytest.mark.slow
def test_a_machine_without_the_data_of_a_run_continues_texts(tmp_path, capsys):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("To be, or not to be, that is the question.\n" * 40)
    config = tmp_path / "texts.py"
    config.write_text(CONFIG.replace("FOLDER", str(tmp_path)))
    workdir = f"--workdir={tmp_path / 'run'}"
    assert main(["train", f"--config={config}", workdir]) == 0
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).unlink()
    assert main(["evaluate", workdir]) == 2
    capsys.readouterr()
    assert printed(capsys, workdir, "--prompt=To be", "--tokens=5").startswith("To be")
    assert main(["export-weights", workdir, f"--to={tmp_path / 'w.safetensors'}"]) == 0
