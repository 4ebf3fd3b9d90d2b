"""Claims of lit_gen/penalties.py: what penalties, biases and processors do to their row, and to no other."""

import math

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from lit_gen.penalties import ROOM, Penalties, RowHistory
from lit_gen.sampling import Sampler, row_stream
from lit_gen.settings import Settings
from lit_gen.utils import UserError

V = 64
PROMPTS = [[3, 9, 3, 60], [5], [1, 2, 3, 4, 5, 6, 7, 8, 9], [0, 63, 0]]
TOKENS = [[9, 7, 9], [], [10, 2, 10, 10, 11, 2], [63]]


def random_logits(rows: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(rows, V, generator=torch.Generator().manual_seed(rows)) * 3).to(dtype)


def applied(logits: torch.Tensor, *settings: Settings, prompts=PROMPTS, tokens=TOKENS, processors=()) -> torch.Tensor:
    return Penalties(settings, prompts, tokens, "cpu", processors).apply(logits)


def test_repetition_penalty_is_that_of_transformers():
    """Ragged rows, a penalty of its own for each, one of them with none; the same bits."""
    amounts = [1.3, 0.7, 1.0, 50.0]
    logits = random_logits()
    ours = applied(logits, *(Settings(repetition_penalty=x) for x in amounts))
    for b, amount in enumerate(amounts):
        seen = torch.tensor([PROMPTS[b] + TOKENS[b]])
        assert torch.equal(ours[b : b + 1], RepetitionPenaltyLogitsProcessor(amount)(seen, logits[b : b + 1])), b


def test_presence_and_frequency_count_new_tokens_only():
    """OpenAI's definition, by hand: minus 0.5 once for each token there, minus 0.25 each time that it is there."""
    logits = torch.tensor([[1.0, -1.0, 0.5, 2.0, 0.0, -2.0]]).repeat(3, 1)
    prompts, tokens = [[0, 0, 5], [1], [2, 3]], [[1, 3, 1, 1], [4], []]
    both = Settings(presence_penalty=0.5, frequency_penalty=0.25)
    ours = applied(logits, both, both, both, prompts=prompts, tokens=tokens)
    assert ours.tolist() == [
        [1.0, -2.25, 0.5, 1.25, 0.0, -2.0],
        [1.0, -1.0, 0.5, 2.0, -0.75, -2.0],
        [1.0, -1.0, 0.5, 2.0, 0.0, -2.0],
    ]
    one_each = Settings(presence_penalty=0.5), Settings(frequency_penalty=-1.0), Settings(frequency_penalty=1.0)
    assert applied(logits, *one_each, prompts=prompts, tokens=tokens).tolist() == [
        [1.0, -1.5, 0.5, 1.5, 0.0, -2.0],
        [1.0, -1.0, 0.5, 2.0, 1.0, -2.0],
        [1.0, -1.0, 0.5, 2.0, 0.0, -2.0],
    ]


def test_logit_bias_is_added_to_its_row():
    logits = random_logits()
    biases: list[dict] = [{5: 2.5, 0: -1.0}, {}, {"5": -3, 63: 0.125}, {}]
    expected = logits.clone()
    for row, bias in zip(expected, biases, strict=True):
        for token, value in bias.items():
            row[int(token)] += value
    assert torch.equal(applied(logits, *(Settings(logit_bias=bias) for bias in biases)), expected)


def test_order_is_bias_repetition_presence_and_frequency_processors():
    """Logit 1, bias -3: -2; repetition 2 makes it -4, not 0.5 - 3; frequency 3 x 1 and presence 1: -8; halved: -4."""
    settings = Settings(logit_bias={1: -3.0}, repetition_penalty=2.0, frequency_penalty=1.0, presence_penalty=1.0)
    logits = torch.tensor([[0.0, 1.0, 3.0]])
    case = {"prompts": [[0]], "tokens": [[1, 1, 1]]}
    assert applied(logits, settings, **case).tolist() == [[0.0, -8.0, 3.0]]
    processors = [lambda tokens, logits: logits / 2, lambda tokens, logits: logits + 1]
    assert applied(logits, settings, **case, processors=processors).tolist() == [[1.0, -3.0, 2.5]]


