"""Every way to call: compiled, exported, traced, captured, from threads, streams and other processes."""

import copy
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from packaging import version

from helpers import machine
from helpers.nf4 import reference

pytest.importorskip("bitsandbytes")
ON_GPU = pytest.mark.gpu
HALF = [torch.float16, torch.bfloat16]
AOT_EAGER = {"backend": "aot_eager"}  # no code generation: what the interpreter can be compiled with
DEFAULT, REDUCE_OVERHEAD = {"mode": "default"}, {"mode": "reduce-overhead"}
BACKENDS = [
    pytest.param(AOT_EAGER, id="aot_eager"),
    pytest.param(DEFAULT, id="default", marks=ON_GPU),
    pytest.param(REDUCE_OVERHEAD, id="reduce-overhead", marks=ON_GPU),
]


def oracle(layer):
    return reference.dequantize(layer.weight, layer.weight.quant_state)


def exact(result, layer):
    return reference.same_bits(result, oracle(layer))


def refused_by_inductor(dtype, options):
    """On a card without native bf16 Inductor steps aside: fullgraph cannot be asked for there."""
    return dtype == torch.bfloat16 and "mode" in options and not machine.native_bf16()


def arguments(kernel, layer):
    """What the operator nf4_triton::dequantize takes for a layer."""
    return kernel._operands(*kernel._snapshot(layer.weight.data, layer.weight.quant_state))


