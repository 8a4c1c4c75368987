"""Attribution of ops to the layers of a lowered step."""

from tftpu.engines.lowered import layer_path


def test_an_op_belongs_to_the_layers_in_its_name():
    layers = ["resnet", "block1", "qkv", "dense_1"]
    assert layer_path("gradient_tape/model_1/block1_1/qkv_1/MatMul", layers) == "block1/qkv"
    assert layer_path("model_1/dense_1_2/MatMul", layers) == "dense_1"
    assert layer_path("sub/add", layers) == ""
