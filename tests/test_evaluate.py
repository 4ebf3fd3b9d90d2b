"""scripts/evaluate.py: lm-eval's numbers and texts are those of its own HFLM, for all requests and checkpoints."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from adapters import random_pairs, write_peft
from conftest import run_script, save_byte_tokenizer
from families import BASE

pytest.importorskip("lm_eval")
import tokenizers
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from lm_eval.models.huggingface import HFLM
from tokenizers.processors import TemplateProcessing
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast

from lit_gen.adapter import AdapterConfig, add_adapter, save_adapter
from lit_gen.adapter_v2 import add_adapter_v2, save_adapter_v2
from lit_gen.beams import Beams
from lit_gen.checkpoint import load_model
from lit_gen.fabric import setup_fabric
from lit_gen.lora import load_lora, merge_lora
from lit_gen.model import GPT
from lit_gen.source import open_source
from lit_gen.tokenizer import Tokenizer
from lit_gen.utils import UserError
from scripts import evaluate
from scripts.evaluate_lm import LitGenLM
from scripts.evaluate_settings import settings_of
from scripts.evaluate_tasks import load_tasks

CONTEXT = 256
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
WORDS = "the cat sat on a mat and read its book of old tales by the sea while rain fell over all of them".split()
YAML = """task: {task}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}, cache_dir: {cache}}}
test_split: test
fewshot_split: test
fewshot_config: {{sampler: first_n}}
doc_to_text: "Question: {{{{query}}}}\\nAnswer:"
"""
CHOICE = """output_type: multiple_choice
doc_to_target: gold
doc_to_choice: choices
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
TEXT = """output_type: generate_until
doc_to_target: "{{choices[gold]}}"
generation_kwargs: {until: ["e", "zq"], max_gen_toks: 9}
metric_list: [{metric: exact_match}]
"""


