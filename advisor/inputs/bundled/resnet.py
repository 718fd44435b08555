"""ResNets in plain PyTorch, as torchvision builds them: the stride is in the 3x3 convolution.

He et al., arXiv:1512.03385, table 1. Shapes in comments: B images, C channels, H height, W width.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from profiles.closed_forms.convnets.resnet import DEPTHS

CLASSES = 1000
_BASIC = (18, 34)


def _normed(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    """Convolution with padding that preserves H and W up to its stride, and its batch norm."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False),
        nn.BatchNorm2d(outputs),
    )


class ResidualBlock(nn.Module):
    """ResidualBlock block; the first 3x3 convolution has the stride."""

    def __init__(self, inputs: int, inner: int, outputs: int, *, stride: int) -> None:
        super().__init__()
        if inner == outputs:  # two of 3x3
            self.branch = nn.Sequential(
                _normed(inputs, inner, 3, stride), nn.ReLU(), _normed(inner, outputs, 3)
            )
        else:
            self.branch = nn.Sequential(
                _normed(inputs, inner, 1),
                nn.ReLU(),
                _normed(inner, inner, 3, stride),
                nn.ReLU(),
                _normed(inner, outputs, 1),
            )
        is_same = stride == 1 and inputs == outputs
        self.around = nn.Identity() if is_same else _normed(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.branch(x) + self.around(x))


class ResNet(nn.Module):
    """Images (B, 3, H, W) to logits (B, 1000), in `depth` layers: 18, 34, 50, 101 or 152."""

    def __init__(self, depth: int = 50) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        expansion = 1 if depth in _BASIC else 4
        channels = 64
        for stage, blocks in enumerate(DEPTHS[depth]):
            inner = 64 * 2**stage
            layer = nn.Sequential()
            for index in range(blocks):
                stride = 2 if stage and not index else 1
                layer.append(ResidualBlock(channels, inner, inner * expansion, stride=stride))
                channels = inner * expansion
            self.add_module(f"layer{stage + 1}", layer)
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES)
        )

    def forward(self, x: Tensor) -> Tensor:
        for part in self.children():
            x = part(x)
        return x
