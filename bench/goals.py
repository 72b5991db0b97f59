"""What is wanted of decode, of layers, of append and of latent attention on a GPU, and what recorded rows say of it:
the columns of figures in docs/kernels/decode-goals.md and latent-measured.md, which bench/document_gpu.py writes."""

from recorded import mark, name, share, us

WANTED = {"bf16": (88, 95, 97), "fp8": (79, 92, 95), "int8-head": (79, 92, 95), "int4-g32": (72, 88, 91),
          "int4-row": (69, 86, 90)}  # share of the ceiling at batch 32, 128, 512
WANTED_DRAFTS = {"fp8": 27, "int8-head": 29, "int4-g32": 29}  # us of 48 packed rows


def latent_call(kind, form, heads, batch, q_len, keys, chain=1):
    """Which rows are of a call over latent caches; `keys`: listed ones, or all of a request."""
    return lambda r: (r["kind"], name(r), r["q_heads"], r["batch"], r["q_len"], r["top_k"] or r["context"],
                      r.get("chain", 1), bool(r.get("extra_top_k"))) == (
                          kind, form, heads, batch, q_len, keys, chain, False)


def latent_goals():
    """Work, as the first column of docs/kernels/latent-measured.md has it -> its calls, and what is wanted of each: at
    most so many us, at least a share of a gather or of a copy, or ("of bf16") at most a share of bf16's time."""
    lists = lambda heads, batch, q_len, keys=2048, chain=1: latent_call(
        "sparse_decode", "fp8-g128-f32", heads, batch, q_len, keys, chain)
    dense = lambda form, heads, keys: latent_call("dense_decode", form, heads, 128, 1, keys)
    append = lambda batch, q_len: latent_call("append", "fp8-g128-f32", 128, batch, q_len, 8192)
    goals = {
        "128 heads, lists": [("us", 278.1, lists(128, 128, 2)), ("us", 2068, lists(128, 128, 2, 16384))],
        "128 heads, 4 lists": [("us", 15, lists(128, 2, 2))],
        "64 heads, lists": [("us", 169.8, lists(64, 128, 2)), ("us", 1180, lists(64, 128, 2, 16384))],
        "16, 8 heads, 8 lists": [("us", 11, lists(16, 8, 1)), ("us", 10, lists(8, 8, 1))],
        "the same, back to back": [("us", 9.5, lists(16, 8, 1, chain=16)), ("us", 9.5, lists(8, 8, 1, chain=16))],
        "128 heads, all keys": [("us", 214.8, dense("bf16", 128, 4096)), ("us", 429.5, dense("bf16", 128, 8192))],
        "128 heads, a prompt": [("us", 3595, latent_call("sparse_prefill", "bf16", 128, 1, 4096, 2048))],
        "append, 128 tokens": [("us", 5, append(128, 1))],
        "append, 65,536 tokens": [("share", 0.8, append(8, 8192))],
    }
    for heads, part in ((16, 0.87), (8, 0.9), (32, 0.75)):
        goals[f"{heads} heads, lists"] = [("share", part, lists(heads, 128, q_len)) for q_len in (1, 2)]
    for heads, *wanted in ((16, 148.4, 295.7), (32, 149.5, 296.8), (64, 151.7, 299.0)):
        goals[f"{heads} heads, all keys"] = [
            ("us", at_most, dense("bf16", heads, keys)) for at_most, keys in zip(wanted, (4096, 8192))]
        goals[f"{heads} heads, all keys, fp8"] = [
            ("of bf16", 0.62, dense("fp8-g128-f32", heads, keys), dense("bf16", heads, keys)) for keys in (4096, 8192)]
    return goals


def decode_call(table, form, **fields):
    """Which rows are of a call of one of bench's tables."""
    return lambda r: (r.get("table"), name(r)) == (table, form) and all(r.get(k) == v for k, v in fields.items())