def make_hf(vocab_size: int) -> AutoModelForCausalLM:
    own = {"vocab_size": vocab_size, "max_position_embeddings": CONTEXT, "bos_token_id": 0, "eos_token_id": 1}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**BASE | own)).eval().float()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2 + ("norm" in name)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder "model" with a byte-level tokenizer that puts <s> first, tasks, a LoRA and adapters."""
    folder = tmp_path_factory.mktemp("evaluate")
    save_byte_tokenizer(folder / "model", 300, " ".join(WORDS) * 4, add_bos_token=None, chat_template=TEMPLATE)
    library = tokenizers.Tokenizer.from_file(str(folder / "model/tokenizer.json"))
    library.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    library.save(str(folder / "model/tokenizer.json"))
    make_hf(300).save_pretrained(folder / "model")
    questions = []
    for i in range(8):
        query = " ".join(WORDS[(i * 5 + k * (i + 1)) % 22] for k in range(3 + 2 * i))
        choices = [" ".join(WORDS[(i + c * 3 + k) % 22] for k in range(1 + c)) for c in range(2 + i % 3)]
        questions.append({"query": query, "choices": choices, "gold": i % 2})
    (folder / "questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    for task, rest in (("tiny_choice", CHOICE), ("tiny_text", TEXT)):
        where = {"file": folder / "questions.jsonl", "cache": folder / "datasets"}
        (folder / f"{task}.yaml").write_text(YAML.format(task=task, **where) + rest)
    shapes = {f"model.layers.{i}.self_attn.q_proj": (64, 64) for i in range(4)}
    write_peft(folder / "lora", random_pairs(shapes, std=0.3))
    generator = torch.Generator().manual_seed(1)
    for name, add, save in (("adapter", add_adapter, save_adapter), ("adapter_v2", add_adapter_v2, save_adapter_v2)):
        model = add(GPT.from_checkpoint(folder / "model"), AdapterConfig(3, 1))
        for key, parameter in model.named_parameters():
            if "prefix" in key or "scale" in key or "gate" in key:
                parameter.data += torch.randn(parameter.shape, generator=generator) * 0.2
        (folder / name).mkdir()
        save(model, folder / name / f"lit_model_{name}.safetensors")
    return folder


@pytest.fixture(scope="module")
def hflm(folder: Path) -> HFLM:
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", "chat_template": TEMPLATE}
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "model/tokenizer.json"), **names)
    return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4, device="cpu")


@pytest.fixture
def lm(folder: Path) -> Callable[..., LitGenLM]:
    source = open_source(folder / "model", setup_fabric("32-true"))
    return lambda *how: LitGenLM(source, Tokenizer(folder / "model"), *how)


def instances(kind: str, *arguments: tuple) -> list[Instance]:
    return [Instance(kind, {}, one, i) for i, one in enumerate(arguments)]


PAIRS = [
    ("The cat", " sat on a mat"),
    ("The cat", " read its book"),
    ("The cat  ", "sat"),  # spaces at the end belong to what is scored
    ("", "the sea while rain"),
    ("ünïcödé 🔥 and", " 🔥 fell"),
    ("a " * 300 + "word", " by the sea"),  # longer than the context
    ("<s>the old tales", " of them"),
]


def close(found: list[tuple[float, bool]], expected: list[tuple[float, bool]]) -> None:
    torch.testing.assert_close([x for x, _ in found], [x for x, _ in expected], rtol=1e-5, atol=1e-4)
    assert [hit for _, hit in found] == [hit for _, hit in expected]


def test_log_likelihoods_are_those_of_hflm(lm, hflm: HFLM, capsys) -> None:
    """Seven requests in batches of four: the last batch has three."""
    ours, requests = lm(4), instances("loglikelihood", *PAIRS)
    texts = ["the cat " * 120, "rain fell", "", "<s>all of them"]  # the first in windows
    rolling = instances("loglikelihood_rolling", *((text,) for text in texts[:2] + texts[3:]))
    found, expected = ours.loglikelihood(requests, disable_tqdm=True), hflm.loglikelihood(requests, disable_tqdm=True)
    close(found, expected)
    assert "1 of 7 texts are longer than 256 tokens: they are cut at the beginning" in capsys.readouterr().err
    assert len(set(found)) == 7
    assert found == [ours.loglikelihood([request], disable_tqdm=True)[0] for request in requests]
    sums = ours.loglikelihood_rolling(rolling, disable_tqdm=True)
    torch.testing.assert_close(sums, hflm.loglikelihood_rolling(rolling, disable_tqdm=True), rtol=1e-5, atol=1e-3)
    greedy = [(c, hflm.generate_until(instances("generate_until", (c, {"max_gen_toks": 3})), True)[0]) for c in "ab"]
    requests = instances("loglikelihood", *greedy)
    close(ours.loglikelihood(requests, True), hflm.loglikelihood(requests, True))


def test_texts_are_those_of_hflm(lm, hflm: HFLM) -> None:
    """Each request has stops and a length of its own."""
    contexts = [context or "once" for context, _ in PAIRS]
    settings = [
        {"until": ["e", "\n\n"], "max_gen_toks": 12},
        {"until": ["t"], "max_gen_toks": 20},
        {"until": [], "max_gen_toks": 5},
        {"until": "a", "do_sample": False, "temperature": 0.7},
        {"max_gen_toks": 1},
        {"until": ["never so"], "max_gen_toks": 30},
        {"until": ["o", "s"], "max_new_tokens": 8, "repetition_penalty": 1.3},
    ]
    requests = instances("generate_until", *zip(contexts, settings, strict=True))
    ours = lm(4)
    found = ours.generate_until(requests, disable_tqdm=True)
    own = [request for request in requests if "repetition_penalty" not in request.args[1]]  # HFLM's 256 new tokens do
    expected = [hflm.generate_until([request], disable_tqdm=True)[0] for request in own[:3] + own[4:]]  # not fit
    assert [found[i] for i in (0, 1, 2, 4, 5)] == expected
    assert found == [ours.generate_until([request], disable_tqdm=True)[0] for request in requests]
    assert len(set(found)) == 7


def test_budget_larger_than_the_context_never_empties_a_prompt(lm) -> None:
    ours = lm(4)
    ids = Tokenizer(ours.source.path).encode("a " * 300).tolist()
    for context, n, prompt, new in [
        ("a " * 300, 56, ids[-200:], 56),  # as HFLM
        ("a " * 300, 255, ids[-1:], 255),
        ("a " * 300, 256, ids[-255:], 1),
        ("a " * 300, 9999, ids[-255:], 1),
        ("the cat", 9999, Tokenizer(ours.source.path).encode("the cat").tolist(), None),
        ("the cat", 3, Tokenizer(ours.source.path).encode("the cat").tolist(), 3),
    ]:
        request, _ = ours._request(0, context, {"max_gen_toks": n})
        assert list(request.prompt) == prompt
        assert request.settings["max_new_tokens"] == (new or 256 - len(prompt))
    assert ours._request(0, "", {})[0].prompt == [0]
    assert len(ours.generate_until(instances("generate_until", ("a " * 300, {"max_gen_toks": 9999})), True)) == 1


def test_settings_of_requests() -> None:
    plain = Beams()
    assert settings_of({}, 256) == ({"max_new_tokens": 256, "stop": [], "temperature": 0.0}, plain)
    given = {"until": "\n", "max_gen_toks": 3, "do_sample": True, "temperature": 0.5, "top_p": 0.9, "top_k": 0}
    expected = {"max_new_tokens": 3, "stop": ["\n"], "temperature": 0.5, "top_p": 0.9}
    assert settings_of(given, 256) == (expected, plain)
    assert settings_of({"temperature": 0.5, "do_sample": False, "num_beams": 1}, 4)[0]["temperature"] == 0.0
    assert given["until"] == "\n" and settings_of({"until": ["", "x"]}, 4)[0]["stop"] == ["x"]
    search = {"num_beams": 4, "length_penalty": 0.6, "early_stopping": True}
    assert settings_of(search, 4)[1] == Beams(4, 0.6, True)
    for wrong in ({"penalty_alpha": 0.6}, {"logprobs": 3}, {"num_return_sequences": 2}):
        with pytest.raises(UserError, match=f"generation_kwargs has {next(iter(wrong))}=.*may have until.*num_beams"):
            settings_of(wrong, 4)
    for wrong, why in [
        ({"num_beams": 0}, "num_beams"),
        ({"length_penalty": 2.0}, "give num_beams above 1"),
        ({"num_beams": 2, "do_sample": True, "temperature": 0.5}, "a search with num_beams samples nothing"),
        ({"num_beams": 2, "repetition_penalty": 1.3}, "do not go with num_beams"),
    ]:
        with pytest.raises(UserError, match=why):
            settings_of(wrong, 4)


def test_beams_are_those_of_hflm(lm, hflm: HFLM) -> None:
    """Requests that search, in two ways, stand among others that do not. Of a search HFLM's stops see one beam only."""
    contexts = [context or "once" for context, _ in PAIRS]
    ways = [{}, {"num_beams": 3}, {"num_beams": 2, "length_penalty": 0.5, "early_stopping": True}]
    settings = [{"max_gen_toks": 4 + 3 * i, "until": [] if i % 3 else ["e"]} | ways[i % 3] for i in range(7)]
    requests = instances("generate_until", *zip(contexts, settings, strict=True))
    ours = lm(3)
    found = ours.generate_until(requests, disable_tqdm=True)
    assert found == [hflm.generate_until([request], disable_tqdm=True)[0] for request in requests]
    assert found == lm(1).generate_until(requests, disable_tqdm=True) and len(set(found)) == 7
    plain = instances("generate_until", *((c, {"max_gen_toks": 4 + 3 * i}) for i, c in enumerate(contexts)))
    assert found[1::3] != ours.generate_until(plain, disable_tqdm=True)[1::3]
    stops = [{"max_gen_toks": 20, "num_beams": 3, "until": until} for until in ([], [found[1][1]])]
    whole, cut = (ours.generate_until(instances("generate_until", (contexts[1], stop)), True)[0] for stop in stops)
    assert found[1][1] in whole and found[1][1] not in cut


