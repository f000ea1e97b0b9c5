"""Compiled, exported, and operator calls: exact, and one kernel each."""

import pytest
import torch

from helpers.bench.training import gpu_events
from nf4_triton import dequantize
from nf4_triton.core import launch, launch_general, settings
from nf4_triton.core.reference import same_bits
from nf4_triton.core.state import Selection, read_state, to_fields, transposed
from nf4_triton.core.supported import UnsupportedState
from states import (
    CHANGES,
    SECOND,
    exact,
    moved,
    noise,
    odd_states,
    oracle,
    random_state,
    replace,
    right,
    strided,
)

bitsandbytes = pytest.importorskip("bitsandbytes")
inductor = pytest.importorskip("torch._inductor.config")
ON_GPU = pytest.mark.gpu
call = launch_general.dequantize_weight
UNSUPPORTED = (UnsupportedState, torch._dynamo.exc.Unsupported)  # if tracing itself fails
AOT_EAGER = {"backend": "aot_eager"}
ON_A_GPU = [  # on a CPU Inductor runs a C++ compiler
    pytest.param({}, id="inductor", marks=ON_GPU),
    pytest.param({"mode": "reduce-overhead"}, id="reduce-overhead", marks=ON_GPU),
]
BACKENDS = [pytest.param(AOT_EAGER, id="aot_eager"), *ON_A_GPU]


@pytest.fixture(params=BACKENDS)
def options(request):
    """Arguments of torch.compile."""
    return {"fullgraph": True, **request.param}


@pytest.fixture(autouse=True)
def compile_everything():
    """Compile without a limit, and without the cache on disk."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(cache_size_limit=200), inductor.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


@pytest.fixture
def layer(make_layer):
    """320 x 64 in fp16: 320 scales, two absmax2."""
    return make_layer(64, 320, torch.float16)


@ON_GPU
def test_one_kernel_per_dequantization(make_layer):
    """No copy, no cast, no second kernel. For the puzzle's layers: checks.torch_compile."""
    layer = make_layer(64, 320, torch.float16, nested=False)
    compiled = torch.compile(lambda: call(layer.weight, layer.weight.quant_state), fullgraph=True)
    assert right(compiled(), layer)
    [event] = gpu_events(compiled)
    assert "dequantize_general" in event.name


@ON_GPU
@pytest.mark.parametrize("options", ON_A_GPU)
def test_odd_states(options):
    compiled = torch.compile(call, **options)
    for name, (weight, state) in odd_states("cuda").items():
        assert exact(compiled(weight, state), weight, state), name


def test_what_changes_between_two_calls(layer, options):
    compiled = torch.compile(call, **options)
    weight, state = layer.weight, layer.weight.quant_state
    assert exact(compiled(weight, state), weight, state)
    contents = [(name, noise) for name in ("weight", *SECOND)]
    for name, change in contents + CHANGES:
        replace(layer, name, change)
        for _ in range(2):
            assert exact(compiled(weight, state), weight, state), name


def test_a_weight_that_is_misaligned_after_compilation(layer, options):
    """Inductor copies it, unless it is a parameter, whose address Inductor treats as fixed."""
    compiled, state = torch.compile(call, **options), layer.weight.quant_state
    weight = layer.weight.data.as_subclass(torch.Tensor)
    if weight.is_cuda and "backend" in options:
        pytest.skip("aot_eager copies no input")
    for given in (weight, moved(weight, 3), weight):
        assert exact(compiled(given, state), weight, state)


BAD = {
    "weight": strided,
    "state2.dtype": lambda x: torch.float16,
    "state2": lambda x: None,
}


@pytest.mark.parametrize("name", BAD)
def test_a_state_gone_bad_is_refused(layer, name):
    """In a full graph, Dynamo reports the error; otherwise the eager call raises it."""
    full = torch.compile(call, fullgraph=True, **AOT_EAGER)
    compiled = torch.compile(lambda w, s: call(w, s) + 0, **AOT_EAGER)
    weight, state = layer.weight, layer.weight.quant_state
    assert same_bits(compiled(weight, state), full(weight, state))
    replace(layer, name, BAD[name])
    with pytest.raises(UNSUPPORTED, match="expected"):
        full(weight, state)
    with pytest.raises(UnsupportedState, match="expected"):
        compiled(weight, state)


SEEN = {
    "of one row": lambda w: w.t(),
    "from an odd address": lambda w: moved(w, 3),
}


