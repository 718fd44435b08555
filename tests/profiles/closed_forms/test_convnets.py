"""Networks of convolutions against published counts and against torch."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from advisor.inputs.bundled.resnet import ResNet
from profiles.capture.capture import capture
from profiles.closed_forms.convnets.draft import ConvnetBuilder
from profiles.closed_forms.convnets.layers import Convnet, ConvnetOp
from profiles.closed_forms.convnets.profile import profile_of
from profiles.closed_forms.convnets.registry import is_known, network_of
from profiles.errors import InputError
from profiles.model.profile import LOSS, Numerics
from profiles.model.work import FusibleKind
from profiles.workload.stack import Stack
from profiles.workload.under_stack import under_stack

# Parameters and multiply-adds (1e9, at the size each was made for) as torchvision's table of
# weights prints them; Inception-3 without its auxiliary classifier of 3,326,696.
TORCHVISION = {
    "resnet18": (11_689_512, 1.81),
    "resnet34": (21_797_672, 3.66),
    "resnet50": (25_557_032, 4.09),
    "resnet101": (44_549_160, 7.80),
    "resnet152": (60_192_808, 11.51),
    "resnext50_32x4d": (25_028_904, 4.23),
    "resnext101_32x8d": (88_791_336, 16.41),
    "wide_resnet50_2": (68_883_240, 11.40),
    "vgg11": (132_863_336, 7.61),
    "vgg16": (138_357_544, 15.47),
    "vgg19": (143_667_240, 19.63),
    "alexnet": (61_100_840, 0.71),
    "densenet121": (7_978_856, 2.83),
    "densenet161": (28_681_000, 7.73),
    "googlenet": (6_624_904, 1.50),
    "vit_b_16": (86_567_656, 17.56),
    "vit_b_32": (88_224_232, 4.41),
    "vit_l_16": (304_326_632, 61.55),
    "inception_v3": (27_161_264 - 3_326_696, 5.71),
}
# Parameters in millions: GPipe (arXiv 1811.06965, table 1) and torchgpipe (arXiv 2004.09910).
GPIPE = {
    "amoebanet-d-18-208": 82,
    "amoebanet-d-18-416": 318,
    "amoebanet-d-18-544": 542,
    "amoebanet-d-36-544": 1050,
    "amoebanet-d-72-512": 1840,
    "unet-6-72": 362.2,
    "unet-11-128": 2210,
    "unet-24-160": 7800,
}


def total(network: Convnet, amount: str) -> int:
    return sum(getattr(block, amount) for block in network.blocks)


@pytest.mark.parametrize("name", TORCHVISION)
def test_parameters_and_multiply_adds_are_those_of_torchvision(name: str) -> None:
    network, assumed = network_of(name)
    parameters, billions = TORCHVISION[name]
    assert network.parameters == parameters
    assert total(network, "forward_flop") / 2e9 == pytest.approx(billions, abs=0.005)
    assert not assumed


def test_tensors_are_those_of_the_module() -> None:
    shapes = Counter[tuple[int, ...]]()
    for unit in profile_of(network_of("resnet50")[0], samples=1).units:
        shapes.update({shape.sizes: shape.count for shape in unit.shapes})
    with torch.device("meta"):
        parameters = list(ResNet(50).parameters())
    assert shapes == Counter(
        tuple(p.flatten(1).shape if p.dim() > 1 else p.shape) for p in parameters
    )


@pytest.mark.parametrize("name", [*TORCHVISION, *GPIPE])
def test_tensors_are_all_of_the_parameters(name: str) -> None:
    for unit in profile_of(network_of(name)[0], samples=1).units:
        assert sum(shape.elements * shape.count for shape in unit.shapes) == unit.parameters


@pytest.mark.parametrize("name", GPIPE)
def test_parameters_of_the_pipelines_networks_are_those_of_their_papers(name: str) -> None:
    assert network_of(name)[0].parameters / 1e6 == pytest.approx(GPIPE[name], rel=0.01)


class Bottleneck(nn.Module):
    """As torchvision's: the stride is in the middle, ReLU works in place."""

    def __init__(self, inputs: int, planes: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * planes
        self.way = nn.Sequential(
            *normed(inputs, planes, 1, 1),
            nn.ReLU(inplace=True),
            *normed(planes, planes, 3, stride),
            nn.ReLU(inplace=True),
            *normed(planes, outputs, 1, 1),
        )
        around = stride != 1 or inputs != outputs
        self.around = nn.Sequential(*normed(inputs, outputs, 1, stride)) if around else None
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        around = x if self.around is None else self.around(x)
        way = self.way(x)
        way += around
        return self.relu(way)


def normed(inputs: int, outputs: int, kernel: int, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return [convolution, nn.BatchNorm2d(outputs)]


def resnet50() -> nn.Sequential:
    layers: list[nn.Module] = [
        *normed(3, 64, 7, 2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    inputs = 64
    for stage, count in enumerate((3, 4, 6, 3)):
        planes = 64 * 2**stage
        for index in range(count):
            layers.append(Bottleneck(inputs, planes, 2 if stage and not index else 1))
            inputs = 4 * planes
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


def test_flop_and_saved_elements_of_resnet50_are_what_torch_counts() -> None:
    with torch.device("meta"):
        model, images = resnet50(), torch.empty(2, 3, 128, 128)
    maps: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        is_map = tensor.is_floating_point() and tensor.dim() > 1
        if is_map and not isinstance(tensor, nn.Parameter) and tensor.shape[0] == 2:
            maps[tensor.untyped_storage()._cdata] = tensor
        return tensor

    counter = FlopCounterMode(display=False)
    with counter, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(images).sum()
        forward = counter.get_total_flops()
        loss.backward()
    network, _ = network_of("resnet50-128px")
    assert total(network, "forward_flop") * 2 == forward
    assert total(network, "backward_flop") * 2 == counter.get_total_flops() - forward
    elements = sum(tensor.numel() for tensor in maps.values()) - images.numel()
    assert total(network, "saved") * 2 == elements
    assert network.parameters == sum(p.numel() for p in model.parameters())


def test_a_network_is_a_profile_of_its_blocks() -> None:
    network, _ = network_of("resnet50-128px")
    profile = profile_of(network, samples=8)
    assert profile.parameters == 25_557_032
    assert profile.flop(8) == 8 * (total(network, "forward_flop") + total(network, "backward_flop"))
    # Before the third stage 512 channels of 16 x 16 cross.
    position = profile.flow.first_call("layer3.0")
    assert position is not None
    (crossing,) = profile.flow.crossing(position)
    assert crossing.bytes.at(8) == 8 * 4 * 512 * 16 * 16
    # Running mean and variance of 26,560 channels, and a count for each of 53 norms.
    assert profile.buffer_bytes == 2 * 26_560 * 4 + 53 * 8


@pytest.mark.parametrize("depth", [18, 50])
def test_costs_are_those_that_capture_counts_on_the_module(depth: int) -> None:
    """Every kind of numerics: FLOP and kept bytes of torch's own operators on fake tensors."""
    samples, side = 4, 64
    batch = torch.randn(samples, 3, side, side), torch.randint(1000, (samples,))
    captured = capture(
        ResNet(depth), batch, loss_fn=nn.functional.cross_entropy, numerics=list(Numerics)
    )
    network, _ = network_of(f"resnet{depth}-{side}px")
    ours = profile_of(network, samples=samples)
    own = [unit for unit in captured.units if unit.name != LOSS]
    for kind in Numerics:
        assert ours.flop(samples, kind) == captured.flop(samples, kind)
        actual, wanted = (
            sum(unit.cost(kind).activation_bytes.per_sample for unit in units)
            for units in (ours.units, own)
        )
        assert actual == pytest.approx(wanted, rel=1e-3)


def test_recompute_and_fusion_save_what_they_name() -> None:
    """One block: convolution, norm, ReLU, addition on 8 channels of 4 x 4, in fp32."""
    draft = ConvnetBuilder(4, channels=8)
    with draft.block("first", draft.image):
        x = draft.relu(draft.norm(draft.convolution(draft.image, 8, 3)))
    with draft.block("second", x):
        hidden = draft.norm(draft.convolution(x, 8, 3))
        draft.relu(draft.add(hidden, x))
    profile = profile_of(draft.network("two"), samples=1)
    elements, e = 8 * 4 * 4, 4
    second = profile.units[1].cost(Numerics.AS_BUILT)
    assert second.input_bytes.at(1) == e * elements
    # Kept: what the norm and the last ReLU need; the convolution's input was kept before.
    assert second.activation_bytes.per_sample == 2 * e * elements
    fused = under_stack(profile, Stack(name="f", fused=(FusibleKind.GATE, FusibleKind.RESIDUAL)))
    less = fused.units[1].cost(Numerics.AS_BUILT)
    # ReLU: one read and one write; addition: two reads and a write, of which one read is left.
    saved = second.forward_moved_bytes.at(1) - less.forward_moved_bytes.at(1)
    assert saved == pytest.approx(e * elements * (2 + 2))
    assert second.forward_kernels - less.forward_kernels == 2


def test_an_image_side_in_the_name_takes_precedence() -> None:
    assert network_of("resnet50-128px", pixels=224)[0].pixels == 128
    assert network_of("inception3")[0].pixels == 299
    assert network_of("vgg16", pixels=64)[0].pixels == 64


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("resnet50-0px", "`px` wants a positive whole number, not `0`"),
        ("resnet50-99999px", "`px` = 99999: 16,384 is the most"),
        ("vgg16-99999999999999999999px", "16,384 is the most"),
        ("vgg16-7px", "images of 7 x 7 shrink to nothing"),
    ],
)
def test_a_side_that_no_image_has_is_refused(name: str, said: str) -> None:
    """Four of its digits, or the side that the network was made for, would be a plan for others."""
    with pytest.raises(InputError, match=said):
        network_of(name)
    assert network_of("resnet50-7px")[0].pixels == 7


def test_a_network_that_is_not_known_is_a_resnet_of_its_size_and_the_note_says_so() -> None:
    network, assumed = network_of("convnext-base", kind="cnn", parameters=88.6e6)
    known, _ = network_of("resnet50")
    assert network.parameters == pytest.approx(88.6e6, rel=0.001)
    assert total(network, "forward_flop") / network.parameters == pytest.approx(
        total(known, "forward_flop") / known.parameters, rel=0.01
    )
    assert assumed == "layers as those of resnet50, scaled to 88.6 M parameters"
    sizes = [
        shape.elements for unit in profile_of(network, samples=1).units for shape in unit.shapes
    ]
    assert min(sizes) > 0


def test_a_unet_of_more_parameters_is_deeper_and_wider() -> None:
    """The published one of 4.99e9 parameters has 24 convolutions a level and 128 channels."""
    grown, assumed = network_of("unet-pipeline-2", kind="unet", parameters=4.99e9)
    published, _ = network_of("unet-24-128")
    assert grown.parameters == pytest.approx(4.99e9, rel=0.15)
    assert total(grown, "saved") == pytest.approx(total(published, "saved"), rel=0.25)
    assert "scaled" in assumed


def test_grouped_convolutions_multiply_only_inside_their_groups() -> None:
    network, _ = network_of("resnext50_32x4d")
    grouped = [layer for block in network.blocks for layer in block.layers if layer.groups == 32]
    assert [layer.columns for layer in grouped[:3]] == [4, 4, 4]
    assert all(layer.parameters == layer.depth * layer.columns * 32 for layer in grouped)


def blocks_of(network: Convnet) -> list[str]:
    return [block.name for block in network.blocks]


def test_blocks_pass_on_what_later_ones_take() -> None:
    """Between U-Net's arms the skipped maps travel with the last one."""
    network, _ = network_of("unet-5-64")
    at = blocks_of(network).index("bottleneck.0")
    side, channels = 192, 64
    skips = sum(channels * 2**level * (side // 2**level) ** 2 for level in range(5))
    last = channels * 16 * (side // 32) ** 2
    assert network.blocks[at - 1].output_elements == skips + last
    assert (
        sum(layer.kind is ConvnetOp.NORM for block in network.blocks for layer in block.layers)
        == 11 * 5
    )


@pytest.mark.parametrize("name", ["densenet", "densenet-7", "shufflenet-121", "vgg", "foo-16"])
def test_a_family_or_a_depth_alone_is_no_network(name: str) -> None:
    assert not is_known(name)