def decode_goals():
    """The same for docs/kernels/decode-goals.md, where "beyond" is at most so many us more than another call, and
    "peer" at most what the peer takes. Rows of halftone.compare, which alone have peers, are of no table."""
    formats = ("bf16", "fp8", "int8-head", "int4-g32")
    layer = lambda form, batch, way: decode_call("layer", form, batch=batch, append=way, before=None)
    apart = lambda form, batch: ("beyond", 3, layer(form, batch, "separate"), layer(form, batch, "none"))
    one = lambda form, batch: decode_call("headline", form, batch=batch)
    shape = lambda r: tuple(r.get(k) for k in ("q_heads", "kv_heads", "q_len", "context", "batch"))
    cudnn = lambda batch: lambda r: one("bf16", batch)(r) or (
        "table" not in r and shape(r) == (8, 1, 1, 8192, batch) and name(r) == "bf16"
        and r.get("peer", "torch SDPA cudnn") == "torch SDPA cudnn")
    drafts = lambda form, context: lambda r: shape(r) == (16, 1, 3, context, 2**18 // context) and (
        r.get("arithmetic") == "fp8" and form == "fp8" if "peer" in r
        else name(r) == form and r.get("arithmetic", "16-bit") == "16-bit")
    mixed = lambda lengths: [
        ("share", 0.8, decode_call("mixed", form, q_heads=8, lengths=lengths)) for form in (*formats, "int4-row")]
    wide = lambda form, head_dim, part: [
        ("share", part, decode_call("geometry", form, head_dim=head_dim, page_size=page, batch=512))
        for page in (64, 16)]
    goals = {f"layers, batch {batch}": [("us", at_most, layer(form, batch, "fused"))
                                        for form, at_most in zip(formats, wanted)]
             for batch, *wanted in ((1, 16, 13, 13, 12), (8, 66, 37, 37, 27), (64, 475, 252, 255, 165))}
    goals |= {"append apart, batch 1, 8": [apart(form, batch) for batch in (1, 8) for form in formats],
              "append apart, batch 64": [apart(form, 64) for form in formats]}
    for form, parts in WANTED.items():
        goals[f"8/1 heads, {form}"] = [
            ("share", part / 100, one(form, batch)) for part, batch in zip(parts, (32, 128, 512))]
    goals["8/1 heads, beside cuDNN"] = [("peer", None, cudnn(batch)) for batch in (32, 128, 512)]
    goals["one request"] = [("us", 12, decode_call("policies", form, batch=1, policy="reproducible"))
                        for form in ("fp8", "int4-g32")]
    for form, at_most in WANTED_DRAFTS.items():
        goals[f"48 rows, {form}"] = [("us", at_most, drafts(form, 2**i)) for i in range(10, 18)]
    return goals | {
        "one long request": mixed("131072x1,4096x31"),
        "short beside long": mixed("128x64,4096x64"),
        "head_dim 64": wide("int4-g32", 64, 0.8) + wide("int4-row", 64, 0.8),
        "head_dim 256": wide("int4-g32", 256, 0.85),
        "append, 65,536 tokens": [("share", 0.8, decode_call("append", form, q_len=8192, batch=8))
                                  for form in ("int8-head", "int4-g32", "int4-row")],
    }


def goal_figure(rows, measure, wanted, *calls):
    """What halftone and its fastest peer took for a goal: bold where halftone meets it; None where the rows lack the
    call."""
    ours = [next((r for r in rows if call(r) and "peer" not in r), None) for call in calls]
    theirs = min((r["us"] for r in rows if "peer" in r and calls[0](r)), default=None)
    if not all(ours):
        return None, None
    text, time = us(ours[0]), ours[0]["us"]
    if measure == "us":
        met = time <= wanted
    elif measure == "peer":
        met = theirs is not None and time <= theirs
    elif measure == "share":
        met = ours[0]["ceiling_gbs"] and float(share(ours[0])[:-1]) >= 100 * wanted
        text += f" ({share(ours[0])})" if ours[0]["ceiling_gbs"] else ""
    elif measure == "beyond":
        met = time - ours[1]["us"] <= wanted
        text += f" (+{time - ours[1]['us']:.1f})"
    else:
        met = round(time / ours[1]["us"], 2) <= wanted
        text += f" ({time / ours[1]['us']:.2f})"
    return mark(text, met), us({"us": theirs}) if theirs else None


def column(rows, goals, beside):
    """What a row of a page shows: halftone's figures and, `beside` peers, theirs."""
    figures = [goal_figure(rows, *goal) for goal in goals]
    ours, theirs = (", ".join(filter(None, side)) for side in zip(*figures))
    return f"{ours}; {theirs}" if beside and theirs else ours
