"""Every private name of torch that the package uses, what it saves or costs, what replaces it.

Times were measured on a slow host of an H200, where a call takes 15 us. Triton's are in replay.py.
"""
# ruff: noqa: E402, I001
# %% tags=["module-only"]
# %% Private names of torch id="private" part="private" folded=true tags=["launch"]
import contextlib
import operator

import torch


def private(root, path, public=None):
    """Return a private attribute of torch, or `public` if it is missing."""
    try:
        return operator.attrgetter(path)(root)
    except AttributeError:
        return public


# For speed.
# Costs 0.5 us for five tensors: compares type, dispatch keys, dtype, device, sizes, and strides.
TensorGuards = private(torch._C, "_dynamo.guards.TensorGuards")
# Saves 2.9 us over torch.empty_strided. Inductor's generated code allocates with it too.
empty_cuda = private(
    torch._C, "_dynamo.guards._empty_strided_cuda",
    lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device="cuda"))
# Saves 1.6 us: Params4bit sends every tensor method through a Python __torch_function__.
plain_tensors = private(torch._C, "DisableTorchFunctionSubclass", contextlib.nullcontext)
# Saves 4.2 us: the stream's handle without a Stream object.
current_stream = private(torch._C, "_cuda_getCurrentRawStream",
                         lambda index: torch.cuda.current_stream(index).cuda_stream)
# Saves 0.5 us: does not check that CUDA is initialized.
current_device = private(torch._C, "_cuda_getDevice", torch.cuda.current_device)

# For correctness: who else must see a call. Without one of these names every call goes through
# the operator, and no launch is replayed.
dispatch_modes = private(torch._C, "_len_torch_dispatch_stack")
transforms = private(torch._C, "_functorch.peek_interpreter_stack")
is_fake = private(torch, "_subclasses.fake_tensor.is_fake")
# Returns a callback while Dynamo runs a frame that it could not compile (bf16 on a T4). Dynamo
# still traces the functions that this frame calls.
dynamo_callback = private(torch._C, "_dynamo.eval_frame.get_eval_frame_callback")
GUARDED = None not in (dispatch_modes, transforms, is_fake, dynamo_callback)
if is_fake is None:  # the operator must know tracers' tensors all the same

    def is_fake(tensor):
        return type(tensor).__name__ in ("FakeTensor", "FunctionalTensor")


is_compiling = torch.compiler.is_dynamo_compiling  # public


def in_transform():
    """Return whether a functorch transform such as vmap is active."""
    return transforms is None or transforms() is not None


def is_traced(weight):
    """Return whether torch traces, transforms, or watches this call."""
    if is_compiling() or not GUARDED:
        return True
    return bool(dynamo_callback() is not None or dispatch_modes() or in_transform()
                or torch.jit.is_tracing() or is_fake(weight))
