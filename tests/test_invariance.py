"""The proof that rows have the same bits in every batch: it holds where it should, and notices where it does not."""

import pytest
import torch
from conftest import llama_config, needs_onednn_bfloat16, randomized
from torch import Tensor, nn

from lit_gen import linear, pack
from lit_gen.invariance import prove_invariance
from lit_gen.kernels import load_kernels
from lit_gen.linear import PackedLinear
from lit_gen.pack import pack_model
from lit_gen.utils import UserError

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
needs_kernels = pytest.mark.skipif(load_kernels() is None, reason="no C++ compiler")


class Neighbourly(nn.Linear):
    """Rows look at how many there are, by the last bit of one output, from `many` rows on."""

    many = 7

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if len(x) >= self.many:
            y[0, 3] = torch.nextafter(y[0, 3], torch.tensor(1e9, dtype=y.dtype))
        return y


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_models_prove_themselves(dtype: torch.dtype) -> None:
    prove_invariance(pack_model(randomized(llama_config()).to(dtype)), True)


def test_one_bit_in_one_layer_is_refused_by_name(capsys: pytest.CaptureFixture) -> None:
    model = pack_model(randomized(llama_config()))
    bad = Neighbourly(64, 77, bias=False).requires_grad_(False)
    model.h[1].mlp.proj = bad
    with pytest.raises(UserError, match=r"h\.1\.mlp\.proj \(64 to 77\).*--batch_invariant auto") as error:
        prove_invariance(model, True)
    assert "\n" not in str(error.value)
    prove_invariance(model, "auto")
    assert "h.1.mlp.proj" in capsys.readouterr().err
    prove_invariance(model, False)
    assert capsys.readouterr().err == ""


@needs_kernels
def test_a_packed_layer_that_holds_for_few_rows_gets_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the vocabulary head of oneDNN: 64 rows give other bits, 32 do not; the pieces then give what 32 give."""
    model = pack_model(randomized(llama_config()))
    packed = [PackedLinear(nn.Linear(64, 40).requires_grad_(False)) for _ in range(2)]
    plain = linear.product

    def moody(x: Tensor, *rest: object) -> Tensor:
        return plain(x, *rest) * (1.0 if x.size(0) <= 100 else 1.0000001)

    model.h[0].mlp.proj, model.h[1].mlp.proj = packed
    expected = packed[0](torch.arange(6400.0).view(100, 64).sin())
    monkeypatch.setattr("lit_gen.linear.product", moody)
    prove_invariance(model, True)
    assert {layer.rows_at_once for layer in packed} == {32}
    x = torch.arange(12800.0).view(200, 64).sin()
    assert packed[1](x).shape == (200, 40) and torch.equal(packed[0](x)[:100], expected)


@needs_kernels
@needs_onednn_bfloat16
def test_experts_are_proved_as_well_where_the_cpu_multiplies_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacked weights are no linear layers; they become some, so that the proof sees them."""
    for module in (linear, pack):
        monkeypatch.setattr(module, "multiplies", lambda dtype: True)
    moe = {"n_expert": 4, "n_expert_per_token": 2, "moe_intermediate_size": 48, "moe_layers": [True, False]}
    model = pack_model(randomized(llama_config(**moe)).bfloat16())
    assert {type(expert) for expert in [*model.h[0].mlp.fc, *model.h[0].mlp.proj]} == {PackedLinear}
    model.h[0].mlp.proj[3] = Neighbourly(48, 61, bias=False).requires_grad_(False).bfloat16()
    with pytest.raises(UserError, match=r"h\.0\.mlp\.proj\.3 \(48 to 61\)"):
        prove_invariance(model, True)