def test_sampled_texts_do_not_depend_on_the_batch(lm) -> None:
    settings = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 8}
    requests = instances("generate_until", *((word, settings) for word in [*WORDS[:9], "the"]))
    found = lm(3).generate_until(requests, True)
    assert found == lm(10).generate_until(requests, True) and found[0] != found[9]  # asked twice: two samples
    assert found != lm(10, None, 7).generate_until(requests, True)


def cli(capsys, folder: Path, *args: object, task: str = "tiny_choice.yaml") -> tuple[int, str, str]:
    where = ("--tasks", folder / task, "--checkpoint_dir", folder / "model")
    return run_script(capsys, evaluate.main, *where, *args)


def samples(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_results_are_those_of_hflm(folder: Path, hflm: HFLM, tmp_path: Path, capsys) -> None:
    both = f"{folder}/tiny_choice.yaml,{folder}/tiny_text.yaml"
    options = ("--batch_size", 3, "--num_fewshot", 2, "--out", tmp_path / "r.json", "--log_samples", "true")
    status, out, err = cli(capsys, folder, *options, "--tasks", both)
    assert status == 0 and "|tiny_choice|" in out and "acc_norm" in out and "exact_match" in out, err
    manager, tasks = load_tasks(both.split(","), None)
    how = {"num_fewshot": 2, "task_manager": manager, "fewshot_as_multiturn": False}
    expected = simple_evaluate(model=hflm, tasks=tasks, **how)
    found = json.loads((tmp_path / "r.json").read_text())
    for task, values in expected["results"].items():
        assert {k: v for k, v in found["results"][task].items() if "," in k and "stderr" not in k} == {
            k: v for k, v in values.items() if "," in k and "stderr" not in k
        }
    assert found["config"]["precision"] == "32-true" and found["config"]["max_length"] == CONTEXT
    for task in expected["samples"]:
        for one, other in zip(samples(tmp_path / f"r.{task}.jsonl"), expected["samples"][task], strict=True):
            assert one["arguments"] == [list(args) for args in other["arguments"]] and one["doc_id"] == other["doc_id"]
            if task == "tiny_choice":
                close([tuple(x[0]) for x in one["resps"]], [x[0] for x in other["resps"]])
            else:
                assert one["resps"] == other["resps"]
    status, out, err = cli(capsys, folder, *options)
    assert status == 2 and "r.json is there already" in err and "requests, " not in err


def test_cache_goes_on_and_never_answers_for_another_model(folder: Path, tmp_path: Path, capsys) -> None:
    def run(*args: object) -> tuple[str, bool, int]:
        status, out, err = cli(capsys, folder, "--use_cache", tmp_path / "cache/run", *args)
        assert status == 0, err
        return out, "requests, " in err, len(list((tmp_path / "cache").glob("run-*_rank0.db")))

    first, computed, files = run("--limit", 2)
    assert computed and files == 1
    assert run("--limit", 2, "--batch_size", 1) == (first, False, 1)  # the model was not even loaded
    status, out, err = cli(capsys, folder, "--limit", 3, "--use_cache", tmp_path / "cache/run")
    asked = [json.loads(line) for line in (folder / "questions.jsonl").read_text().splitlines()[2:3]]
    assert f"{sum(len(question['choices']) for question in asked)} requests, " in err  # only what is left
    for files, other in enumerate((("--precision", "bf16-true"), ("--lora_path", folder / "lora")), start=2):
        assert run("--limit", 1, *other)[1:] == (True, files)
    assert run("--limit", 1, "--max_length", 40)[1:] == (True, 4)


def test_what_was_computed_before_a_crash_is_kept(lm, tmp_path: Path) -> None:
    ours = lm(2)
    cached, load = CachingLM(ours, str(tmp_path / "c.db")), ours.source.load
    model = load()
    forward, calls = model.run_layers, 0

    def breaks(*args: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise ZeroDivisionError
        return forward(*args)

    vars(ours)["model"] = model
    model.run_layers = breaks
    requests = instances("loglikelihood", *PAIRS)
    with pytest.raises(ZeroDivisionError):
        cached.loglikelihood(requests)
    kept = len(cached.dbdict)
    assert 0 < kept < 7
    assert cached.loglikelihood(requests) == lm(7).loglikelihood(requests) and len(cached.dbdict) == 7


@pytest.mark.parametrize("part", ["lora", "adapter", "adapter_v2"])
def test_loras_and_adapters(part: str, folder: Path) -> None:
    from lit_gen.adapter import load_adapter
    from lit_gen.adapter_v2 import load_adapter_v2

    model = load_model(folder / "model", torch.float32, torch.device("cpu"))
    path = folder / part
    if part == "lora":
        merge_lora(model, load_lora(path, model.config))
    else:
        file = path / f"lit_model_{part}.safetensors"
        model = (load_adapter if part == "adapter" else load_adapter_v2)(model, file)
    source = open_source(folder / "model", setup_fabric("32-true"), **{part.removesuffix("_v2"): path})
    ours = LitGenLM(source, Tokenizer(folder / "model"), 4)
    found = ours.loglikelihood(instances("loglikelihood", *PAIRS), True)
    for (context, continuation), (value, _) in zip(PAIRS, found, strict=True):
        if context and not context.endswith(" "):
            ids, n = ours.tok_encode(context + continuation)[-(CONTEXT + 1) :], len(ours.tok_encode(continuation)) - 1
            logprobs = model(torch.tensor([ids[:-1]]))[0, -n:].double().log_softmax(-1)
            assert abs(logprobs[torch.arange(n), ids[-n:]].sum().item() - value) < 1e-4
    base = LitGenLM(open_source(folder / "model", setup_fabric("32-true")), ours.tokenizer, 4)
    others = base.loglikelihood(instances("loglikelihood", *PAIRS), True)
    assert all(abs(a - b) > 1e-3 for (a, _), (b, _) in zip(found, others, strict=True))


def test_prompts_in_the_chat_template_are_those_of_hflm(folder: Path, hflm: HFLM, tmp_path: Path, capsys) -> None:
    options = ("--apply_chat_template", "true", "--num_fewshot", 2, "--limit", 3, "--system_instruction", "Be kind.")
    out = ("--out", tmp_path / "r.json", "--log_samples", "true")
    status, _, err = cli(capsys, folder, *options, *out, "--fewshot_as_multiturn", "true")
    assert status == 0, err
    manager, tasks = load_tasks([str(folder / "tiny_choice.yaml")], None)
    how = {"apply_chat_template": True, "num_fewshot": 2, "limit": 3, "system_instruction": "Be kind."}
    expected = simple_evaluate(model=hflm, tasks=tasks, task_manager=manager, fewshot_as_multiturn=True, **how)
    found = samples(tmp_path / "r.tiny_choice.jsonl")
    for one, other in zip(found, expected["samples"]["tiny_choice"], strict=True):
        assert one["arguments"] == [list(args) for args in other["arguments"]]
        close([tuple(x[0]) for x in one["resps"]], [x[0] for x in other["resps"]])
    assert found[0]["arguments"][0][0].count("[user]") == 3 and "[system] Be kind." in found[0]["arguments"][0][0]


def test_last_message_is_left_open(lm, hflm: HFLM, capsys) -> None:
    ours = lm()
    turns = [{"role": "user", "content": "Hi "}, {"role": "assistant", "content": "Well, "}]
    for messages in (turns, [turns[0], turns[1] | {"content": "Well,"}]):
        for how in (True, False):
            assert ours.apply_chat_template(messages, how) == hflm.apply_chat_template(messages, how)
    assert ours.apply_chat_template(turns, False).endswith("[assistant] Well,")
    ours.tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('none') }}{% endif %}" + (TEMPLATE)
    )
    text = ours.apply_chat_template([{"role": "system", "content": "x"}, turns[0]])
    assert text == ours.apply_chat_template(turns[:1]) and "system message: it is left out" in capsys.readouterr().err
    with pytest.raises(UserError, match="template"):
        ours.tokenizer.chat_template = "{{ raise_exception('none') }}"
        ours.apply_chat_template(turns)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--tasks", "no_such_task.yaml"], "there is no task 'no_such_task.yaml'"),
        (["--tasks", "{broken}"], "broken.yaml cannot be loaded"),
        (["--tasks", ","], "names no task"),
        (["--limit", "0"], "limit is 0"),
        (["--batch_size", "0"], "batch_size is 0"),
        (["--max_length", "257"], "max_length is 257, but must be from 2 to the model's context of 256"),
        (["--num_fewshot", "-1"], "num_fewshot is -1"),
        (["--fewshot_as_multiturn", "true"], "needs --apply_chat_template true"),
        (["--gen_kwargs", '{"beams": 3}'], "generation_kwargs has beams=3"),
        (["--log_samples", "true"], "beside --out"),
        (["--out", "no/folder/r.json"], "r.json is there already, or its folder is not"),
        (["--lora_path", "{lora}", "--adapter_path", "{adapter}"], "--lora_path and --adapter_path do not go together"),
        (["--lora_path", "{adapter}"], "adapter"),
        (["--checkpoint_dir", "no/such/folder"], "no/such/folder"),
    ],
)
def test_refusals_are_one_line_before_the_model_is_loaded(args, said, folder: Path, tmp_path: Path, capsys) -> None:
    task = (folder / "tiny_choice.yaml").read_text()
    (tmp_path / "broken.yaml").write_text(task.replace("questions.jsonl", "nix.jsonl"))
    places = {f"{{{name}}}": folder / name for name in ("lora", "adapter")} | {"{broken}": tmp_path / "broken.yaml"}
    status, out, err = cli(capsys, folder, *(places.get(arg, arg) for arg in args))
    assert status == 2 and not out and said in err.splitlines()[-1] and "requests, " not in err


def test_names_patterns_and_folders_of_tasks(folder: Path) -> None:
    """The patterns of lm-eval's own index, with a folder beside it; what is not there is named."""
    with pytest.raises(UserError, match="no task 'no_such_task'"):
        load_tasks(["tiny_cho*", str(folder / "tiny_text.yaml"), "no_such_task"], folder)


def test_no_template_is_said(folder: Path, tmp_path: Path, capsys) -> None:
    shutil.copytree(folder / "model", tmp_path / "model")
    config = json.loads((tmp_path / "model/tokenizer_config.json").read_text())
    (tmp_path / "model/tokenizer_config.json").write_text(json.dumps(config | {"chat_template": None}))
    where = ("--checkpoint_dir", tmp_path / "model", "--apply_chat_template", "true")
    status, _, err = cli(capsys, folder, *where)
    assert status == 2 and "has no chat template: leave --apply_chat_template out" in err