def test_processors_come_before_temperature_and_filters():
    """A processor sees the model's logits, and what it lifts is kept by top_k."""
    seen = []

    def lift_last(tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        seen.append(logits.clone())
        return torch.cat([logits[:, :-1], logits[:, -1:] + 100], 1)

    logits = random_logits(1)
    settings = Settings(temperature=0.5, top_k=1)
    sampler = Sampler([settings], [[1]], [[]], [np.array([0.5])], "cpu", [lift_last])
    assert sampler(logits).tolist() == [V - 1]
    assert torch.equal(seen[0], logits)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rows_without_a_penalty_keep_their_bits(dtype):
    """And the others have those that they would have alone; the model's logits stay as they are."""
    logits = random_logits(dtype=dtype)
    before = logits.clone()
    penalty = {"repetition_penalty": 1.3, "frequency_penalty": 0.3, "presence_penalty": 0.7, "logit_bias": {8: 0.1}}
    settings = [Settings(**penalty), Settings(), Settings(**penalty), Settings()]
    ours = applied(logits, *settings)
    assert torch.equal(logits, before)
    assert ours.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(ours[1::2], logits[1::2].to(ours.dtype))
    for b in (0, 2):
        alone = applied(logits[b : b + 1], settings[b], prompts=[PROMPTS[b]], tokens=[TOKENS[b]])
        assert torch.equal(alone[0], ours[b])
        assert (ours[b] != logits[b]).sum() >= len({*PROMPTS[b], *TOKENS[b]})


def test_logits_that_no_row_wants_changed_are_not_copied():
    logits = random_logits()
    assert applied(logits, *[Settings(temperature=1.0, top_k=3)] * 4) is logits


def test_appended_tokens_count_like_those_given():
    """Every step equals a `Penalties` made anew; -1 is no token; rows reach more tokens than they began with."""
    settings = [
        Settings(repetition_penalty=1.5),
        Settings(frequency_penalty=0.5, repetition_penalty=0.9),
        Settings(),
        Settings(presence_penalty=1.0, frequency_penalty=-0.2),
    ]
    tokens, logits = [list(new) for new in TOKENS], random_logits()
    penalties = Penalties(settings, PROMPTS, tokens, "cpu")
    generator = torch.Generator().manual_seed(3)
    for step in range(30):
        chosen = torch.randint(-1, 12, (4,), generator=generator)
        chosen[step % 4] = -1 if step % 3 == 0 else chosen[step % 4]
        penalties.append(chosen)
        for new, token in zip(tokens, chosen.tolist(), strict=True):
            new += [token] if token >= 0 else []
        assert torch.equal(penalties.apply(logits), applied(logits, *settings, tokens=tokens)), step
    assert max(max(map(new.count, new)) for new in tokens) > 3


PENALISED = [
    Settings(repetition_penalty=1.5, logit_bias={3: 1.5, 9: -2.0}),
    Settings(frequency_penalty=0.5, repetition_penalty=0.9),
    Settings(logit_bias={63: 4.0}),
    Settings(presence_penalty=1.0, frequency_penalty=-0.2),
]


@pytest.mark.parametrize("processors", [(), (NoRepeatNGramLogitsProcessor(2),)])
def test_history_of_a_row_goes_from_one_set_of_rows_to_the_next(processors):
    """Other rows at every step, most of them with tokens that came since; the bits of a row whose text is all read."""
    generator, logits = torch.Generator().manual_seed(4), random_logits()
    tokens = [list(new) for new in TOKENS]
    histories = [RowHistory(*row) for row in zip(PROMPTS, PENALISED, strict=True)]
    for step in range(40):
        rows = torch.randperm(4, generator=generator)[: 1 + step % 4].tolist()
        given = ([column[b] for b in rows] for column in (PENALISED, PROMPTS, tokens))
        penalties = Penalties(*given, "cpu", processors, [histories[b] for b in rows])
        for _ in range(1 + step % 3):
            chosen = torch.randint(0, 20, (len(rows),), generator=generator)
            penalties.append(chosen)
            for b, token in zip(rows, chosen.tolist(), strict=True):
                tokens[b].append(token)
        ours = penalties.apply(logits[rows])
        for b, row in zip(rows, ours, strict=True):
            case = {"prompts": PROMPTS[b : b + 1], "tokens": tokens[b : b + 1], "processors": processors}
            assert torch.equal(row, applied(logits[b : b + 1], PENALISED[b], **case)[0]), (step, b)
    for b in (0, 1, 3):
        histories[b].take(tokens[b])
        assert histories[b].text.tolist() == PROMPTS[b] + tokens[b]
        counts = dict(zip(histories[b].ids, histories[b].counts, strict=True))
        seen = {*tokens[b], *(PROMPTS[b] if b < 2 else ())}  # only a repetition penalty looks at the prompt
        assert counts == {token: tokens[b].count(token) for token in seen}


def test_rows_outgrow_the_room_for_new_tokens():
    """Far more different tokens than there is room for at first, beside a row that has nothing to penalise."""
    V = 5 * ROOM
    settings = [Settings(presence_penalty=1.0), Settings(), Settings(repetition_penalty=2.0, frequency_penalty=0.25)]
    penalties = Penalties(settings, [[0]] * 3, [[]] * 3, "cpu")
    order = torch.randperm(V, generator=torch.Generator().manual_seed(0))
    for token in order:
        penalties.append(torch.stack([token, token, (token * 7) % V]))
    assert penalties.apply(torch.full((3, V), 1.5)).tolist() == [[0.5] * V, [1.5] * V, [0.5] * V]


def test_other_penalties_that_read_on_in_a_history_change_nothing():
    settings, history = Settings(frequency_penalty=1.0), RowHistory([5], Settings(frequency_penalty=1.0))
    first = Penalties([settings], [[5]], [[1]], "cpu", (), [history])
    Penalties([settings], [[5]], [[1, 3, 2, 2]], "cpu", (), [history])
    for token in (2, 1, 2):
        first.append(torch.tensor([token]))
    assert first.apply(torch.zeros(1, 4)).tolist() == [[0.0, -2.0, -2.0, 0.0]]


def test_penalties_change_what_is_chosen_step_after_step():
    """Greedy rows over the same logits: without a penalty the best for ever, else each in turn; ids worked by hand."""
    logits = torch.tensor([[4.0, 3.0, 2.5, -1.0]]).repeat(4, 1)
    settings = [Settings(), Settings(presence_penalty=10.0), Settings(frequency_penalty=1.2)]
    settings += [Settings(repetition_penalty=2.0)]
    sampler = Sampler(settings, [[0]] * 4, [[]] * 4, [None] * 4, "cpu")
    steps = torch.stack([sampler(logits) for _ in range(5)]).T.tolist()
    # frequency: 4, 2.8 < 3, then 2.8 > 2.5, then 2.5, then 1.8, 1.6 < 1.8, 1.3
    assert steps == [[0] * 5, [0, 1, 2, 3, 0], [0, 1, 0, 2, 1], [1, 2, 0, 0, 0]]


@pytest.mark.parametrize("amount", [1e300, -1e300])
def test_amounts_beyond_float32_are_no_nan(amount):
    """Tokens that are not in the text keep their logits; those that are lose, or win, by far."""
    logits = random_logits()
    for name in ("presence_penalty", "frequency_penalty"):
        ours = applied(logits, *[Settings(**{name: amount})] * 4)
        for b, new in enumerate(TOKENS):
            others = [token for token in range(V) if token not in new]
            assert torch.equal(ours[b, others], logits[b, others])
    biased = Sampler([Settings(logit_bias={7: amount})] * 4, PROMPTS, TOKENS, [None] * 4, "cpu")
    without = logits.index_fill(1, torch.tensor([7]), -math.inf).argmax(-1).tolist()
    assert biased(logits).tolist() == ([7] * 4 if amount > 0 else without)


def test_broken_logits_stay_broken_and_in_their_row():
    logits = random_logits()
    logits[0, 3], logits[2, 10], logits[2, 11] = math.nan, math.inf, -math.inf
    settings = [Settings(repetition_penalty=1.2, presence_penalty=0.5)] * 4
    tokens = Sampler(settings, PROMPTS, TOKENS, [None] * 4, "cpu")(logits).tolist()
    alone = Sampler(settings[:1], PROMPTS[3:], TOKENS[3:], [None], "cpu")(logits[3:]).tolist()
    assert tokens[0] == tokens[2] == -1 and tokens[3:] == alone and tokens[1] >= 0
    ours = applied(logits, *settings)
    assert ours[2, 11] == -math.inf and ours[1:2].isfinite().all() and ours[3].isfinite().all()


def test_processors_of_transformers_work_unmodified_on_a_ragged_batch():
    """Five steps of four rows, greedy and sampled, each against Hugging Face's processors on that row alone."""
    theirs = LogitsProcessorList([NoRepeatNGramLogitsProcessor(2), RepetitionPenaltyLogitsProcessor(1.4)])
    theirs.append(SuppressTokensLogitsProcessor([0, 11]))
    settings = [Settings(), Settings(temperature=0.7, top_k=9), Settings(), Settings(temperature=1.6, top_k=20)]
    noise = [row_stream(1, prompt, 0, 0).random(20) for prompt in PROMPTS]
    logits = random_logits()
    sampler = Sampler(settings, PROMPTS, TOKENS, [None, noise[1], None, noise[3]], "cpu", theirs)
    steps = torch.stack([sampler(logits) for _ in range(5)]).T
    for b, (setting, prompt, tokens) in enumerate(zip(settings, PROMPTS, TOKENS, strict=True)):
        new = list(tokens)
        for _ in range(5):
            scores = theirs(torch.tensor([prompt + new]), logits[b : b + 1].clone())
            if setting.temperature == 0:
                new.append(scores.argmax().item())
                continue
            scores = TopKLogitsWarper(setting.top_k)(None, TemperatureLogitsWarper(setting.temperature)(None, scores))
            sums = torch.softmax(scores[0].double(), -1).cumsum(-1)
            new.append((sums > noise[b][len(new)]).nonzero()[0].item())
        assert steps[b].tolist() == new[len(tokens) :], b


def test_processor_sees_prompt_and_new_tokens_of_its_row():
    seen = []

    def watch(tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        assert tokens.dtype == torch.int64 and logits.shape == (1, V)
        seen.append(tokens[0].tolist())
        return logits

    logits = random_logits()
    logits[1, 0] = math.nan
    sampler = Sampler([Settings()] * 4, PROMPTS, TOKENS, [None] * 4, "cpu", [watch])
    first = sampler(logits).tolist()
    sampler(logits)
    texts = [prompt + new for prompt, new in zip(PROMPTS, TOKENS, strict=True)]
    assert seen[:4] == texts and first[1] == -1
    assert seen[4:] == [text + [token] * (token >= 0) for text, token in zip(texts, first, strict=True)]


@pytest.mark.parametrize("fill", [-math.inf, math.nan])
def test_processor_that_masks_everything_ends_its_row_and_no_other(fill):
    """It writes into the logits that it gets, which are not the model's."""

    def silence(tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return logits.fill_(fill) if 63 in tokens else logits

    noise = [row_stream(1, prompt, 0, 0).random(8) for prompt in PROMPTS]
    for settings in ([Settings()] * 4, [Settings(temperature=1.0)] * 4, [Settings(temperature=1.0, top_p=0.9)] * 4):
        logits = random_logits()
        before = logits.clone()
        tokens = Sampler(settings, PROMPTS, TOKENS, noise, "cpu", [silence])(logits).tolist()
        assert torch.equal(logits, before)
        assert tokens == [*Sampler(settings, PROMPTS, TOKENS, noise, "cpu")(logits).tolist()[:3], -1]


@pytest.mark.parametrize(
    ("processor", "found"),
    [
        (lambda tokens, logits: logits[0], "logits (64,)"),
        (lambda tokens, logits: logits[:, 1:], "logits (1, 63)"),
        (lambda tokens, logits: logits.expand(2, -1), "logits (2, 64)"),
        (lambda tokens, logits: None, "NoneType"),
        (lambda tokens, logits: 1.0, "float"),
    ],
)
def test_processor_that_returns_no_logits_is_refused(processor, found):
    with pytest.raises(UserError) as error:
        applied(random_logits(), *[Settings()] * 4, processors=[processor])
    assert str(error.value) == f"a logits processor returned {found}, but must return logits (1, 64)"
