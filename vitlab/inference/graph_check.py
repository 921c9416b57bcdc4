"""Whether an ONNX graph from anywhere can do no more than compute wrong numbers.

It names no other file, has no loops and no functions, only operations that our own graphs have, and every value in it
has a known size that is not too large. So what it can take of time and memory is known before it runs.
"""

from collections.abc import Iterator
from math import prod
from typing import Any

from vitlab.errors import UserError
from vitlab.models.config import Size
from vitlab.text import brief, listed

OWN = "com.microsoft"  # operations of ONNX Runtime
PRODUCT, ATTENTION = "MatMulIntegerToFloat", "MultiHeadAttention"
ALLOWED = {
    "": (
        *("Add", "Cast", "Concat", "Conv", "Div", "Expand", "Flatten", "Gather", "GatherElements", "Gelu", "Gemm"),
        *("Identity", "InstanceNormalization", "LayerNormalization", "MatMul", "MaxPool", "Mul", "Neg", "Pad"),
        *("QuantizeLinear", "ReduceMean", "Relu", "Reshape", "Shape", "Sigmoid", "Slice", "Softmax", "Split", "Sqrt"),
        *("Squeeze", "Sub", "Tanh", "Transpose", "Unsqueeze"),
    ),
    OWN: (PRODUCT, ATTENTION),
}
NODES = 100_000
BATCH = 64  # that sizes are computed for
MOST = 1 << 25  # numbers of one value, for one image
SMALL = 64  # numbers of a constant that may be a shape


def check_graph(proto: Any, image_size: Size, features: int) -> None:
    """Raise UserError with the reason, if a graph is not one from images of the size to features."""
    check_parts(proto)
    shapes = infer_shapes(proto)
    images, values = (shapes.get(value.name, ()) for value in (proto.graph.input[0], proto.graph.output[0]))
    if images != (BATCH, 3, *image_size) or values != (BATCH, features):
        raise UserError(f"it takes {images[1:]} and gives {values[1:]}")
    for node in proto.graph.node:
        for name in filter(None, node.output):
            if name not in shapes or prod(shapes[name]) > BATCH * MOST:
                raise UserError(f"the size of {name!r} is {'too large' if name in shapes else 'unknown'}")
        if node.op_type == ATTENTION:
            check_attention(node, shapes)


def check_parts(proto: Any) -> None:
    """What is there, before any of it is computed."""
    from onnx import AttributeProto, TensorProto

    graph = proto.graph
    if proto.functions or proto.training_info or graph.sparse_initializer:
        raise UserError("it has functions, training or sparse values")
    if (len(graph.input), len(graph.output)) != (1, 1) or len(graph.node) > NODES:
        raise UserError("it has not one input and one output, or too many operations")
    if not graph.input[0].type.tensor_type.shape.dim or not all(node.output for node in graph.node):
        raise UserError("it has an input without a size, or an operation without a result")
    for tensor in graph.initializer:
        if tensor.data_location != TensorProto.DEFAULT or tensor.external_data:
            raise UserError(f"{tensor.name!r} is in another file")
    if other := [n.op_type for n in graph.node if n.op_type not in ALLOWED.get(n.domain, ())]:
        raise UserError(f"it has the operation {other[0]!r}")
    plain = (
        AttributeProto.FLOAT,
        AttributeProto.INT,
        AttributeProto.STRING,
        AttributeProto.FLOATS,
        AttributeProto.INTS,
    )
    if strange := [a.name for n in graph.node for a in n.attribute if a.type not in plain or a.ref_attr_name]:
        raise UserError(f"an operation has the setting {strange[0]!r}")


def infer_shapes(proto: Any) -> dict[str, tuple[int, ...]]:
    """The size of every value for a batch, but for those that cannot be known."""
    import onnx
    from onnx.helper import make_graph, make_model, make_tensor_value_info

    graph, size = proto.graph, onnx.ValueInfoProto()
    size.CopyFrom(graph.input[0])
    size.type.tensor_type.shape.dim[0].dim_value = BATCH
    large = [tensor for tensor in graph.initializer if prod(tensor.dims) > SMALL]  # only their sizes are needed
    small = [tensor for tensor in graph.initializer if prod(tensor.dims) <= SMALL]
    nodes = [known for node in graph.node for known in in_known_operations(node)]
    try:
        inputs = [size, *(make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims) for tensor in large)]
        output = make_tensor_value_info(graph.output[0].name, onnx.TensorProto.FLOAT, None)
        sizes = make_graph(nodes, "sizes", inputs, [output], small)
        new = make_model(sizes, opset_imports=list(proto.opset_import), ir_version=proto.ir_version)
        found = onnx.shape_inference.infer_shapes(new, strict_mode=True, data_prop=True).graph
    except Exception as error:  # of several kinds
        raise UserError(f"its sizes cannot be computed ({brief(error)})") from None
    values = {value.name: dimensions(value) for value in (*found.input, *found.value_info, *found.output)}
    return {name: dims for name, dims in values.items() if dims is not None}


def dimensions(value: Any) -> tuple[int, ...] | None:
    kind = value.type.tensor_type
    known = kind.HasField("shape") and all(dim.HasField("dim_value") for dim in kind.shape.dim)
    return tuple(dim.dim_value for dim in kind.shape.dim) if known else None


def in_known_operations(node: Any) -> Iterator[Any]:
    """A node whose sizes the onnx package can compute, in place of one of ONNX Runtime's own."""
    from onnx import TensorProto
    from onnx.helper import make_node

    if node.domain != OWN:
        yield node
    elif node.op_type == ATTENTION:
        yield make_node("Identity", node.input[:1], node.output)
    else:
        sums = f"{node.output[0]} as integers"
        yield make_node("MatMulInteger", node.input[:2], [sums])
        yield make_node("Cast", [sums], node.output, to=TensorProto.FLOAT)


def check_attention(node: Any, shapes: dict[str, tuple[int, ...]]) -> None:
    """Its weights, heads x queries x keys, are a value too; and its output is as large as its queries."""
    q, k, v = (shapes.get(name, ()) for name in node.input[:3])
    heads = [attribute.i for attribute in node.attribute if attribute.name == "num_heads"]
    fitting = len(q) == len(k) == 3 and k == v and (q[0], q[2]) == (k[0], k[2]) and len(heads) == 1
    if not fitting or q[0] * q[1] * k[1] * heads[0] > BATCH * MOST:
        raise UserError(f"the sizes of {listed(node.input[:3])} are no attention's")
