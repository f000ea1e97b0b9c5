"""torch's analysis of the kernels, and exported programs. Run as a program, this file prints the analysis."""

import json
from types import SimpleNamespace

import pytest
import torch

import processes
from nf4_triton.core import launch, launch_general, settings
from nf4_triton.core.checks import check_state
from nf4_triton.core.reference import same_bits
from nf4_triton.core.state import Selection, read_state
from states import oracle, random_state

# Arguments of random_state, and of settings.force.
VARIANTS = {
    "puzzle": ({}, {"asm": False}),
    "puzzle, T4": ({"dtype": torch.bfloat16}, {**settings.T4, "asm": True}),
    "bytes": ({"shape": (65, 1), "nested": False}, {"asm": False}),
    "T4": ({"quant_type": "fp4"}, {**settings.T4, "asm": True}),
    "ids": ({}, {"asm": True}),
}


def written(name, layout, forced):
    """Return the names of the tensors that, according to torch.compile, the kernel writes."""
    from torch._higher_order_ops import triton_kernel_wrap

    layout = {"shape": (64, 64), "dtype": torch.float16, "device": "cpu", **layout}
    weight = read_state(*random_state(**layout))
    out = torch.empty(layout["shape"], dtype=layout["dtype"])
    with settings.force(**forced):
        if name.startswith("puzzle"):
            kernel = launch._your_dequantize_nf4_kernel
            _, pointers, after, _ = launch.prepare(*weight, out)
        else:
            kernel = launch_general._dequantize_general_kernel
            selection = Selection(torch.tensor([3, 1]), 0, 2) if name == "ids" else None
            sizes = check_state(*weight)
            _, pointers, after, _ = launch_general.prepare(*weight, sizes, out, selection)
    named = dict(zip(kernel.arg_names, pointers + after, strict=True))
    assert type(named["n"]) is int
    analyze = getattr(triton_kernel_wrap, "identify_accessed_tensors", None)
    if analyze:
        return sorted(dep.name for dep in analyze(kernel, named, {}).read_writes.writes)
    return sorted(triton_kernel_wrap.identify_mutated_tensors(kernel, named, {}))


def main():
    import triton
    from triton.backends.compiler import GPUTarget

    driver = SimpleNamespace(  # the analysis compiles to Triton's IR: no GPU is needed
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    triton.runtime.driver.set_active(driver)
    print(json.dumps({name: written(name, *variant) for name, variant in VARIANTS.items()}))


def test_only_the_result_is_written():
    """torch.compile would copy an input that it treats as written."""
    done = processes.python([__file__], variables={"TRITON_INTERPRET": None})
    assert json.loads(done.out.splitlines()[-1]) == dict.fromkeys(VARIANTS, ["out_ptr"]), done.err


class Both(torch.nn.ModuleList):
    """An nf4 and an fp4 layer."""

    def forward(self, x):
        nf4, fp4 = self
        other = launch_general.dequantize_weight(fp4.weight, fp4.quant_state)
        return x + 1, launch.your_dequantize_nf4(nf4), other


@pytest.mark.parametrize("strict", [True, False])
def test_export_saved_and_loaded(make_layer, device, tmp_path, strict):
    """The graph has an operator for each layer, each with its own code."""
    made = [make_layer(64, 96, torch.float16, quant_type=name) for name in ("nf4", "fp4")]
    for layer in made:  # as bitsandbytes does for a Linear4bit with its first weight
        layer.quant_state = layer.weight.quant_state
    module, x = Both(made), torch.ones(2, device=device)
    path = tmp_path / "both.pt2"
    expected = [oracle(one.weight, one.quant_state) for one in made]
    exported = torch.export.export(module, (x,), strict=strict)
    assert sum("nf4_triton" in str(node.target) for node in exported.graph.nodes) == 2
    torch.export.save(exported, path)  # moves the layers' states to the CPU
    with torch.no_grad():
        results = torch.export.load(path).module()(x)
    assert all(map(same_bits, results[1:], expected))


if __name__ == "__main__":
    main()