@pytest.fixture
def no_recompiles():
    """Fails a test where Dynamo compiles anything twice."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


class TestOperator:
    @pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
    @pytest.mark.parametrize("dtype", reference.DTYPES)
    def test_opcheck(self, kernel, make_layer, dtype, nested):
        layer = make_layer(64, 96, dtype, nested=nested)
        operator = torch.ops.nf4_triton.dequantize.default
        verdicts = torch.library.opcheck(operator, arguments(kernel, layer))
        assert set(verdicts.values()) == {"SUCCESS"} and len(verdicts) >= 4

    @pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
    def test_exact_and_repeatable(self, kernel, make_layer, nested):
        for quant_type in ("nf4", "fp4"):
            layer = make_layer(64, 96, torch.bfloat16, nested=nested, quant_type=quant_type)
            for _ in range(3):
                assert exact(torch.ops.nf4_triton.dequantize(*arguments(kernel, layer)), layer)

    def test_repeated_launches_are_not_stale(self, kernel, make_layer):
        """Its stored launches go by address, size and settings."""
        layer, other = make_layer(64, 96, torch.float16), make_layer(64, 96, torch.float16, seed=5)
        call, state = torch.ops.nf4_triton.dequantize, layer.weight.quant_state
        assert exact(call(*arguments(kernel, layer)), layer)
        layer.weight.data.copy_(other.weight.data)
        assert exact(call(*arguments(kernel, layer)), layer)
        state.absmax = other.weight.quant_state.absmax.clone()
        assert exact(call(*arguments(kernel, layer)), layer)
        state.dtype, state.shape = torch.bfloat16, torch.Size([96 * 64])
        assert exact(call(*arguments(kernel, layer)), layer)
        state.blocksize, state.quant_type = 128, "fp4"
        assert exact(call(*arguments(kernel, layer)), layer)
        with kernel.force(card="t4"):
            assert exact(call(*arguments(kernel, layer)), layer)

    @pytest.mark.parametrize("field, value", [("packing_format_for_cpu", True), ("state2", None)])
    def test_what_only_the_state_says(self, kernel, make_layer, field, value):
        layer = make_layer(64, 96, torch.float16)
        state = copy.copy(layer.weight.quant_state)
        setattr(state, field, value)
        with pytest.raises(kernel.UnsupportedState):
            kernel._call_operator(layer.weight, state, None)

    def test_an_out_of_another_dtype(self, kernel, make_layer):
        layer = make_layer(64, 96, torch.float16)
        out = torch.empty(96, 64, device=layer.weight.device)
        with pytest.raises(kernel.UnsupportedState, match="out has"):
            kernel._call_operator(layer.weight, layer.weight.quant_state, out)

    def test_malformed_input_is_refused(self, kernel, make_layer):
        good = list(arguments(kernel, make_layer(64, 96, torch.float16)))
        for position, bad in (
            (0, good[0][:-1]),
            (1, good[1].int()),
            (6, 3),  # no dtype
            (6, 1 << 30),  # no second level so large
        ):
            with pytest.raises(kernel.UnsupportedState):
                torch.ops.nf4_triton.dequantize(*good[:position], bad, *good[position + 1 :])

    def test_a_strided_weight_at_a_known_address(self, kernel, make_layer):
        layer = make_layer(64, 96, torch.float16)
        packed = layer.weight.data
        memory = torch.cat([packed, packed + 1])
        dense, strided = memory[: len(packed)], memory.view(-1, 2)[:, :1]
        rest = arguments(kernel, layer)[1:]
        for _ in range(2):
            assert exact(torch.ops.nf4_triton.dequantize(dense, *rest), layer)
        with pytest.raises(kernel.UnsupportedState, match="contiguous"):
            torch.ops.nf4_triton.dequantize(strided, *rest)

    def test_meta_and_fake_tensors(self, kernel, make_layer):
        """Shapes without data: what a fake weight gives is fake, and nothing runs."""
        from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

        layer = make_layer(64, 96, torch.bfloat16)
        on_meta = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in arguments(kernel, layer)]
        result = torch.ops.nf4_triton.dequantize(*on_meta)
        assert result.is_meta and result.shape == (96, 64) and result.dtype == torch.bfloat16
        mode = FakeTensorMode()
        fake = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments(kernel, layer)]
        with mode:
            result = torch.ops.nf4_triton.dequantize(*fake)
        assert isinstance(result, FakeTensor) and result.shape == (96, 64)
        assert result.device == layer.weight.device and result.dtype == torch.bfloat16

    def test_a_layer_on_meta(self, kernel, make_layer):
        layer = make_layer(64, 96, torch.float16)
        state = layer.weight.quant_state
        kernel.your_dequantize_nf4(layer)
        state.absmax, state.offset = state.absmax.to("meta"), state.offset.to("meta")
        state.state2.absmax, state.state2.code = state.state2.absmax.to("meta"), state.state2.code.to("meta")
        result = kernel._your_dequantize_nf4(layer.weight.data.to("meta"), state)
        assert result.is_meta and result.shape == (96, 64) and result.dtype == torch.float16


class TestCompile:
    @pytest.mark.parametrize(
        "dtype, dynamic, options",
        [
            *((dtype, dynamic, AOT_EAGER) for dtype in HALF for dynamic in (None, True, False)),
            *(
                pytest.param(dtype, dynamic, options, marks=ON_GPU)
                for dtype, dynamic, options in (
                    (torch.float16, None, DEFAULT),
                    (torch.bfloat16, True, DEFAULT),
                    (torch.float16, False, REDUCE_OVERHEAD),
                    (torch.bfloat16, None, REDUCE_OVERHEAD),
                )
            ),
        ],
        ids=str,
    )
    def test_layers_of_one_kind_share_a_graph(
        self, kernel, make_layer, no_recompiles, dtype, dynamic, options
    ):
        """fullgraph, exact for each of four layers and after an edit, compiled once."""
        if refused_by_inductor(dtype, options):
            pytest.skip("this card has no native bf16: Inductor refuses bf16 graphs")
        made = [make_layer(64, 96, dtype, seed=seed) for seed in range(4)]
        compiled = torch.compile(
            lambda layer: kernel.your_dequantize_nf4(layer), fullgraph=True, dynamic=dynamic, **options
        )
        for _ in range(3):
            for layer in made:
                assert exact(compiled(layer).clone(), layer)
            made[1].weight.data.bitwise_xor_(255)
        made[2].weight.quant_state.absmax = 255 - made[2].weight.quant_state.absmax
        assert exact(compiled(made[2]).clone(), made[2])

    @pytest.mark.parametrize("options", BACKENDS[:2])
    def test_used_eagerly_before(self, kernel, make_layer, no_recompiles, options):
        """A launch plan on some of the states must not make graphs of their own."""
        made = [make_layer(64, 96, torch.float16, seed=seed) for seed in range(3)]
        for layer in made[:2]:
            kernel.your_dequantize_nf4(layer), kernel.your_dequantize_nf4(layer)
        compiled = torch.compile(kernel.your_dequantize_nf4, fullgraph=True, **options)
        for layer in made:
            assert exact(compiled(layer).clone(), layer)

    @pytest.mark.parametrize("options", BACKENDS[:2])
    def test_transposed_and_out(self, kernel, make_layer, options):
        torch._dynamo.reset()
        layer = make_layer(64, 96, torch.float16)
        weight, state = layer.weight.data, layer.weight.quant_state
        compiled = torch.compile(kernel.your_fast_dequantize, fullgraph=True, **options)
        assert reference.same_bits(compiled(weight.t(), state).clone(), oracle(layer).t())
        out = torch.full((96, 64), float("nan"), dtype=torch.float16, device=weight.device)
        compiled(weight, state, out=out)
        assert exact(out, layer)

    @pytest.mark.parametrize("options", BACKENDS)
    def test_inside_a_model_forward_and_backward(self, kernel, make_layer, no_recompiles, options):
        """Two quantized layers and a trained adapter: outputs and gradients as without compilation."""
        model = Adapted(kernel, make_layer)
        x = torch.randn(8, 64, device=model.down.device, dtype=torch.float16)

        def gradients(function):
            model.zero_grad()
            x_ = x.clone().requires_grad_()
            function(x_).square().mean().backward()
            return [x_.grad.clone(), model.down.grad.clone(), model.up.grad.clone()]

        expected = gradients(model)
        compiled = torch.compile(model, fullgraph=True, **options)
        for _ in range(3):
            for mine, theirs in zip(gradients(compiled), expected, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=2e-3)

    def test_dynamic_batch_sizes(self, kernel, make_layer, no_recompiles):
        model = Adapted(kernel, make_layer)
        compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
        for batch in (3, 8, 21):
            x = torch.randn(batch, 64, device=model.down.device, dtype=torch.float16)
            torch.testing.assert_close(compiled(x), model(x), rtol=2e-3, atol=2e-3)

    def test_a_malformed_state_is_refused(self, kernel, make_layer):
        """The operator checks as the eager call does; Dynamo may wrap the error, the text stays."""
        torch._dynamo.reset()
        layer = make_layer(64, 96, torch.float16)
        layer.weight.quant_state.absmax = layer.weight.quant_state.absmax[:-1].clone()
        compiled = torch.compile(kernel.your_dequantize_nf4, fullgraph=True, backend="aot_eager")
        with pytest.raises(Exception, match="absmax has 95 elements"):
            compiled(layer)


class Adapted(torch.nn.Module):
    """Two quantized projections, dequantized by the kernel, and a small trained adapter."""

    def __init__(self, kernel, make_layer, dtype=torch.float16):
        super().__init__()
        self.first, self.second = make_layer(64, 96, dtype), make_layer(96, 64, dtype)
        device = self.first.weight.device
        self.down = torch.nn.Parameter(torch.randn(4, 64, device=device, dtype=dtype) * 0.1)
        self.up = torch.nn.Parameter(torch.randn(64, 4, device=device, dtype=dtype) * 0.1)
        self.dequantize = kernel.your_dequantize_nf4

    def forward(self, x):
        hidden = torch.nn.functional.silu(x @ self.dequantize(self.first).t() * 0.1)
        return hidden @ self.dequantize(self.second).t() * 0.1 + x @ self.down.t() @ self.up.t()


class Projection(torch.nn.Module):
    def __init__(self, kernel, layer):
        super().__init__()
        self.layer, self.dequantize = layer, kernel.your_dequantize_nf4

    def forward(self, x):
        return x @ self.dequantize(self.layer).t()


class PlainProjection(torch.nn.Module):
    """The same with the packed codes in a plain buffer, as for a deployment."""

    def __init__(self, kernel, layer):
        super().__init__()
        self.register_buffer("codes", layer.weight.data.as_subclass(torch.Tensor).clone())
        self.state, self.dequantize = layer.weight.quant_state, kernel._your_dequantize_nf4

    def forward(self, x):
        return x @ self.dequantize(self.codes, self.state).t()


def projection(kernel, device):
    """A small module around a Linear4bit made by its own constructor."""
    import bitsandbytes

    layer = bitsandbytes.nn.Linear4bit(64, 96, bias=False, compute_dtype=torch.float16, quant_type="nf4")
    layer = layer.to(device)
    layer.weight.quant_state.dtype = torch.float16
    return Projection(kernel, layer), torch.randn(4, 64, dtype=torch.float16, device=device)


class TestExport:
    @pytest.mark.parametrize("strict", [True, False])
    def test_export_of_a_small_module(self, kernel, device, strict):
        """The exported graph holds the operator once and runs exactly."""
        module, x = projection(kernel, device)
        exported = torch.export.export(module, (x,), strict=strict)
        assert sum("nf4_triton" in str(node.target) for node in exported.graph.nodes) == 1
        with torch.no_grad():
            assert torch.equal(exported.module()(x), module(x))

    @pytest.mark.slow  # a C++ compiler runs
    @pytest.mark.parametrize("weights", ["plain", "Params4bit"])
    def test_aot_inductor(self, kernel, device, tmp_path, weights):
        if not (shutil.which("g++") or shutil.which("clang++")):
            pytest.skip("needs a C++ compiler")
        old = version.parse(torch.__version__) < version.parse("2.13")
        if old and device == "cuda":
            pytest.skip("torch 2.11 crashes while it loads the compiled package on a GPU")
        if old and weights == "Params4bit":
            pytest.skip("torch 2.11 refuses parameters of a subclass in AOTInductor")
        module, x = projection(kernel, device)
        if weights == "plain":
            module = PlainProjection(kernel, module.layer)
        with torch.no_grad():
            expected = module(x)
            exported = torch.export.export(module, (x,), strict=True)
            path = torch._inductor.aoti_compile_and_package(
                exported, package_path=str(tmp_path / "projection.pt2")
            )
            loaded = torch._inductor.aoti_load_package(path)
            for _ in range(2):
                torch.testing.assert_close(loaded(x), expected)


def test_the_triton_cache_knows_the_assembly(kernel, tmp_path):
    """A change of the assembly, a global of the kernel, changes the cache key: no older kernel is served."""
    text, old = Path(kernel.__file__).read_text(), "mul.rn.ftz.f32 a, a, $6;"
    assert old in text
    for i, changed in enumerate((text, text, text.replace(old, old + " "))):
        own = re.sub(r"\bnf4_triton(?=::|\.)", f"nf4_version{i}", changed)
        (tmp_path / f"version{i}.py").write_text(own)
    code = (
        "import version0, version1, version2\n"
        "key = lambda module: module._your_dequantize_nf4_kernel.cache_key\n"
        "print('keys', key(version0) == key(version1), key(version0) == key(version2))"
    )
    done = machine.python(["-c", code], folder=tmp_path, variables={"TRITON_INTERPRET": "0"})
    assert "keys True False" in done.out


class TestModes:
    def test_autograd_gives_no_gradient(self, kernel, make_layer, device):
        """The result takes part in a graph as a constant."""
        layer = make_layer(64, 96, torch.float32)
        x = torch.randn(4, 64, device=device, requires_grad=True)
        for _ in range(2):
            weight = kernel.your_dequantize_nf4(layer)
            assert not weight.requires_grad and weight.is_leaf
        (x @ weight.t()).sum().backward()
        torch.testing.assert_close(x.grad, weight.sum(0).expand(4, 64))

    def test_inference_mode_and_no_grad(self, kernel, make_layer):
        layer = make_layer(64, 96, torch.float16)
        for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
            with mode():
                for _ in range(2):
                    result = kernel.your_dequantize_nf4(layer)
                    assert result.is_inference() == (mode is torch.inference_mode)
                    assert exact(result, layer)
        result = kernel.your_dequantize_nf4(layer)
        assert not result.is_inference() and exact(result, layer)

    def test_a_state_made_in_inference_mode(self, kernel, make_layer):
        with torch.inference_mode():
            layer = make_layer(64, 96, torch.float16)
        for _ in range(2):
            assert exact(kernel.your_dequantize_nf4(layer), layer)

    @pytest.mark.parametrize("dtype", HALF)
    def test_autocast_does_not_change_the_dtype(self, kernel, make_layer, device, dtype):
        layer = make_layer(64, 96, torch.float32)
        with torch.autocast(device, dtype=dtype):
            for _ in range(2):
                assert exact(kernel.your_dequantize_nf4(layer), layer)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_the_first_call_under_other_defaults(self, kernel, make_layer, dtype):
        layer = make_layer(64, 96, torch.float16)
        kernel.codebooks.cache_clear()  # as in the first call of a process
        torch.set_default_dtype(dtype)
        try:
            with torch.device("meta" if dtype == torch.float64 else layer.weight.device):
                result = kernel.your_dequantize_nf4(layer)
        finally:
            torch.set_default_dtype(torch.float32)
            kernel.codebooks.cache_clear()
        assert exact(result, layer)

    def test_the_default_dtype_and_device_do_not_matter(self, kernel, make_layer):
        layer = make_layer(64, 96, torch.float16)
        kernel.your_dequantize_nf4(layer)
        torch.set_default_dtype(torch.float64)
        try:
            with torch.device("meta"):
                for _ in range(2):
                    result = kernel.your_dequantize_nf4(layer)
                    assert result.device == layer.weight.device
        finally:
            torch.set_default_dtype(torch.float32)
        assert exact(result, layer)

    def test_deterministic_algorithms(self, kernel, make_layer):
        """torch then fills new memory; the result is the same."""
        layer = make_layer(64, 96, torch.float16)
        torch.use_deterministic_algorithms(True)
        try:
            for _ in range(2):
                assert exact(kernel.your_dequantize_nf4(layer), layer)
        finally:
            torch.use_deterministic_algorithms(False)

    @pytest.mark.parametrize("planned", [False, True])
    def test_inside_torch_func_transforms(self, kernel, make_layer, planned):
        """grad and vmap over the activations, vmap over stacked weights: the operator answers, exactly."""
        layer = make_layer(64, 96, torch.float32)
        state, weight = layer.weight.quant_state, layer.weight.data
        if planned:
            kernel.your_dequantize_nf4(layer)
        x = torch.ones(64, device=weight.device)
        gradient = torch.func.grad(lambda x: (kernel._your_dequantize_nf4(weight, state) @ x).sum())(x)
        torch.testing.assert_close(gradient, oracle(layer).sum(0))
        result = torch.vmap(lambda x: kernel._your_dequantize_nf4(weight, state) @ x)(torch.stack([x, 2 * x]))
        torch.testing.assert_close(result[1], oracle(layer) @ (2 * x))
        stack = torch.stack([weight, 255 - weight])
        result = torch.vmap(lambda w: kernel._your_dequantize_nf4(w, state))(stack)
        for i in range(2):
            assert reference.same_bits(result[i], reference.dequantize(stack[i], state))

    def test_torch_function_modes(self, kernel, make_layer):
        """A mode of the user's own sees its functions and does not break the call."""
        from torch.overrides import TorchFunctionMode

        class Watch(TorchFunctionMode):
            def __torch_function__(self, function, types, args=(), kwargs=None):
                return function(*args, **(kwargs or {}))

        layer = make_layer(64, 96, torch.float16)
        with Watch():
            for _ in range(2):
                assert exact(kernel.your_dequantize_nf4(layer), layer)


