"""A network as a `ModelProfile`: what `capture` finds of it, from its layers alone."""

from __future__ import annotations

from collections import Counter
from itertools import chain

from profiles.closed_forms.convnets.costs import block_cost
from profiles.closed_forms.convnets.layers import Convnet, ConvnetBlock, ConvnetOp
from profiles.model.affine import Affine
from profiles.model.flow import Edge, Flow, UnitCall, Value
from profiles.model.profile import ModelProfile, Numerics, ParameterShape, UnitProfile

ELEMENT_BYTES = 4


def profile_of(network: Convnet, *, samples: int) -> ModelProfile:
    """The profile of a network built in fp32, its blocks as units; the loss is left out.

    Each block takes what the one before it hands on, skipped maps included.

    Args:
        samples: of the batch that the flow's shapes are told for.
    """
    blocks = network.blocks
    pixels = 3 * network.pixels**2
    return ModelProfile(
        name=network.name,
        units=tuple(_unit(block) for block in blocks),
        dtype="float32",
        samples=samples,
        batch_bytes=Affine(per_sample=float(ELEMENT_BYTES * pixels)),
        batch_norms=tuple(
            f"{block.name}.norm{index}"
            for block in blocks
            for index, layer in enumerate(block.layers)
            if layer.kind is ConvnetOp.NORM
        ),
        flow=Flow(
            calls=tuple(
                UnitCall(unit=block.name, values=(_value(block, samples),)) for block in blocks
            ),
            edges=tuple(Edge(source=n, value=0, target=n + 1) for n in range(len(blocks) - 1)),
        ),
    )


def _unit(block: ConvnetBlock) -> UnitProfile:
    parameters = block.parameters
    # Means and variances of norms, and how often they were updated.
    norms = [layer for layer in block.layers if layer.kind is ConvnetOp.NORM]
    tensors = (layer.tensors for layer in block.layers)
    buffers = sum(layer.parameters * ELEMENT_BYTES + 8 for layer in norms)
    return UnitProfile(
        name=block.name,
        kind="Block",
        is_block=True,
        parameters=parameters,
        trainable_parameters=parameters,
        parameter_bytes=parameters * ELEMENT_BYTES,
        gradient_bytes=parameters * ELEMENT_BYTES,
        buffer_bytes=buffers,
        dtypes=("float32",) if parameters else (),
        shapes=tuple(
            ParameterShape(sizes=sizes, element_bytes=ELEMENT_BYTES, count=count)
            for sizes, count in Counter(chain.from_iterable(tensors)).items()
        ),
        costs={kind: block_cost(block, kind) for kind in Numerics},
    )


def _handed_on(block: ConvnetBlock) -> int:
    """Elements; the last block hands on what it ends with."""
    return block.output_elements or block.layers[-1].outputs


def _value(block: ConvnetBlock, samples: int) -> Value:
    elements = _handed_on(block)
    return Value(
        shape=(samples, elements),
        dtype="float32",
        bytes=Affine(per_sample=float(ELEMENT_BYTES * elements)),
    )
