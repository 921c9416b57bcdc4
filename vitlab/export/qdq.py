"""Dense layers of an ONNX graph as int8, with ranges that are known already.

For any runtime a layer is QuantizeLinear and DequantizeLinear around a Gemm, which runtimes fuse into one integer
product with its bias. For ONNX Runtime alone it is that product itself, which is a little faster; queries, keys and
values are one product each there, so that nothing has to be split.

Shapes: I inputs, O outputs of a layer.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from vitlab.export.quantize import TINY, Scale
from vitlab.inference.graph_check import OWN, PRODUCT

Layer = tuple[Any, Any]  # the nodes of its product and of the sum with its bias


def quantize_layers(proto: Any, scales: Mapping[str, Scale], *, fused: bool = False) -> Any:
    """A copy of the graph in which the named layers are int8: inputs as bytes, weights with a scale per output."""
    import onnx

    stored = {tensor.name: tensor for tensor in proto.graph.initializer}
    splits = find_splits(proto.graph) if fused else {}
    new: dict[str, list[Any]] = {}  # nodes by the first output of the node in whose place they are
    constants: list[Any] = []
    for name, (product, add) in find_products(proto.graph, scales).items():
        weight, bias = (onnx.numpy_helper.to_array(stored[key]) for key in (product.input[1], f"{name}.bias"))
        split, source, target = splits.get(add.output[0]), product.input[0], add.output[0]
        layer = name, scales[name], weight, bias, source
        nodes, values = (
            write_products(*layer, [*split.output] if split else [target]) if fused else write_pairs(*layer, target)
        )
        new |= {product.output[0]: [], target: nodes}
        new |= {split.output[0]: []} if split else {}
        constants += [onnx.numpy_helper.from_array(value, key) for key, value in values.items()]
    nodes = [made for node in proto.graph.node for made in new.get(node.output[0], [node])]
    return with_nodes(proto, nodes, constants)


def with_nodes(proto: Any, nodes: list[Any], constants: list[Any]) -> Any:
    """A graph with other nodes, further constants, and those of its own that these use."""
    import onnx
    from onnx.helper import make_graph, make_model, make_opsetid

    used = {name for node in nodes for name in node.input}
    made = {name for node in nodes for name in node.output}
    kept = [tensor for tensor in proto.graph.initializer if tensor.name in used]
    info = [value for value in proto.graph.value_info if value.name in made]
    named = proto.graph.name, list(proto.graph.input), list(proto.graph.output)
    own = [make_opsetid(OWN, 1)] if any(node.domain == OWN for node in nodes) else []
    opsets = {opset.domain: opset for opset in (*proto.opset_import, *own)}
    graph = make_graph(nodes, *named, [*kept, *constants], value_info=info)
    new = make_model(graph, opset_imports=list(opsets.values()), ir_version=proto.ir_version)
    new.producer_name, new.producer_version = proto.producer_name, proto.producer_version
    new.metadata_props.extend(proto.metadata_props)
    onnx.checker.check_model(new)
    return new


Arrays = dict[str, np.ndarray[Any, Any]]


def write_pairs(
    name: str, scale: Scale, weight: np.ndarray[Any, Any], bias: np.ndarray[Any, Any], source: str, target: str
) -> tuple[list[Any], Arrays]:
    """Nodes and constants of a layer from the values `source` to `target`: weights (I, O), bias (O,)."""
    from onnx.helper import make_node

    def own(word: str) -> str:
        return f"{name}.{word}"

    stored, steps = to_int8(weight)
    bias_steps = np.float32(scale.step) * steps
    values: Arrays = {
        own("step"): np.array(scale.step, np.float32),
        own("zero"): np.array(scale.zero, np.uint8),
        own("int8"): stored,
        own("steps"): steps,
        own("zeros"): np.zeros(len(bias), np.int8),  # without them ONNX Runtime computes in float
        own("bias_int32"): np.rint(bias.astype(np.float64) / bias_steps).clip(-(2**31), 2**31 - 1).astype(np.int32),
        own("bias_steps"): bias_steps,
        own("rows"): np.array([-1, len(weight)]),
        own("outputs"): np.array([len(bias)]),
    }
    nodes = [
        make_node("Reshape", [source, own("rows")], [own("x")]),
        make_node("QuantizeLinear", [own("x"), own("step"), own("zero")], [own("x_bytes")]),
        make_node("DequantizeLinear", [own("x_bytes"), own("step"), own("zero")], [own("x_rounded")]),
        make_node("DequantizeLinear", [own("int8"), own("steps"), own("zeros")], [own("weight_rounded")], axis=1),
        make_node("DequantizeLinear", [own("bias_int32"), own("bias_steps")], [own("bias_rounded")], axis=0),
        make_node("Gemm", [own("x_rounded"), own("weight_rounded"), own("bias_rounded")], [own("y")]),
        make_node("Shape", [source], [own("leading")], start=0, end=-1),
        make_node("Concat", [own("leading"), own("outputs")], [own("shape")], axis=0),
        make_node("Reshape", [own("y"), own("shape")], [target]),
    ]
    return nodes, values


def write_products(
    name: str, scale: Scale, weight: np.ndarray[Any, Any], bias: np.ndarray[Any, Any], source: str, targets: list[str]
) -> tuple[list[Any], Arrays]:
    """The same in operations of ONNX Runtime, with the outputs divided equally over the targets."""
    from onnx.helper import make_node

    rounded, step, zero = (f"{name}.{word}" for word in ("x_bytes", "step", "zero"))
    values: Arrays = {step: np.array(scale.step, np.float32), zero: np.array(scale.zero, np.uint8)}
    nodes = [make_node("QuantizeLinear", [source, step, zero], [rounded])]
    parts = zip(np.split(weight, len(targets), 1), np.split(bias, len(targets)), targets, strict=True)
    for number, (columns, added, target) in enumerate(parts):
        own = [f"{name}.{number}.{word}" for word in ("int8", "steps", "bias")]
        values |= dict(zip(own, (*to_int8(columns), added), strict=True))
        inputs = [rounded, own[0], step, own[1], zero, "", own[2]]
        nodes.append(make_node(PRODUCT, inputs, [target], domain=OWN))
    return nodes, values


def to_int8(weight: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Weights (I, O) as int8, and the step of each output, (O,)."""
    steps = (np.abs(weight).max(0).clip(TINY) / 127).astype(np.float32)
    return np.rint(weight / steps).clip(-127, 127).astype(np.int8), steps