@pytest.mark.parametrize("view", SEEN.values(), ids=SEEN)
def test_views_made_in_the_graph(layer, options, view):
    weight, state = layer.weight.data.as_subclass(torch.Tensor), layer.weight.quant_state
    compiled = torch.compile(lambda w, s: call(view(w), s), **options)
    for _ in range(2):
        assert exact(compiled(weight, state), view(weight), state)


@pytest.mark.parametrize("before", [(1, 1), (0, 64)], ids=str)
def test_a_single_byte(before, options):
    """Its weight of shape (1, 1) counts as transposed; alone, or after another graph, where Inductor fails on
    the transpose of a (1, 1) result."""
    compiled, one = torch.compile(call, **options), torch.ones(1, 1)
    assert transposed(one, one) is one
    for size in (before, (1, 1), (1, 2), (2, 1), before):
        weight, state = random_state(size, torch.float16)
        assert exact(compiled(weight, state), weight, state)


def test_a_dynamic_number_of_selected_slices(device, options):
    weight, state = random_state((16, 320), torch.float16)
    compiled = torch.compile(lambda ids: dequantize(weight, state, rows=ids) + 0, **options)
    whole = oracle(weight, state)
    ids = torch.tensor([5, 0, 11, 5], device=device)
    torch._dynamo.mark_dynamic(ids, 0)
    for given in (ids, ids[:2], torch.arange(9, device=device)):
        assert same_bits(compiled(given), whole[given])
    ids.add_(1)  # the ids change in place
    assert same_bits(compiled(ids), whole[ids])


def test_layers_of_one_spec_share_a_graph(make_layer, options):
    """Even if some were used eagerly before, and after edits."""
    made = [make_layer(64, 96, torch.float16, seed=seed) for seed in range(3)]
    launch.your_dequantize_nf4(made[0])
    compiled = torch.compile(lambda layer: launch.your_dequantize_nf4(layer), **options)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            assert all(right(compiled(layer).clone(), layer) for layer in made)
            made[1].weight.data.bitwise_xor_(255)
            made[2].weight.quant_state.absmax = 255 - made[2].weight.quant_state.absmax


def test_a_frame_that_dynamo_gave_up(layer):
    """As Inductor does with bf16 on a T4. Dynamo then traces the functions that the frame calls."""

    def refuse(graph, inputs):
        raise torch._dynamo.exc.SkipFrame("no bf16 on this GPU")

    compiled = torch.compile(lambda layer: launch.your_dequantize_nf4(layer) + 0, backend=refuse)
    for _ in range(3):
        assert right(compiled(layer), layer)


# The operator itself
@pytest.mark.parametrize("kind", ["puzzle", "ids", "reference"])
def test_opcheck(kind, device):
    tensors, layout = read_state(*random_state((96, 64), torch.bfloat16, nested=kind != "ids"))
    fields = to_fields(tensors, layout, Selection(torch.tensor([3, 1], device=device), 0, 2))
    name, arguments = {
        "puzzle": ("dequantize", (*tensors, *layout[:2], 64, 256, settings.cache_key())),
        "ids": ("dequantize_general", (*fields, settings.cache_key())),
        "reference": ("dequantize_reference", fields),
    }[kind]
    verdicts = torch.library.opcheck(getattr(torch.ops.nf4_triton, name).default, arguments)
    assert set(verdicts.values()) == {"SUCCESS"} and len(verdicts) >= 4


@pytest.mark.parametrize("nested", [True, False], ids=["puzzle", "general"])
def test_what_decides_a_launch_is_part_of_the_graph(nested):
    """torch reuses no code that was compiled by another version, for other tiles, or under forced
    settings, not even from its cache on disk. An exported program still picks its settings on the machine
    that loads it."""
    (weight, state), seen = random_state((64, 96), torch.float16, nested), []

    def keep_graph(graph, inputs):
        seen.append(graph.print_readable(print_output=False))
        return graph

    compiled = torch.compile(lambda w: call(w, state), backend=keep_graph, fullgraph=True)
    compiled(weight)
    with settings.force(tile_rows=64):
        assert exact(compiled(weight), weight, state)
    compiled(weight)
    assert len(seen) == 2 and "('tile_rows', 64)" in seen[1] and "tile_rows" not in seen[0]
    assert all(settings.VERSION in graph and "(9, 0): (32, 2)" in graph for graph in seen)
    exported = torch.export.export(Layer(state), (weight,)).module()
    with settings.force(tile_rows=16):
        assert exact(exported(weight), weight, state)


class Layer(torch.nn.Module):
    def __init__(self, state):
        super().__init__()
        self.state = state

    def forward(self, weight):
        return call(weight, self.state)
