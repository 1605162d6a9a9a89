"""Times beside cuDNN, backward only, in the same run. Argument: the head dimension, 64 or 128."""

import sys

import torch
from kernel import Backward
from torch.nn.attention import SDPBackend, sdpa_kernel

VARIANTS = {
    "base": {},
    "no convert": dict(convert=False),
    "unordered": dict(ordered=False),
    "dq unused": dict(dq_product=1),
}


def timed(fn, n=8):
    for _ in range(2):
        fn()
    torch.cuda._sleep(10_000_000)  # the host gets ahead
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(n)]
    for a, b in events:
        a.record()
        fn()
        b.record()
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in events)[n // 2]


def main(dim):
    for causal in (False, True):
        for length in (1024, 2048, 4096, 8192, 16384):
            batch, heads = 16384 // length, 2048 // dim
            q, k, v, dout = torch.randn(4, batch, heads, length, dim, device="cuda", dtype=torch.bfloat16)
            q, k, v = (x.requires_grad_() for x in (q, k, v))
            flops = 10 * batch * heads * length**2 * dim * (0.5 if causal else 1)
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
                cudnn = timed(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))
            grads = torch.autograd.grad(out, (q, k, v), dout)
            inputs = [x.detach() for x in (q, k, v)]
            with torch.no_grad():
                lse = torch.ops.aten._scaled_dot_product_flash_attention(*inputs, 0.0, causal)[1]
            text = f"D{dim} {'causal' if causal else 'none  '} {length:5d} cuDNN {flops / cudnn / 1e9:4.0f}"
            for name, options in VARIANTS.items():
                if name != "base" and length not in (1024, 4096, 16384):
                    continue
                call = Backward(*inputs, out.detach(), dout, lse.contiguous(), causal, **options)
                ms = timed(call)
                if name == "base":
                    worst = max(
                        ((a.float() - b.float()).abs().max() / b.float().abs().max()).item()
                        for a, b in zip(call(), grads)
                    )
                    text += f" | ours {flops / ms / 1e9:4.0f} = {cudnn / ms:.3f} ({ms:.3f} ms, differs {worst:.0e})"
                    call2 = Backward(*inputs, out.detach(), dout, lse.contiguous(), causal, empty=True)
                    text += f" | delta+sync {timed(call2) * 1e3:.0f} us"
                else:
                    text += f" | {name} {flops / ms / 1e9:4.0f}"
                if call.sync[1].item():
                    text += " FAILED WAITS"
                del call
            print(text, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
