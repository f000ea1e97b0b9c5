"""Two kernels by three launches, and whole functions, timed in turns; the sections are notebook cells."""

# ruff: noqa: E402, I001
# %% tags=["module-only"]
from time import perf_counter

from helpers.names import FUNCTIONS, KERNELS, LAUNCHES
from helpers.puzzle.layers import CONFIGS, build, layers_of
from helpers.puzzle.protocol import (
    baselines,
    needed,
    own_dequantize_4bit,
    synchronize,
    time_rounds,
    wrong_elements,
)
from nf4_triton.core.kernel import TRITON, _your_dequantize_nf4_kernel
from nf4_triton.core.launch import has_hooks, prepare, read
from nf4_triton.core.private import (
    TensorGuards,
    current_device,
    current_stream,
    empty_cuda,
    launcher,
    plain_tensors,
)


# %% id="launches"
def kept_launch(kernel, grid, pointers, numbers, constexprs, options):
    """Return pointers -> launch, as in section 2: compare the tensors, then run the compiled kernel."""
    compiled = kernel[grid](*pointers, *numbers, **constexprs, **options)
    run, before = launcher(compiled, TRITON)
    sizes, strides = [list(x.shape) for x in pointers], [list(x.stride()) for x in pointers]
    same = TensorGuards(*pointers, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    device, after = current_device(), (*numbers, *constexprs.values())

    def launch(pointers):
        addresses = [x.data_ptr() for x in pointers]
        assert same(*pointers) and device == current_device() and not has_hooks() and not addresses[0] % 16
        run(grid[0], 1, 1, current_stream(device), *before, *addresses, *after)

    return launch


def unsloths_launch(kernel, grid, pointers, numbers, constexprs, options):
    from unsloth.kernels.triton_launch import launch

    count, device = len(pointers), current_device()
    return lambda pointers: launch(kernel, grid, (*pointers, *numbers), count, constexprs, device, **options)


def kernel_grid(kernel, grid, pointers, numbers, constexprs, options):
    return lambda pointers: kernel[grid](*pointers, *numbers, **constexprs, **options)


def dequantize_by(kernel_of, launch_of):
    """Return layer -> weight. All six read the layer, look up its layout, and allocate in the same way."""
    known = {}  # {layout: what its first layer needed}

    def dequantize(layer):
        weight = layer._parameters["weight"]
        state = weight.quant_state
        tensors, layout = read(weight, state)
        with plain_tensors():
            if layout not in known:
                kernel, grid, order, *rest = kernel_of(layer)
                like = tuple(state.shape), (state.shape[1], 1), state.dtype
                pointers = order((*tensors, state.code, empty_cuda(*like)))
                known[layout] = order, like, launch_of(kernel, grid, pointers, *rest)
            order, like, launch = known[layout]
            result = empty_cuda(*like)
            launch(order((*tensors, state.code, result)))
        return result

    return dequantize


# %% Two kernels, times in turns id="turns" folded=true call="times = attempt(time_all, your_dequantize_nf4)"
import itertools
import operator
from unittest import mock


def own_libraries():
    """Inside this block PEFT calls bitsandbytes' own function, not Unsloth's wrapper."""
    return mock.patch("bitsandbytes.functional.dequantize_4bit", own_dequantize_4bit())


def our_kernel(layer):
    """Return the kernel, its grid, the order of its pointers, its numbers, constexprs, and options."""
    grid, arguments, options = prepare(*read(layer.weight.data, layer.weight.quant_state), None)
    kernel = _your_dequantize_nf4_kernel
    constexprs = dict(zip(kernel.arg_names[7:], arguments[7:], strict=True))
    order = operator.itemgetter(0, 6, 1, 2, 3, 4)  # weight, result, absmax, code2, absmax2, offset
    return kernel, (grid,), order, arguments[6:7], constexprs, options


def unsloths_kernel(layer):
    """Return the same six for Unsloth's kernel. Its fast_dequantize passes them to launch()."""
    from unsloth.kernels import nf4

    with mock.patch.object(nf4, "launch") as launch:
        baselines()["unsloth_today"].fn(layer)
    given = launch.call_args.args if launch.called else ()
    assert len(given) == 6, "Unsloth calls no launch(kernel, grid, arguments, pointers, constexprs, device)"
    kernel, grid, arguments, count, constexprs, _ = given
    order = operator.itemgetter(*range(count))  # weight, absmax, code2, absmax2, offset, code, result
    return kernel, grid, order, arguments[count:], constexprs, launch.call_args.kwargs


def us_and_seconds(mlps, fx):
    """Return the microseconds until a call returns, and the seconds of 100 rounds of the puzzle's test."""
    seconds = 0
    for mlp, X in mlps:
        assert not any(wrong_elements(fx, layer) for layer in layers_of(mlp)), "wrong bits"
        seconds += time_rounds(X, mlp, fx, 100)[0]
    layer = mlps[1][0].up_proj  # 4096x1024 in bf16
    start = perf_counter()
    for _ in range(100):
        fx(layer)
    us = 1e4 * (perf_counter() - start)
    synchronize()
    return us, seconds


def in_turns(contenders, mlps, turns=5):
    """Return {name: us_and_seconds() of each turn}, without the contenders that fail."""
    times = {name: [] for name in contenders}
    for _, name in itertools.product(range(turns), contenders):
        if name in times:
            try:
                times[name].append(us_and_seconds(mlps, contenders[name]))
                assert not needed(name), f"needs {needed(name)}"
            except Exception as error:
                text = f"{type(error).__name__}: {str(error).strip()[:200]}"
                print(f"{FUNCTIONS.get(name, name)}: not measured ({text})")
                del times[name]
    return times


def time_all(candidate):
    """Time two kernels by three launches, and whole functions; print and draw the medians."""
    import pandas

    contenders = {"ours": candidate} | {name: one.fn for name, one in baselines().items() if one.fn}
    kernels = zip(KERNELS, (our_kernel, unsloths_kernel), strict=True)
    launches = zip(LAUNCHES, (kept_launch, unsloths_launch, kernel_grid), strict=True)
    six = {}
    for (kernel, kernel_of), (launch, launch_of) in itertools.product(kernels, launches):
        six[f"{kernel}, {launch}"] = dequantize_by(kernel_of, launch_of)
    with own_libraries():
        times = in_turns(contenders | six, [build(config) for config in CONFIGS])
    medians = {name: pandas.DataFrame(turns, columns=["us", "s"]).median() for name, turns in times.items()}
    frame = pandas.DataFrame(medians).T.rename(FUNCTIONS).sort_values("s", ascending=False)
    text = frame.apply("{0.us:.1f} us, {0.s:.4f} s".format, axis=1)
    table = text.reindex([*six], fill_value="not measured").to_numpy().reshape(2, 3)
    print("us until a call returns (4096x1024 in bf16), and s of 100 rounds of the puzzle's test:\n")
    print(pandas.DataFrame(table, KERNELS, LAUNCHES).to_string())
    colors = ["#0B63CE" if name.startswith(("this", "your")) else "#9AA4AF" for name in frame.index]
    title = "Seconds of 100 rounds (bars), and us until a call returns; this kernel in blue"
    axes = frame["s"].plot.barh(figsize=(9, 3.4), color=colors, title=title)
    axes.bar_label(axes.containers[0], text, padding=4)
    axes.margins(x=0.3)
    return times
