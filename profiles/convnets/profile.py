"""A network as a `ModelProfile`: what `capture` finds of it, from its layers alone."""

from __future__ import annotations

from collections import Counter
from itertools import chain

from profiles.affine import Affine
from profiles.convnets.layers import Block, Kind, Network
from profiles.flow import Call, Edge, Flow, Value
from profiles.model import ModelProfile, Numerics, Shape, UnitCost, UnitProfile

ELEMENT_BYTES = 4


def profile_of(network: Network, *, samples: int) -> ModelProfile:
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
            if layer.kind is Kind.NORM
        ),
        flow=Flow(
            calls=tuple(
                Call(unit=block.name, values=(_value(block, samples),)) for block in blocks
            ),
            edges=tuple(Edge(source=n, value=0, target=n + 1) for n in range(len(blocks) - 1)),
        ),
    )


def _unit(block: Block) -> UnitProfile:
    parameters = block.parameters
    # Means and variances of norms, and how often they were updated.
    norms = [layer for layer in block.layers if layer.kind is Kind.NORM]
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
            Shape(sizes=sizes, element_bytes=ELEMENT_BYTES, count=count)
            for sizes, count in Counter(chain.from_iterable(tensors)).items()
        ),
        costs={Numerics.AS_BUILT: _cost(block)},
    )


def _cost(block: Block) -> UnitCost:
    layers = block.layers
    maps = sum(layer.inputs + layer.outputs for layer in layers)
    products = [layer for layer in layers if layer.kind.is_product]
    # A product's backward reads the gradient twice, its input and its weights, and writes both
    # gradients; any other layer's reads gradient and what it kept, and writes a gradient.
    again = sum(2 * layer.outputs + 2 * layer.inputs for layer in products)
    again += sum(layer.outputs + 2 * layer.inputs for layer in layers if layer not in products)
    widest = max(layer.inputs + layer.outputs for layer in layers)
    weights = float(ELEMENT_BYTES * block.parameters)
    return UnitCost(
        forward_flop=Affine(per_sample=block.forward_flop),
        backward_flop=Affine(per_sample=block.backward_flop),
        forward_moved_bytes=Affine(fixed=weights, per_sample=ELEMENT_BYTES * maps),
        backward_moved_bytes=Affine(fixed=2 * weights, per_sample=ELEMENT_BYTES * again),
        forward_kernels=len(layers),
        # Gradients of a product's weights and of its input are kernels of their own.
        backward_kernels=len(layers) + len(products),
        activation_bytes=Affine(per_sample=ELEMENT_BYTES * block.kept),
        selective_activation_bytes=Affine(per_sample=ELEMENT_BYTES * block.kept),
        input_bytes=Affine(per_sample=ELEMENT_BYTES * block.input_elements),
        output_bytes=Affine(per_sample=ELEMENT_BYTES * _handed_on(block)),
        forward_transient_bytes=Affine(per_sample=ELEMENT_BYTES * widest),
        backward_transient_bytes=Affine(per_sample=ELEMENT_BYTES * widest),
    )


def _handed_on(block: Block) -> int:
    """Elements; the last block hands on what it ends with."""
    return block.output_elements or block.layers[-1].outputs


def _value(block: Block, samples: int) -> Value:
    elements = _handed_on(block)
    return Value(
        shape=(samples, elements),
        dtype="float32",
        bytes=Affine(per_sample=float(ELEMENT_BYTES * elements)),
    )
