"""Compiled and exported calls: exact, one operator, and under Inductor nothing but the launch.

The code that Inductor writes calls `_run_compiled` past the dispatcher; everything else reaches the operator.
"""

import contextlib
import gc
import shutil

import pytest
import torch
import triton
from packaging import version

from helpers import machine
from helpers.nf4 import kernel, launch, reference
from helpers.nf4.reference import same_bits
from states import random_state

bitsandbytes = pytest.importorskip("bitsandbytes")
inductor = pytest.importorskip("torch._inductor.config")
ON_GPU = pytest.mark.gpu
REFUSED = launch.UnsupportedState, torch._dynamo.exc.Unsupported  # at the call, or while it is traced
STATIC = dict(fullgraph=True, dynamic=False)
AOT_EAGER, GRAPHS = {"backend": "aot_eager"}, {"mode": "reduce-overhead"}
BACKENDS = [
    pytest.param(AOT_EAGER, id="aot_eager"),
    pytest.param({}, id="inductor"),
    pytest.param(GRAPHS, id="reduce-overhead", marks=ON_GPU),
]


@pytest.fixture(autouse=True)
def compile_everything():
    """As often as a test likes, and from no cache on disk."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(cache_size_limit=200), inductor.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


@pytest.fixture
def layer(make_layer):
    """320 x 64 in fp16: 320 blocks of scales, 2 of the second level."""
    return make_layer(64, 320, torch.float16)


def call(weight, state):
    return launch._your_dequantize_nf4(weight, state)


def exact(result, weight, state):
    return same_bits(result, reference.dequantize(weight, state))


def right(result, layer):
    return exact(result, layer.weight, layer.weight.quant_state)


def code_of(function, *arguments):
    """Return (result, the code that Inductor wrote)."""
    from torch._inductor.utils import run_and_get_code

    result, codes = run_and_get_code(function, *arguments)
    return result, "\n".join(codes)


def noise(x):
    return torch.randint_like(x, 256) if x.dtype == torch.uint8 else torch.rand_like(x) + 0.25


@pytest.fixture
def warm(watched, layer):
    """(compiled call, weight, state), compiled and launched directly."""
    compiled, weight, state = torch.compile(call, **STATIC), layer.weight, layer.weight.quant_state
    for _ in range(2):
        watched.eager = 0
        assert exact(compiled(weight, state), weight, state)
    assert watched.eager == 0
    return compiled, weight, state


# The code that Inductor writes
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
def test_it_only_launches_without_a_copy(watched, make_layer, nested, quant_type):
    how = dict(nested=nested, quant_type=quant_type)
    layers = [make_layer(63, size, torch.float16, **how) for size in (5, 64, 5)]
    compiled = torch.compile(lambda layers: [launch.your_dequantize_nf4(x) for x in layers], **STATIC)
    results, code = code_of(compiled, layers)
    assert code.count("torch.ops.nf4_triton.dequantize.default.run(arg") == 3  # the weight, not a view of it
    assert "dequantize.default(" not in code
    assert all(map(right, results, layers))
    watched.eager = 0
    assert all(map(right, compiled(layers), layers)) and watched.eager == 0


def other_data(x):
    x.data = noise(x)


CHANGES = {  # name: (change, does the compiled code still only launch?)
    "codes": (lambda w, s: w.data.bitwise_xor_(255), True),
    "weight.data": (lambda w, s: other_data(w), True),
    "absmax.data": (lambda w, s: other_data(s.absmax), True),
    "absmax": (lambda w, s: setattr(s, "absmax", 255 - s.absmax), True),
    "state2.absmax": (lambda w, s: setattr(s.state2, "absmax", noise(s.state2.absmax)), True),
    "state2.code": (lambda w, s: setattr(s.state2, "code", noise(s.state2.code)), True),
    "offset": (lambda w, s: setattr(s, "offset", s.offset + 1), True),
    "offset in bf16": (lambda w, s: setattr(s, "offset", s.offset.bfloat16() + 1), False),
    "dtype": (lambda w, s: setattr(s, "dtype", torch.float32), False),
    "quant_type": (lambda w, s: setattr(s, "quant_type", "fp4"), False),
    "blocksize": (lambda w, s: setattr(s, "blocksize", 128), False),
    "shape": (lambda w, s: setattr(s, "shape", torch.Size([64, 320])), False),
}


def test_what_changes_between_two_calls(watched, warm):
    compiled, weight, state = warm
    for name, (change, launches) in CHANGES.items():
        before = compiled(weight, state)
        change(weight, state)
        watched.eager = 0
        result = compiled(weight, state)
        assert exact(result, weight, state), name
        assert result.shape != before.shape or not torch.equal(result.float(), before.float()), name
        assert watched.eager == 0 or not launches, name
        watched.eager = 0
        assert exact(compiled(weight, state), weight, state) and watched.eager == 0, name


BAD = {
    "a weight too short": lambda w, s: setattr(w, "data", w.data[:5000]),
    "a strided weight": lambda w, s: setattr(w, "data", torch.cat([w.data, w.data], 1)[:, :1]),
    "a freed weight": lambda w, s: w.untyped_storage().resize_(0),
    "absmax too short": lambda w, s: setattr(s, "absmax", s.absmax[:-1].clone()),
    "absmax as int8": lambda w, s: setattr(s.absmax, "data", s.absmax.data.view(torch.int8)),
    "state2.dtype": lambda w, s: setattr(s.state2, "dtype", torch.float16),
    "no state2": lambda w, s: setattr(s, "state2", None),
    "blocksize": lambda w, s: setattr(s, "blocksize", 96),
    "repacked": lambda w, s: s.__dict__.update(packing_format_for_cpu=True, nested=False, state2=None),
}


@pytest.mark.parametrize("name", BAD)
def test_a_state_gone_bad_is_refused(warm, name):
    compiled, weight, state = warm
    BAD[name](weight, state)
    for _ in range(2):
        with pytest.raises(REFUSED, match="expected"):
            compiled(weight, state)


def test_a_freed_weight_beside_one_of_another_storage_dtype(watched, layer):
    """They share a key: the address without a storage is an offset in elements of this dtype."""
    packed, state = layer.weight.data.view(-1), layer.weight.quant_state
    flat = torch.cat([packed[:16], packed]).view(torch.bfloat16)
    weight, compiled = flat[8:].view(-1, 1), torch.compile(call, **STATIC)
    for given in (packed, weight, weight):
        assert exact(compiled(given, state), given, state)
    flat.untyped_storage().resize_(0)
    with pytest.raises(REFUSED, match="weight has no memory"):
        compiled(weight, state)


@contextlib.contextmanager
def hooked(which, added):
    """Add a launch hook to Triton's chain, or assign one in its place."""
    hooks = triton.knobs.runtime if hasattr(triton, "knobs") else triton.compiler.CompiledKernel
    chain = getattr(hooks, which)
    chain.add(print) if added else setattr(hooks, which, print)
    try:
        yield
    finally:
        chain.remove(print) if added else setattr(hooks, which, chain)


