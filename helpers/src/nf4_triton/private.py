"""Private names of torch and Triton: what each is for, what replaces it. One more is where it is used:
nn.Module._parameters, in launch.py."""
# ruff: noqa: E402, I001
# %% tags=["module-only"]
# %% Private names of torch and Triton id="private" part="private" folded=true tags=["launch"]
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
TensorGuards = private(torch._C, "_dynamo.guards.TensorGuards")  # compares tensors in one C++ call
# Allocates without the dispatcher's Python part.
empty_cuda = private(torch._C, "_dynamo.guards._empty_strided_cuda",
                     lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device="cuda"))
# Params4bit's methods take their Python path through __torch_function__; not inside of this.
plain_tensors = private(torch._C, "DisableTorchFunctionSubclass", contextlib.nullcontext)
# The stream's handle without a Stream object.
current_stream = private(torch._C, "_cuda_getCurrentRawStream",
                         lambda index: torch.cuda.current_stream(index).cuda_stream)
# Does not check that CUDA is initialized.
current_device = private(torch._C, "_cuda_getDevice", torch.cuda.current_device)

# For correctness: who else must see a call. Without one of these names every call goes through
# the operator, and no launch is kept.
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


def launcher(compiled, triton_version):
    """Return what launches a CompiledKernel of Triton again, and its arguments before the kernel's own:
    run(grid, 1, 1, stream, *before, *arguments). No hooks of profilers."""
    run, before = compiled.run, (compiled.function, compiled.packed_metadata, None, None, None)
    if triton_version in ((3, 5), (3, 6)) and not (run.global_scratch_size or run.profile_scratch_size):
        # Without the Python part: no cooperative or dependent launch, no scratch memory.
        function, *rest = before
        return run.launch, (function, 0, 0, None, None, *rest)
    return run, before


def address_of(tensor):
    """Return a tensor's address, or a fake tensor's offset in its storage, in bytes. Inductor copies an input
    that was 16-byte aligned when it was traced and is not at run time, but no nn.Parameter, whose
    storage must not move to such an address."""
    return tensor.storage_offset() * tensor.itemsize if is_fake(tensor) else tensor.data_ptr()


def has_memory(tensor):
    """Return whether a tensor has its storage. FSDP frees a gathered weight by resizing its storage to 0:
    its address is then its offset in bytes."""
    try:
        return tensor.numel() == 0 or tensor.data_ptr() != tensor.storage_offset() * tensor.itemsize
    except RuntimeError:  # a wrapper such as a DTensor has no storage
        return False
