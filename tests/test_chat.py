"""Chat templates: where they are found, and that they render as in transformers and never leave the sandbox."""

import json
import re
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from lit_gen import chat
from lit_gen.tokenizer import Tokenizer
from lit_gen.utils import UserError

SYSTEM = {"role": "system", "content": "Be kind & <brief>."}
USER = {"role": "user", "content": "  Grüße, 世界! 🔥 'quoted' \"double\"\n"}
ASSISTANT = {"role": "assistant", "content": "Hello\n\nthere "}
CONVERSATIONS = [
    [USER],
    [USER, ASSISTANT, USER],
    [SYSTEM, USER],
    [SYSTEM, USER, ASSISTANT, USER],
    [USER, ASSISTANT | {"tool_calls": None, "content": "x"}],
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
TOOL = {
    "type": "function",
    "function": {"name": "f<g>", "description": "naïve & 'so'", "parameters": {"b": 1, "a": [2]}},
}
TEMPLATES = {  # what templates on the hub lean on
    "blocks": "{%- for m in messages %}\n {% if m.role == 'user' %}\n{{ m.content }}\n {% endif %}\n{%- endfor %}\n.\n",
    "tojson": "{{ messages | tojson }}|{{ messages | tojson(indent=2, ensure_ascii=True) }}"
    "{{ {'b':1,'a':'<é>'} | tojson(sort_keys=true, separators=(',', ':')) }}",
    "loopcontrols": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "generation": "{% set x = 1 %}{% for m in messages %}{% generation %}{% set x = 2 %}{{ m.content }}{{ x }}"
    "{% endgeneration %}{{ x }}{% endfor %}",
    "tokens": "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ unk_token }}{{ mask_token }}{{ add_generation_prompt }}",
    "tools": "{% if tools %}{{ tools | tojson }}{% endif %}{% if documents is none %}none{% endif %}"
    "{{ flag is defined }}",
    "keys": "{% for m in messages %}{{ 'tool_calls' in m }}{{ m.name is defined }}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "filters": "{{ messages[0].content | trim | upper }}{{ messages | map(attribute='role') | join(',') }}"
    "{{ messages[0]['content'].strip().split(' ')[0] }}{{ messages[-1:] | list | length }}",
    "macro": "{% macro say(m) %}[{{ m.role }}]{% endmacro %}{% for m in messages %}{{ say(m) }}{% endfor %}",
}


def outcome(render, messages: list[dict], **kwargs: object) -> str | None:
    """The text, or None if the template refuses the messages."""
    try:
        return render(messages, **kwargs)
    except Exception as error:  # whatever transformers lets through
        assert type(error).__name__ in ("UserError", "TemplateError", "UndefinedError"), error
        return None


@pytest.fixture(scope="module")
def reference():
    transformers = pytest.importorskip("transformers")
    lib = tokenizers.Tokenizer(models.BPE())
    return transformers.PreTrainedTokenizerFast(tokenizer_object=lib, **SPECIAL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A byte tokenizer that puts BOS before every text, and SPECIAL in tokenizer_config.json."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    lib = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    lib.pre_tokenizer, lib.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    lib.add_special_tokens(list(SPECIAL.values()))
    lib.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    lib.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(SPECIAL))
    return tmp_path


def assert_renders_as_in_transformers(tokenizer: Tokenizer, reference, template: str, **kwargs: object) -> int:
    tokenizer.chat_template = reference.chat_template = template
    rendered = 0
    for messages in CONVERSATIONS:
        for prompt in (True, False):
            options = kwargs | {"add_generation_prompt": prompt}
            expected = outcome(reference.apply_chat_template, messages, tokenize=False, **options)
            assert outcome(tokenizer.render_chat, messages, **options) == expected
            rendered += expected is not None
    return rendered


@pytest.mark.parametrize("name", TEMPLATES)
def test_template_renders_as_in_transformers(folder: Path, reference, name: str) -> None:
    tokenizer = Tokenizer(folder)
    assert assert_renders_as_in_transformers(tokenizer, reference, TEMPLATES[name]) == 10
    assert assert_renders_as_in_transformers(tokenizer, reference, TEMPLATES[name], tools=[TOOL], flag=1) == 10


def test_published_templates_render_as_in_transformers(folder: Path, reference, shared: Path) -> None:
    files = sorted((shared / "data" / "chat_templates").rglob("*.jinja"))
    assert len(files) >= 20
    tokenizer = Tokenizer(folder)
    for file in files:
        template = file.read_bytes().decode()
        assert assert_renders_as_in_transformers(tokenizer, reference, template) >= 2, file.name
        assert_renders_as_in_transformers(tokenizer, reference, template, tools=[TOOL])


def test_what_the_caller_gives_wins_over_the_files(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    tokenizer.chat_template = "{{ bos_token }}{{ enable_thinking }}"
    assert tokenizer.render_chat([USER], bos_token="B", enable_thinking=False) == "BFalse"


def test_chat_ids_have_one_bos_whoever_writes_it(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    hi = tokenizer.encode("Hi", add_special_tokens=False).tolist()
    for template, bos in [("{{ bos_token }}Hi", [256]), ("Hi", []), ("{{ bos_token }}{{ bos_token }}Hi", [256])]:
        tokenizer.chat_template = template
        assert tokenizer.encode_chat([USER]).tolist() == bos + hi
    assert tokenizer.encode("Hi").tolist() == [256, *hi]


# Where it is found ---------------------------------------------------------------------------------------------------


def test_the_more_specific_file_wins(folder: Path) -> None:
    with pytest.raises(UserError, match="no chat template"):
        Tokenizer(folder).encode_chat([USER])

    def configure(template: object) -> str | None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        return Tokenizer(folder).chat_template

    assert configure("string") == "string"
    assert configure([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]) == "d"
    assert configure([{"name": "tool_use", "template": "t"}]) == "t"
    assert configure([{"name": "tool_use", "template": "t"}, {"name": "rag", "template": "r"}]) is None
    assert configure([]) is None
    for wrong in (3, ["text"], [{"name": "default"}, 1], [{"name": "default", "template": 5}]):
        with pytest.raises(UserError, match="neither a string nor a list"):
            configure(wrong)
    configure("string")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("only one")
    assert Tokenizer(folder).chat_template == "only one"
    (folder / "additional_chat_templates" / "default.jinja").write_bytes(b"default\r\n")
    assert Tokenizer(folder).chat_template == "default\r\n"
    (folder / "chat_template.jinja").write_bytes("näher\r\n".encode())
    assert Tokenizer(folder).chat_template == "näher\r\n"
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(UserError, match=re.escape("chat_template.jinja")):
        Tokenizer(folder)


# Errors --------------------------------------------------------------------------------------------------------------

ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}",
    "{{ ''|attr('__class__')|attr('__base__') }}",
    "{{ raise_exception.__globals__ }}",
    "{{ cycler.__init__.__globals__.os }}",
    "{{ '{0.__class__.__mro__}'.format(1) }}",
    "{{ ('{0.__class__}'.format)|string and ['{0.__class__}'.format][0](1) }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{{ range(10 ** 9) | list }}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_a_template_cannot_leave_the_sandbox(template: str) -> None:
    messages = [dict(USER)]
    try:
        text = chat.render(template, messages)
    except UserError as error:
        assert "\n" not in str(error)
    else:  # an attribute that the sandbox hides is undefined, and undefined prints as nothing
        assert text == ""
    assert messages == [USER]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must\nalternate') }}", "roles must alternate"),
        ("{% for m in messages %}", "endfor|Unexpected end"),
        ("{% generation %}x", "endgeneration|Unexpected end"),
        ("{{ messages[0].nothing.more }}", "nothing"),
        ("{{ 'a' + 1 }}", "concatenate"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages[0].content.index('nowhere') }}", "substring"),
        ("{{ 'a' | unknown_filter }}", "unknown_filter"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ {1, 2} | tojson }}", "."),
    ],
)
def test_what_a_template_does_wrong_is_one_line(template: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason) as error:
        chat.render(template, [USER])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("messages", [[], "Hi", [{"role": "user"}, "Hi"], None, {"role": "user"}])
def test_messages_must_be_a_list_of_dicts(messages: object) -> None:
    with pytest.raises(UserError, match="messages must be"):
        chat.render("x", messages)


def test_the_date_is_today() -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", chat.render("{{ strftime_now('%Y-%m-%d') }}", [USER]))