def test_what_makes_a_compiled_call_eager(watched, warm, monkeypatch):
    """Hooks, a misaligned weight, other settings and another kernel are the eager call's business."""
    compiled, weight, state = warm
    packed = weight.data.view(-1)
    moved = torch.cat([packed[:3], packed, packed[:1]])[3:-1].view(weight.shape)
    assert moved.data_ptr() % 4 == 3

    class Edited:
        def __getitem__(self, grid, original=launch._your_dequantize_nf4_kernel):
            return original[grid]

    def check(expect_eager):
        watched.eager = 0
        assert exact(compiled(weight, state), weight, state)
        assert watched.eager == expect_eager

    for which in ("launch_enter_hook", "launch_exit_hook"):
        for added in (False, hasattr(triton, "knobs")):
            with hooked(which, added):
                check(1), check(1)
            check(0)
    with kernel.force(card="t4"):
        check(1), check(0)
    check(1), check(0)
    aligned, weight.data = weight.data, moved
    assert exact(compiled(weight, state), weight, state)  # eager, or copied to aligned memory by Inductor
    weight.data = aligned
    check(0)
    monkeypatch.setattr(launch, "_your_dequantize_nf4_kernel", Edited())
    check(1), check(0)


FALLBACKS = {
    "cpp_wrapper": dict(options={"cpp_wrapper": True}),
    "no size asserts": dict(options={"size_asserts": False}),
    "no lowering": {},
}


@pytest.mark.parametrize("name", [pytest.param("cpp_wrapper", marks=pytest.mark.long), *list(FALLBACKS)[1:]])
def test_otherwise_the_operator_is_called(watched, layer, monkeypatch, name):
    """Where Inductor writes C++, does not check layouts, or has no such names."""
    from torch._inductor import lowering

    if name == "no lowering":
        monkeypatch.delattr(lowering.ir, "ExternKernelAlloc")
    compiled = torch.compile(lambda layer: launch.your_dequantize_nf4(layer), **STATIC, **FALLBACKS[name])
    result, code = code_of(compiled, layer)
    assert ".run(" not in code and "nf4_triton" in code
    assert right(result, layer) and right(compiled(layer), layer)


