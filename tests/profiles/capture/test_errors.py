"""Models that cannot be traced raise one line, with the module and the sample."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from profiles.capture.capture import capture
from profiles.errors import AdvisorError, BatchError, ModelError
from tests.engines.cases import TinyGPT


class Opaque(nn.Module):
    """Returns its output in an object that nothing can look into."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> object:
        return iter([self.linear(x)])


def message(error: pytest.ExceptionInfo[AdvisorError]) -> str:
    text = str(error.value)
    assert "Traceback" not in text
    assert "File " not in text
    return text


def test_a_sample_that_does_not_fit_names_the_module_and_the_shapes() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Sequential(nn.ReLU(), nn.Linear(8, 4)))
    with pytest.raises(ModelError) as error:
        capture(model, torch.randn(2, 8))
    text = message(error)
    assert text.startswith("`Sequential` does not run on the sample: ")
    assert "in `1.1`, a Linear" in text
    assert "sample: input: float32 (2, 8)" in text


def test_a_failure_is_not_logged_as_well(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ModelError):
        capture(nn.Linear(8, 4), torch.randn(2, 5))
    assert capfd.readouterr() == ("", "")


def test_wrong_arguments_are_the_samples_fault() -> None:
    with pytest.raises(ModelError, match=r"takes 2 positional arguments but 3 were given"):
        capture(TinyGPT(), (torch.zeros(2, 4, dtype=torch.long),) * 2)


def test_lazy_parameters_are_named() -> None:
    with pytest.raises(ModelError, match=r"`0.weight` is lazy and not initialised"):
        capture(nn.Sequential(nn.LazyLinear(4)), torch.randn(2, 4))


def test_an_object_that_is_no_module_is_named() -> None:
    with pytest.raises(ModelError, match=r"this is a function"):
        capture(F.relu, torch.randn(2, 4))  # type: ignore[arg-type]


def test_a_loss_that_does_not_fit_is_not_blamed_on_the_model() -> None:
    model, batch = nn.Linear(4, 3), (torch.randn(2, 4), torch.randn(2, 7))
    with pytest.raises(ModelError, match=r"the loss does not take what the model returns: "):
        capture(model, batch, loss_fn=lambda output, target: output @ target)
    with pytest.raises(ModelError, match=r"the loss is \(2, 3\), it must be one number"):
        capture(model, batch, loss_fn=lambda output, target: output)


def test_an_output_without_tensors_is_refused() -> None:
    with pytest.raises(ModelError, match=r"no gradient can flow back .* \(a list_iterator\)"):
        capture(Opaque(), torch.randn(2, 4))


def test_a_missing_target_is_named() -> None:
    with pytest.raises(BatchError, match=r"loss_fn needs a target, the batch has none"):
        capture(nn.Linear(4, 4), torch.randn(2, 4), loss_fn=F.mse_loss)


def test_layer_dropout_can_be_captured() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                if torch.rand([]) >= 0.1:
                    x = layer(x)
            return x

    assert capture(Dropping(), torch.randn(2, 4)).unused == ()
