"""Private names of torch and Triton, each with its purpose. Two more are used elsewhere:
nn.Module._parameters (launch.py, backend.py) and os.environ._data (backend.py)."""
# ruff: noqa: E402, I001
# %% tags=["module-only"]
import torch

# %% Private names of torch and Triton id="private" folded=true
try:
    # Compares several tensors with others in one C++ call; allocates without the dispatcher's Python part.
    from torch._C._dynamo.guards import TensorGuards, _empty_strided_cuda as empty_cuda
    # Inside this context, Params4bit's methods skip the Python path through __torch_function__.
    from torch._C import DisableTorchFunctionSubclass as plain_tensors
    # A cached launch would hide a call from dispatch modes, functorch's transforms, tracers with fake
    # tensors, and Dynamo. While a frame that failed to compile runs (bf16 on a T4), Dynamo still traces the
    # functions that the frame calls, and its callback is set.
    from torch._C import _len_torch_dispatch_stack as dispatch_modes
    from torch._ops import _len_torch_dispatch_stack_pre_dispatch as pre_dispatch_modes  # of make_fx
    from torch._C._functorch import peek_interpreter_stack as transforms
    from torch._subclasses.fake_tensor import is_fake
    from torch._C._dynamo.eval_frame import get_eval_frame_callback as dynamo_callback
    GUARDED = True
except ImportError:  # then every call goes through the operator, and no launch is cached
    from contextlib import nullcontext as plain_tensors
    TensorGuards = empty_cuda = dispatch_modes = transforms = dynamo_callback = None
    GUARDED = False

    def is_fake(tensor):
        return type(tensor).__name__ in ("FakeTensor", "FunctionalTensor")

try:  # the stream's handle without a Stream object; the device without a check that CUDA is initialized
    from torch._C import _cuda_getCurrentRawStream as current_stream, _cuda_getDevice as current_device
except ImportError:  # torch without CUDA: no launch is cached
    current_stream = current_device = None

is_compiling = torch.compiler.is_dynamo_compiling  # public


def in_transform():
    """Return whether a functorch transform such as vmap is active."""
    return transforms is None or transforms() is not None


def is_traced(weight):
    """Return whether torch traces, transforms, or watches this call."""
    return bool(is_compiling() or not GUARDED or dynamo_callback() is not None or dispatch_modes()
                or pre_dispatch_modes() or in_transform() or torch.jit.is_tracing() or is_fake(weight))


def launcher(compiled, triton_version):
    """Return (run, before) of a CompiledKernel: run(grid, 1, 1, stream, *before, *arguments) launches it, and
    calls no profiler's hooks."""
    run, before = compiled.run, (compiled.function, compiled.packed_metadata, None, None, None)
    if triton_version in ((3, 5), (3, 6)) and not (run.global_scratch_size or run.profile_scratch_size):
        # Skips the Python part: no cooperative or dependent launch, no scratch memory.
        function, *rest = before
        return run.launch, (function, 0, 0, None, None, *rest)
    return run, before


def address_of(tensor):
    """Return a tensor's address in bytes; for a fake tensor, its offset in its storage. Compiled code relies
    on this alignment. Inductor copies an input that is later not aligned to 16 bytes, except an nn.Parameter,
    which must not move to such an address."""
    return tensor.storage_offset() * tensor.itemsize if is_fake(tensor) else tensor.data_ptr()


# %% tags=["module-only"]
def has_memory(tensor):
    """Return whether a tensor has its storage. FSDP frees a gathered weight by resizing the storage to 0:
    then the address is the offset in bytes."""
    try:
        return tensor.numel() == 0 or tensor.data_ptr() != tensor.storage_offset() * tensor.itemsize
    except RuntimeError:  # a wrapper such as a DTensor has no storage
        return False