SEEN = {
    "reshaped": lambda w: w.view(64, 160),
    "of one row": lambda w: w.t(),
    "from the middle of its storage": lambda w: torch.cat([w[:8], w])[8:],
}
UNFIT = {
    "too short": lambda w: w[:5],
    "every second byte": lambda w: w[::2],
    "one byte again and again": lambda w: w[:1].expand(w.shape),
    "transposed": lambda w: w.view(64, 160).t(),
}


@pytest.mark.parametrize("view", [*SEEN, *UNFIT])
def test_views_made_in_the_graph(watched, layer, view):
    """The tensor an unfit one is a view of would dequantize well, to other weights than were asked for."""
    state, packed, change = layer.weight.quant_state, layer.weight.data, {**SEEN, **UNFIT}[view]
    compiled = torch.compile(lambda w, s: call(change(w), s), **STATIC)
    for _ in range(2):
        if view in UNFIT:
            with pytest.raises(REFUSED, match="expected"):
                compiled(packed, state)
        else:
            result = compiled(packed, state)
            assert result.shape == (state.shape[::-1] if view == "of one row" else state.shape)
            assert exact(result, change(packed), state)


def test_a_contiguous_view_of_a_strided_weight(watched, layer):
    """Made in the graph: what it is a view of would be refused."""
    state, packed = layer.weight.quant_state, layer.weight.data
    compiled = torch.compile(lambda w, s: call(w.t().view(-1, 1), s), **STATIC)
    strided = packed.view(64, 160).t()
    for _ in range(2):
        assert exact(compiled(strided, state), packed, state)


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (2, 1)])
def test_a_single_byte(shape):
    """Its weight of shape (1, 1) counts as transposed, once."""
    weight, state = random_state(shape, torch.float16)
    result, expected = torch.compile(call, **STATIC, **AOT_EAGER)(weight, state), call(weight, state)
    assert result.shape == expected.shape == shape[::-1] and same_bits(result, expected)


def test_a_weight_of_a_dynamic_length(watched, layer):
    compiled = torch.compile(call, fullgraph=True)
    weight, state = layer.weight.data, layer.weight.quant_state
    torch._dynamo.mark_dynamic(weight, 0)
    for given in (weight, torch.cat([weight, weight]), weight):
        assert exact(compiled(given, state), weight, state)
    with pytest.raises(REFUSED, match="holds 5000 bytes"):
        compiled(weight[:5000], state)


def test_states_of_other_blocksizes_and_shapes_as_arguments(watched, make_layer):
    """Dynamo then makes a symbol of what differs."""
    compiled = torch.compile(call, fullgraph=True)
    for sizes, blocksize in (((64, 320), 64), ((64, 640), 128), ((96, 128), 256)):
        layer = make_layer(*sizes, torch.float16, blocksize=blocksize)
        for _ in range(2):
            assert right(compiled(layer.weight, layer.weight.quant_state), layer)


@ON_GPU  # on a CPU a C++ compiler runs for half a minute
def test_a_state_that_the_graph_changes(watched, layer):
    """Each dequantization in one graph sees the contents of its moment."""
    weight, state = layer.weight.data, layer.weight.quant_state
    absmax, packed = noise(state.absmax), noise(weight)

    def step(weight, state):
        results = [call(weight, state)]
        state.absmax.copy_(absmax)
        results.append(call(weight, state))
        weight.copy_(packed)
        return [*results, call(weight, state)]

    old = weight.clone(), state.absmax.clone()
    expected = step(weight, state)
    compiled = torch.compile(step, **STATIC)
    for _ in range(2):
        weight.copy_(old[0]), state.absmax.copy_(old[1])
        assert all(map(same_bits, compiled(weight, state), expected))


def test_every_mode_and_type(watched, warm):
    compiled, weight, state = warm
    for context in (torch.no_grad(), torch.inference_mode(), torch.autocast(weight.device.type)):
        with context:
            for given in (weight, weight.data, torch.nn.Parameter(weight.data, requires_grad=False)):
                assert exact(compiled(given, state), weight, state)


