"""Dense layers of an ONNX graph as int8, by ONNX Runtime's quantizer with ranges that are known already.

The quantizer puts QuantizeLinear and DequantizeLinear around a MatMul, which runtimes fuse into one integer product.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from vitlab.export.quantize import Scale


def quantize_layers(proto: Any, scales: Mapping[str, Scale]) -> Any:
    """A copy of the graph in which the named layers are int8: inputs as bytes, weights with a scale per output."""
    import onnx
    from onnxruntime.quantization import QuantType
    from onnxruntime.quantization.calibrate import TensorData
    from onnxruntime.quantization.qdq_quantizer import QDQQuantizer
    from onnxruntime.quantization.quant_utils import add_infer_metadata

    new = onnx.ModelProto()
    new.CopyFrom(proto)
    add_infer_metadata(new)  # types are in the graph already; else the quantizer would write it to disk to infer them
    products = find_products(new.graph, scales)
    inputs = {node.input[0]: scales[name] for name, node in products.items()}
    overrides = {
        name: [{"scale": np.array(scale.step, np.float32), "zero_point": np.array(scale.zero, np.uint8)}]
        for name, scale in inputs.items()
    }
    quantizer = QDQQuantizer(
        new,
        per_channel=True,
        reduce_range=False,
        weight_qType=QuantType.QInt8,
        activation_qType=QuantType.QUInt8,
        tensors_range={name: TensorData() for name in inputs},  # the overrides take their place
        nodes_to_quantize=[node.name for node in products.values()],
        nodes_to_exclude=[],
        op_types_to_quantize=["MatMul"],
        extra_options={"OpTypesToExcludeOutputQuantization": ["MatMul"], "TensorQuantOverrides": overrides},
    )
    quantizer.quantize_model()
    quantizer.model.topological_sort()
    new.producer_name, new.producer_version = proto.producer_name, proto.producer_version
    del new.metadata_props[:]
    new.metadata_props.extend(proto.metadata_props)
    onnx.checker.check_model(new)
    return new


def find_products(graph: Any, names: Mapping[str, Scale]) -> dict[str, Any]:
    """The MatMul node of each named layer: the one to whose output the layer's bias is added."""
    weights = {tensor.name for tensor in graph.initializer}
    products = {node.output[0]: node for node in graph.node if node.op_type == "MatMul" and node.input[1] in weights}
    biases = {f"{name}.bias": name for name in names}
    layers: dict[str, Any] = {}
    for one, other in (node.input for node in graph.node if node.op_type == "Add"):
        for product, bias in ((one, other), (other, one)):
            if product in products and bias in biases:
                layers[biases[bias]] = products[product]
    if missing := names.keys() - layers.keys():
        raise RuntimeError(f"the exporter did not write {min(missing)} as a product and a sum")
    return layers
