"""No access out of bounds: every tensor ends where a page without access begins, so that one would be fatal.

Triton's interpreter reads and writes at real addresses, in a process of its own.
"""

import processes

CODE = """
import ctypes, math, mmap, sys
from unittest import mock
from helpers import machine; machine.prepare()
import torch
from nf4_triton import dequantize
from nf4_triton.core import launch_general, reference
sys.path.append("tests/nf4_triton")
import states

PAGE, libc, kept = mmap.PAGESIZE, ctypes.CDLL(None, use_errno=True), []

def at_the_end(x):
    '''Return a copy that ends where a page without access begins.'''
    pages = -(-max(x.nbytes, 1) // PAGE)
    memory = mmap.mmap(-1, (pages + 1) * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert libc.mprotect(ctypes.c_void_p(start + pages * PAGE), PAGE, 0) == 0  # PROT_NONE
    kept.append(memory)
    where = (ctypes.c_uint8 * x.nbytes).from_address(start + pages * PAGE - x.nbytes)
    return torch.frombuffer(where, dtype=torch.uint8).view(x.dtype).view(x.shape).copy_(x) if x.nbytes else x

def empty(shape, dtype, device):
    '''Return memory full of NaN for a result.'''
    return at_the_end(torch.full(shape, math.nan, dtype=dtype))

SHAPES = [(64, 64), (3, 64), (33, 1), (1, 7), (40, 24), (5, 1000), (2049, 1)]
for shape in SHAPES:
    for options in ({}, {"nested": False}, {"quant_type": "fp4", "blocksize": 8}, {"blocksize": 4096}):
        weight, state = states.random_state(shape, torch.bfloat16, **options)
        expected = states.oracle(weight, state)
        weight, state.absmax = at_the_end(weight), at_the_end(state.absmax)
        if state.nested:
            state.offset = at_the_end(state.offset)
            state.state2.absmax, state.state2.code = map(at_the_end, (state.state2.absmax, state.state2.code))
        # Without `out` the puzzle's kernel, where it fits; with it the general one.
        for out in (None, empty(shape, state.dtype, "cpu")):
            with mock.patch.object(torch, "empty", empty):
                result = launch_general.dequantize_weight(weight, state, out)
            assert reference.same_bits(result, expected), (shape, options)
        if shape[1] % 8:
            continue
        ids = at_the_end(torch.tensor([shape[0] - 1, 0]))
        for rows, chosen in ((ids, ids), (slice(1, shape[0]), slice(1, None))):
            out = empty(expected[chosen].shape, state.dtype, "cpu")
            dequantize(weight, state, out, rows=rows)
            assert reference.same_bits(out, expected[chosen]), (shape, options, rows)
print("nothing out of bounds")
"""


def test_nothing_is_read_or_written_out_of_bounds():
    """A broken mask ends the process by SIGSEGV."""
    done = processes.python(["-c", CODE], variables={"TRITON_INTERPRET": "1"})
    assert done.out.endswith("nothing out of bounds\n")