class TestProcesses:
    def test_worker_processes(self):
        """In a process that has not used CUDA yet, as data loaders and launchers start theirs."""
        code = """
            import multiprocessing
            from helpers import machine
            machine.prepare()
            import torch
            torch.set_num_threads(1)

            def worker(queue):  # nothing here has touched CUDA yet, bitsandbytes' import would
                from helpers.nf4 import kernel
                from helpers.nf4 import layers, reference

                device = "cuda" if machine.has_gpu() else "cpu"
                layer = layers.quantized_layer(64, 96, torch.float16, device=device)
                expected = reference.dequantize(layer.weight, layer.weight.quant_state)
                results = [kernel.your_dequantize_nf4(layer) for _ in range(2)]
                same = all(reference.same_bits(result, expected) for result in results)
                queue.put("exact" if same else "wrong")

            if __name__ == "__main__":
                for method in ("fork", "spawn"):
                    context = multiprocessing.get_context(method)
                    queue = context.Queue()
                    process = context.Process(target=worker, args=(queue,))
                    process.start()
                    said = queue.get(timeout=120)
                    process.join(60)
                    print(method, "said", said, "and ended with", process.exitcode)
        """
        # Without NVML torch would count GPUs by starting CUDA, which does not survive a fork.
        done = run_script(code, PYTORCH_NVML_BASED_CUDA_CHECK="1")
        expected = [f"{method} said exact and ended with 0" for method in ("fork", "spawn")]
        assert done.stdout.splitlines() == expected, done.stdout + done.stderr

    @ON_GPU
    def test_a_fork_after_cuda_was_used_is_an_error_and_no_wrong_result(self, kernel, make_layer):
        """CUDA does not survive a fork. The child must hear it, whether or not a plan exists."""
        if not hasattr(os, "fork"):
            pytest.skip("no fork on this system")
        layer = make_layer(64, 96, torch.float16)
        kernel.your_dequantize_nf4(layer), kernel.your_dequantize_nf4(layer)
        torch.cuda.synchronize()
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        process = context.Process(target=forked, args=(queue, kernel, layer), daemon=True)
        process.start()
        answer = queue.get(timeout=30)
        process.join(10)
        assert answer.startswith("refused"), answer
        assert exact(kernel.your_dequantize_nf4(layer), layer), "the parent goes on"