def find_products(graph: Any, names: Mapping[str, Scale]) -> dict[str, Layer]:
    """The nodes of each named layer: the MatMul to whose output the layer's bias is added, and that sum."""
    weights = {tensor.name for tensor in graph.initializer}
    products = {node.output[0]: node for node in graph.node if node.op_type == "MatMul" and node.input[1] in weights}
    biases = {f"{name}.bias": name for name in names}
    layers: dict[str, Layer] = {}
    for add in graph.node:
        one, other = add.input if add.op_type == "Add" else ("", "")
        for product, bias in ((one, other), (other, one)):
            if product in products and bias in biases:
                layers[biases[bias]] = products[product], add
    if missing := names.keys() - layers.keys():
        raise RuntimeError(f"the exporter did not write {min(missing)} as a product and a sum")
    return layers


def find_splits(graph: Any) -> dict[str, Any]:
    """The nodes that divide a value equally along its last axis, where nothing else uses it, by the value."""
    users = Counter(name for node in graph.node for name in node.input)
    ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in graph.value_info}
    splits = {}
    for node in graph.node:
        if node.op_type == "Split" and users[node.input[0]] == 1:
            axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
            sizes = {
                tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)[-1:]
                for value in graph.value_info
                if value.name in node.output
            }
            if axis in (-1, ranks.get(node.input[0], 0) - 1) and len(sizes) == 1:
                splits[node.input[0]] = node
    return splits