# fullgraph under every backend
@pytest.mark.parametrize("options", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_layers_of_one_key_share_a_graph(make_layer, dtype, options):
    """Whether or not some were used eagerly before, and after edits."""
    if dtype == torch.bfloat16 and options != AOT_EAGER and machine.has_gpu() and not machine.native_bf16():
        pytest.skip("Inductor does not compile bf16 on this GPU: no full graph")
    made = [make_layer(64, 96, dtype, seed=seed) for seed in range(4)]
    launch.your_dequantize_nf4(made[0])
    compiled = torch.compile(lambda layer: launch.your_dequantize_nf4(layer), fullgraph=True, **options)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            assert all(right(compiled(layer).clone(), layer) for layer in made)
            made[1].weight.data.bitwise_xor_(255)
            made[2].weight.quant_state.absmax = 255 - made[2].weight.quant_state.absmax


@pytest.mark.parametrize(
    "options", [AOT_EAGER, pytest.param({}, marks=ON_GPU)], ids=["aot_eager", "inductor"]
)
def test_transposed_and_out(layer, options):
    weight, state = layer.weight.data, layer.weight.quant_state
    compiled = torch.compile(launch._your_dequantize_nf4, fullgraph=True, **options)
    assert same_bits(compiled(weight.t(), state), reference.dequantize(weight, state).t())
    out = torch.full(state.shape, float("nan"), dtype=state.dtype, device=weight.device)
    compiled(weight, state, out)
    assert exact(out, weight, state)
    with pytest.raises(REFUSED, match="out has"):
        compiled(weight, state, out.float())


def test_a_weight_that_requires_grad(layer, recwarn):
    """As of model.requires_grad_(True) with a float quant_storage: its codes have no gradient."""
    weight, state = layer.weight.data.view(-1).view(torch.bfloat16).requires_grad_(), layer.weight.quant_state
    x = torch.ones(3, 64, dtype=torch.float16, device=weight.device, requires_grad=True)
    compiled = torch.compile(lambda x, w: (x @ call(w, state).t()).sum(), fullgraph=True, **AOT_EAGER)
    compiled(x, weight).backward()
    assert weight.grad is None and x.grad.abs().sum() > 0
    assert not [one for one in recwarn if "autograd" in str(one.message)]


class Adapted(torch.nn.Module):
    """Two quantized projections, one dequantized again in the backward pass, and a trained adapter."""

    def __init__(self, make_layer):
        super().__init__()
        self.first, self.second = make_layer(64, 96, torch.float32), make_layer(96, 64, torch.float32)
        self.adapter = torch.nn.Linear(64, 64, bias=False, device=self.first.weight.device)

    def forward(self, x):
        up = torch.utils.checkpoint.checkpoint(self.project, self.first, x, use_reentrant=False)
        return self.project(self.second, up) + self.adapter(x)

    def project(self, layer, x):
        return x @ launch.your_dequantize_nf4(layer).t()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(AOT_EAGER, id="aot_eager"),
        pytest.param({**AOT_EAGER, "dynamic": True}, id="dynamic"),
        pytest.param({}, id="inductor", marks=ON_GPU),  # on a CPU a C++ compiler runs
        BACKENDS[2],
    ],
)
def test_a_training_step(make_layer, options):
    model = Adapted(make_layer)
    compiled = torch.compile(model, fullgraph=True, **options)
    for batch in (3, 8, 8):
        results = []
        for function in (model, compiled):
            x = torch.ones(batch, 64, device=model.adapter.weight.device, requires_grad=True)
            model.zero_grad()
            loss = function(x).square().mean()
            loss.backward()
            results.append((loss.detach().clone(), x.grad.clone(), model.adapter.weight.grad.clone()))
        torch.testing.assert_close(*results, rtol=2e-3, atol=2e-3)


def test_a_frame_that_dynamo_gave_up(watched, layer):
    """Inductor refuses a bf16 graph on a GPU without bf16; what the frame calls is then traced on its own."""

    def refuse(graph, inputs):
        raise torch._dynamo.exc.SkipFrame("as Inductor does for bf16 on a T4")

    compiled = torch.compile(lambda layer: launch.your_dequantize_nf4(layer) + 0, backend=refuse)
    for _ in range(3):
        assert right(compiled(layer), layer)


