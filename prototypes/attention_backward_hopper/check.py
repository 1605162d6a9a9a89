"""Correctness against float64, gradient by gradient; the same bits four times. Argument: head dimensions (64,128)."""

import sys

import torch
from kernel import Backward


def reference(q, k, v, dout, causal):
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    group = q.shape[1] // k.shape[1]
    kk, vv = (x.repeat_interleave(group, 1) for x in (k, v))
    s = q @ kk.transpose(2, 3) * q.shape[3] ** -0.5
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), float("-inf"))
    lse = s.logsumexp(-1)
    p = (s - lse[..., None]).exp()
    out = p @ vv
    dv = p.transpose(2, 3) @ dout
    ds = p * (dout @ vv.transpose(2, 3) - (dout * out).sum(-1, keepdim=True)) * q.shape[3] ** -0.5
    dq, dk = ds @ kk, ds.transpose(2, 3) @ q
    dk, dv = (x.unflatten(1, (k.shape[1], group)).sum(2) for x in (dk, dv))
    return out, lse, dq, dk, dv


def report(name, got, want, rows):
    """Largest error relative to the largest value; if large, where."""
    error = (got.double() - want).abs()
    bound = want.abs().max()
    relative = (error.max() / bound).item()
    bad = not relative < 0.02
    text = f"{name} {relative:.1e}{' BAD' if bad else ''}"
    if bad:
        per = [f"{(e.max() / bound).item():.1e}" for e in error.flatten(0, 1).split(rows, 1)]
        ratio = (got.double() / want).flatten()
        columns = error.flatten(0, 2).amax(0).split(8)
        per_columns = [f"{(c.max() / bound).item():.0e}" for c in columns]
        text += f"\n    per {rows} rows {per[:16]}\n    per 8 columns {per_columns}"
        text += f"\n    median ratio {ratio.nanmedian().item():.4f}, nan {got.isnan().sum().item()} of {got.numel()}"
        text += f"\n    got  {got.flatten()[:6].tolist()}\n    want {want.flatten()[:6].tolist()}"
    return text, bad


def case(batch, heads, kv_heads, length, dim, causal, **given):
    torch.manual_seed(0)
    q, dout = (torch.randn(batch, heads, length, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(batch, kv_heads, length, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out, lse, dq, dk, dv = reference(q, k, v, dout, causal)
    call = Backward(q, k, v, out.bfloat16(), dout, lse.float(), causal, **given)
    for x in (call.dq, call.dk, call.dv):
        x.fill_(float("nan"))
    call()
    torch.cuda.synchronize()
    first = [x.clone() for x in (call.dq, call.dk, call.dv)]
    lines = []
    failures = call.sync[1].item()
    delta = (dout.double() * out.bfloat16().double()).sum(-1)
    m = call.stats.shape[1] // 2
    kept = call.stats.view(batch, heads, -1, 2, m)[:, :, :, 1].flatten(2)[:, :, :length]
    text, wrong = report("delta", kept[..., None], delta[..., None], m)
    lines.append(text)
    for name, got, want in zip(("dv", "dk", "dq"), (first[2], first[1], first[0]), (dv, dk, dq)):
        if name == "dq" and given.get("dq_product", 2) < 2:
            continue
        text, bad = report(name, got, want, 128 if name != "dq" else m)
        wrong |= bad
        lines.append(text)
    same = True
    for _ in range(3):
        call()
        torch.cuda.synchronize()
        same &= all(torch.equal(a, b) for a, b in zip(first, (call.dq, call.dk, call.dv)) if not a.isnan().any())
    clean = not call.turns.any().item()
    label = f"B{batch} H{heads}/{kv_heads} S{length} D{dim} {'causal' if causal else 'none'} {given}"
    print(
        label,
        "|",
        "; ".join(lines),
        "| same bits",
        same,
        "| counters clean",
        clean,
        "| failures",
        failures,
        call.sync[1].item(),
        flush=True,
    )
    return not wrong and same and clean and not failures


if __name__ == "__main__":
    results = []
    for dim in map(int, sys.argv[1].split(",")):
        for causal in (False, True):
            results.append(case(1, 1, 1, 128, dim, causal, dq_product=0))
            results.append(case(1, 1, 1, 128, dim, causal))
            results.append(case(1, 2, 2, 256, dim, causal))
            results.append(case(1, 1, 1, 512, dim, causal))
            results.append(case(2, 4, 4, 1024, dim, causal))
            results.append(case(1, 4, 2, 1000, dim, causal))
            results.append(case(3, 16, 16, 1024, dim, causal))
            results.append(case(1, 3, 1, 2944, dim, causal))
    print("ALL RIGHT" if all(results) else f"WRONG: {results.count(False)} of {len(results)}", flush=True)
    sys.exit(0 if all(results) else 1)
