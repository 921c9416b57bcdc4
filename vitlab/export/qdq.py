"""Dense layers of an ONNX graph as int8: their inputs pass through bytes, their weights are stored as int8.

QuantizeLinear and DequantizeLinear around a MatMul are how ONNX says it; runtimes turn the three into one product of
integers.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from vitlab.export.quantize import LEAST, Scale


def quantized(proto: Any, scales: Mapping[str, Scale]) -> Any:
    """A copy of the graph in which the named layers are int8."""
    import onnx

    new = onnx.ModelProto()
    new.CopyFrom(proto)
    graph = new.graph
    stored = {tensor.name: tensor for tensor in graph.initializer}
    products = find_products(graph, stored, scales)
    nodes = []
    for node in graph.node:
        if node.output[0] in products:
            nodes += quantize_product(graph, node, stored, products[node.output[0]], scales)
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    used = {name for node in graph.node for name in node.input}
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    onnx.checker.check_model(new)
    return new


def find_products(graph: Any, stored: Mapping[str, Any], names: Mapping[str, Scale]) -> dict[str, str]:
    """The output of each layer's MatMul, and the layer: the one to whose output the layer's bias is added."""
    products = {node.output[0] for node in graph.node if node.op_type == "MatMul" and node.input[1] in stored}
    biases = {f"{wrap}{name}.bias": name for name in names for wrap in ("", "model.")}
    found = {}
    for node in graph.node:
        if node.op_type == "Add":
            name = next((biases[word] for word in node.input if word in biases), None)
            product = next((word for word in node.input if word in products), None)
            if name is not None and product is not None:
                found[product] = name
    lost = set(names) - set(found.values())
    if lost:
        raise RuntimeError(f"the exporter wrote {sorted(lost)[0]} as something else than a product and a sum")
    return found


def quantize_product(
    graph: Any, node: Any, stored: Mapping[str, Any], name: str, scales: Mapping[str, Scale]
) -> list[Any]:
    """Send the product's inputs through bytes; the nodes that do it."""
    from onnx import helper, numpy_helper

    weight = numpy_helper.to_array(stored[node.input[1]])  # (in, out)
    step = np.maximum(np.abs(weight).max(0), LEAST).astype(np.float32) / np.float32(127)
    tensors = {
        "weight": np.rint(weight / step).astype(np.int8),
        "weight_step": step,
        "weight_zero": np.zeros(len(step), np.int8),
        "step": np.float32(scales[name].step),
        "zero": np.uint8(scales[name].zero),
    }
    graph.initializer.extend(numpy_helper.from_array(np.asarray(x), f"{name}.int8.{key}") for key, x in tensors.items())
    own = {key: f"{name}.int8.{key}" for key in (*tensors, "bytes", "input", "matrix")}
    how = [own["step"], own["zero"]]
    nodes = [
        helper.make_node("QuantizeLinear", [node.input[0], *how], [own["bytes"]]),
        helper.make_node("DequantizeLinear", [own["bytes"], *how], [own["input"]]),
        helper.make_node(
            "DequantizeLinear", [own["weight"], own["weight_step"], own["weight_zero"]], [own["matrix"]], axis=1
        ),
    ]
    node.input[0], node.input[1] = own["input"], own["matrix"]
    return nodes