def forked(queue, kernel, layer):
    try:
        result = kernel.your_dequantize_nf4(layer)
        queue.put(f"returned {result.shape}")
    except Exception as error:
        queue.put(f"refused: {type(error).__name__}: {error}")


def run_script(code, **variables):
    """Run Python code as a script of its own, with the repository on its path."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "script.py")
        with open(path, "w") as file:
            file.write(textwrap.dedent(code))
        variables["PYTHONPATH"] = os.pathsep.join([str(machine.ROOT), *sys.path])
        return subprocess.run(
            [sys.executable, path],
            capture_output=True,
            text=True,
            cwd=machine.ROOT,
            env={**os.environ, **variables},
        )


@ON_GPU
class TestGraphs:
    @pytest.mark.parametrize("warm", [1, 3])
    @pytest.mark.parametrize("dtype", HALF)
    def test_capture_and_replay_with_new_weights(self, kernel, make_layer, dtype, warm):
        """One graph over three layers; contents copied into place are decoded at the next replay."""
        made = [make_layer(512, 256 * (i + 1), dtype, seed=i) for i in range(3)]
        for _ in range(warm):
            for layer in made:
                kernel.your_dequantize_nf4(layer)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = [kernel.your_dequantize_nf4(layer) for layer in made]
        for seed in (10, 20):
            for result in results:
                result.fill_(float("nan"))
            for i, layer in enumerate(made):
                other = make_layer(512, 256 * (i + 1), dtype, seed=seed + i)
                state, source = layer.weight.quant_state, other.weight.quant_state
                layer.weight.data.copy_(other.weight.data)
                state.absmax.copy_(source.absmax)
                state.state2.absmax.copy_(source.state2.absmax)
                state.offset.copy_(source.offset)
            graph.replay()
            torch.cuda.synchronize()
            assert all(exact(result, layer) for result, layer in zip(results, made, strict=True))

    def test_make_graphed_callables(self, kernel, make_layer):
        module = Projection(kernel, make_layer(64, 96, torch.float16))
        x = torch.randn(4, 64, dtype=torch.float16, device="cuda", requires_grad=True)
        expected = module(x)
        graphed = torch.cuda.make_graphed_callables(lambda x: module(x), (x.detach().requires_grad_(),))
        torch.testing.assert_close(graphed(x), expected)

    def test_blocking_launches(self):
        code = """
            import torch
            from helpers.nf4 import kernel
            from helpers.nf4 import layers, reference
            layer = layers.quantized_layer(64, 96, torch.float16, device="cuda")
            expected = reference.dequantize(layer.weight, layer.weight.quant_state)
            print([reference.same_bits(kernel.your_dequantize_nf4(layer), expected) for _ in range(3)])
        """
        done = run_script(code, CUDA_LAUNCH_BLOCKING="1")
        assert "[True, True, True]" in done.stdout, done.stdout + done.stderr


@ON_GPU
class TestStreams:
    def test_the_codebook_of_a_busy_stream(self):
        """The codebook is there for every stream, however busy the stream of its first use is."""
        code = """
            import torch
            from helpers.nf4 import kernel
            from helpers.nf4 import layers, reference
            make = layers.quantized_layer
            warm, *made = [make(64, 96, torch.float16, device="cuda", seed=i) for i in range(3)]
            expected = [reference.dequantize(layer.weight, layer.weight.quant_state) for layer in made]
            kernel.your_dequantize_nf4(warm)  # compiled and loaded
            kernel.codebooks.cache_clear()
            [torch.full((128,), float("nan"), device="cuda") for _ in range(64)]  # in the memory it gets anew
            torch.cuda.synchronize()
            busy, free = torch.cuda.Stream(), torch.cuda.Stream()
            with torch.cuda.stream(busy):
                torch.cuda._sleep(4_000_000_000)
                first = kernel.your_dequantize_nf4(made[0])
            with torch.cuda.stream(free):
                second = kernel.your_dequantize_nf4(made[1])
                free.synchronize()
                print("second while busy", not busy.query())
            same = [reference.same_bits(*pair) for pair in zip((first, second), expected)]
            print("same", same)
        """
        done = run_script(code)
        assert "second while busy True" in done.stdout and "same [True, True]" in done.stdout, (
            done.stdout + done.stderr
        )

    def test_the_first_call_of_a_process_inside_a_capture(self):
        code = """
            import torch
            from helpers.nf4 import kernel
            from helpers.nf4 import layers
            layer = layers.quantized_layer(64, 96, torch.float16, device="cuda")
            try:
                with torch.cuda.graph(torch.cuda.CUDAGraph()):
                    kernel.your_dequantize_nf4(layer)
            except RuntimeError as error:
                print("refused:", error)
        """
        done = run_script(code)
        assert "refused: the first call on a GPU came inside a graph capture" in done.stdout, done.stderr

    def test_launched_on_the_current_stream(self, kernel, make_layer):
        """A weight written on a side stream after a long wait there: only work on that stream sees it."""
        layer = make_layer(2048, 2048, torch.float16)
        other = make_layer(2048, 2048, torch.float16, seed=9).weight.data
        kernel.your_dequantize_nf4(layer), kernel.your_dequantize_nf4(layer)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        for _ in range(3):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(50_000_000)
                layer.weight.data.copy_(other)
                result = kernel.your_dequantize_nf4(layer)
            stream.synchronize()
            assert exact(result, layer)
            other = 255 - other
            torch.cuda.synchronize()

    def test_concurrent_streams(self, kernel, make_layer):
        made = [make_layer(1024, 512, torch.bfloat16, seed=i) for i in range(4)]
        streams = [torch.cuda.Stream() for _ in made]
        torch.cuda.synchronize()
        results = [[] for _ in made]
        for _ in range(50):
            for layer, stream, found in zip(made, streams, results, strict=True):
                with torch.cuda.stream(stream):
                    found.append(kernel.your_dequantize_nf4(layer))
        torch.cuda.synchronize()
        for layer, found in zip(made, results, strict=True):
            expected = oracle(layer)
            assert all(reference.same_bits(result, expected) for result in found)

    def test_the_compiled_operator_on_a_side_stream(self, kernel, make_layer):
        torch._dynamo.reset()
        layer = make_layer(2048, 2048, torch.float16)
        compiled = torch.compile(kernel.your_dequantize_nf4, fullgraph=True)
        compiled(layer), compiled(layer)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            layer.weight.data.bitwise_xor_(255)
            result = compiled(layer)
        stream.synchronize()
        assert exact(result, layer)


@ON_GPU
class TestThreads:
    @pytest.mark.parametrize("shared", [True, False], ids=["one layer", "many layers"])
    def test_eight_threads(self, kernel, make_layer, shared):
        """First calls and plans raced by eight threads, each on its own stream."""
        count = 8
        made = [make_layer(512, 256, torch.bfloat16, seed=0 if shared else i) for i in range(count)]
        if shared:
            made = made[:1] * count
        expected = [oracle(layer) for layer in made]
        torch.cuda.synchronize()
        faults, start = [], threading.Barrier(count)

        def call(i):
            try:
                start.wait()
                with torch.cuda.stream(torch.cuda.Stream()):
                    results = [kernel.your_dequantize_nf4(made[i]) for _ in range(100)]
                    torch.cuda.current_stream().synchronize()
                    if not all(reference.same_bits(result, expected[i]) for result in results):
                        faults.append(f"thread {i}: wrong bits")
            except Exception as error:
                faults.append(f"thread {i}: {error!r}")

        threads = [threading.Thread(target=call, args=(i,)) for i in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not faults, faults


@ON_GPU
class TestTwoGPUs:
    @pytest.fixture(autouse=True)
    def two(self):
        if torch.cuda.device_count() < 2:
            pytest.skip(f"needs two GPUs, found {torch.cuda.device_count()}")

    @pytest.mark.parametrize("current", [0, 1])
    def test_runs_where_the_tensors_are(self, kernel, make_layer, current):
        made = [make_layer(512, 256, torch.bfloat16, device=f"cuda:{i}", seed=i) for i in range(2)]
        with torch.cuda.device(current):
            for _ in range(3):
                for i, layer in enumerate(made):
                    result = kernel.your_dequantize_nf4(layer)
                    assert result.device == torch.device("cuda", i) and exact(result, layer)
            assert torch.cuda.current_device() == current

    def test_compiled_on_the_other_device(self, kernel, make_layer):
        torch._dynamo.reset()
        compiled = torch.compile(kernel.your_dequantize_nf4, fullgraph=True)
        for i in (1, 0, 1):
            layer = make_layer(64, 96, torch.float16, device=f"cuda:{i}", seed=i)
            assert exact(compiled(layer), layer)

    def test_moved_between_devices(self, kernel, make_layer):
        layer = make_layer(64, 96, torch.float16, device="cuda:0")
        for device in ("cuda:1", "cuda:0", "cuda:1"):
            layer = layer.to(device)
            for _ in range(2):
                assert exact(kernel.your_dequantize_nf4(layer), layer)

    def test_a_state_left_on_the_other_device(self, kernel, make_layer):
        layer = make_layer(64, 96, torch.float16, device="cuda:0")
        kernel.your_dequantize_nf4(layer)
        layer.weight.quant_state.absmax = layer.weight.quant_state.absmax.to("cuda:1")
        with pytest.raises(kernel.UnsupportedState, match="absmax is on cuda:1"):
            kernel.your_dequantize_nf4(layer)