def test_a_fresh_process_with_t4_settings():
    """The lowering is there for the first graph of a process; NF4_FORCE=t4 changes no bit."""
    code = """
from helpers import machine; machine.prepare()
import torch
from torch._inductor.utils import run_and_get_code
from helpers.nf4 import launch, reference
import sys; sys.path.append("tests/nf4")
import states
weight, state = states.random_state((64, 64), torch.float16)
compiled = torch.compile(lambda w: launch._your_dequantize_nf4(w, state), fullgraph=True)
result, codes = run_and_get_code(compiled, weight)
wrong = reference.different(result, reference.dequantize(weight, state))
print(launch.settings().reason, ".run(" in codes[0], wrong)
"""
    variables = {"NF4_FORCE": "t4", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    done = machine.python(["-c", code], variables=variables)
    assert "T4 settings forced True 0" in done.out, done


def test_cells_that_run_again(changed_kernel, layer):
    """A second operator must not free the first, which compiled code still calls."""
    module = changed_kernel("cells")
    weight, state = layer.weight, layer.weight.quant_state
    first, old = torch.compile(module._your_dequantize_nf4, **STATIC), module._operator
    assert exact(first(weight, state), weight, state)
    module.__spec__.loader.exec_module(module)
    assert module._operator is not old
    again = torch.compile(lambda w, s: module._your_dequantize_nf4(w, s), **STATIC)
    gc.collect()
    for compiled in (again, first, again):
        weight.data.bitwise_xor_(255)
        assert exact(compiled(weight, state), weight, state)
    assert exact(old(*arguments(layer)), weight, state)


# The operator itself
def arguments(layer, **changes):
    """Return what nf4_triton::dequantize takes for a layer."""
    q = layer.weight.quant_state
    second = (q.state2.code, q.state2.absmax, q.offset) if q.nested else (None,) * 3
    blocksize2 = q.state2.blocksize if q.nested else None
    packed = layer.weight.data.as_subclass(torch.Tensor)
    return (packed, q.absmax, *second, list(q.shape), q.dtype, q.quant_type, q.blocksize, blocksize2)


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
def test_opcheck(make_layer, nested):
    layer = make_layer(64, 96, torch.bfloat16, nested=nested)
    verdicts = torch.library.opcheck(torch.ops.nf4_triton.dequantize.default, arguments(layer))
    assert set(verdicts.values()) == {"SUCCESS"} and len(verdicts) >= 4


def test_the_operator_follows_its_arguments(watched, layer):
    operator, state = torch.ops.nf4_triton.dequantize, layer.weight.quant_state
    for change in (
        lambda: None,
        lambda: layer.weight.data.bitwise_xor_(255),
        lambda: setattr(state, "absmax", 255 - state.absmax),
        lambda: state.__dict__.update(dtype=torch.bfloat16, shape=torch.Size([320 * 64])),
        lambda: state.__dict__.update(blocksize=128, quant_type="fp4"),
        lambda: state.__dict__.update(nested=False, absmax=torch.rand_like(state.absmax.float())),
    ):
        change()
        for _ in range(2):
            assert right(operator(*arguments(layer)), layer)
    packed, *rest = arguments(layer)
    for bad in (packed[:-1], torch.cat([packed, packed], 1)[:, :1], packed.int()):
        with pytest.raises(launch.UnsupportedState, match="weight"):
            operator(bad, *rest)


class Projection(torch.nn.Module):
    """A Linear4bit, or its packed codes in a plain buffer as for a deployment."""

    def __init__(self, device, plain):
        super().__init__()
        layer = bitsandbytes.nn.Linear4bit(64, 96, bias=False, quant_type="nf4").to(device)
        layer.weight.quant_state.dtype = torch.float16
        self.state = layer.weight.quant_state
        self.register_buffer("codes", layer.weight.data.as_subclass(torch.Tensor).clone())
        self.layer = None if plain else layer

    def forward(self, x):
        return (
            x
            @ (
                call(self.codes, self.state) if self.layer is None else launch.your_dequantize_nf4(self.layer)
            ).t()
        )


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "Params4bit"])
def test_export(device, strict, plain):
    """The exported graph holds the operator once and runs exactly."""
    module, x = Projection(device, plain), torch.ones(4, 64, dtype=torch.float16, device=device)
    exported = torch.export.export(module, (x,), strict=strict)
    assert sum("nf4_triton" in str(node.target) for node in exported.graph.nodes) == 1
    with torch.no_grad():
        assert torch.equal(exported.module()(x), module(x))


@pytest.mark.long  # a C++ compiler runs for a minute
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "Params4bit"])
def test_aot_inductor(device, tmp_path, plain):
    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("needs a C++ compiler")
    if version.parse(torch.__version__) < version.parse("2.13") and (device == "cuda" or not plain):
        pytest.skip("before torch 2.13 AOTInductor refuses subclasses, and its package crashes on a GPU")
    module, x = Projection(device, plain), torch.ones(4, 64, dtype=torch.float16, device=device)
    with torch.no_grad():
        exported = torch.export.export(module, (x,), strict=True)
        path = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "p.pt2"))
        loaded = torch._inductor.aoti_load_package(path)
        for _ in range(2):
            torch.testing.assert_close(loaded(x), module(x))
