"""The five tensors that a nested layer is decoded from, by the names that refusals use: layer -> tensor."""

TENSORS = {
    "weight": lambda layer: layer.weight,
    "absmax": lambda layer: layer.weight.quant_state.absmax,
    "state2.absmax": lambda layer: layer.weight.quant_state.state2.absmax,
    "state2.code": lambda layer: layer.weight.quant_state.state2.code,
    "offset": lambda layer: layer.weight.quant_state.offset,
}
