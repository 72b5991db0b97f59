#!/usr/bin/env python3
"""Trains a small Llama-style decoder on plain text and captures q, k and v of chosen layers.

The capture is what the attention of a trained model really sees: q and k after
RoPE and v, in bf16, for one held-out document behind a beginning-of-sequence
token. Trained K has outlier channels and attention sinks; random normal data
has neither, so quantisation errors measured on it say little.

Model: RMSNorm before each block, RoPE (theta 10000, channel i paired with
i + head_dim/2), grouped query heads, SwiGLU, no biases, untied output matrix.
Training: AdamW, bf16 autocast over fp32 weights, warm-up, constant rate, linear
decay over the last 30% of the steps. Every sequence starts with <bos>.

Input: a folder of .txt or .txt.xz files as prepare_text.sh writes them, each
document introduced by a form feed and its name. One document in 100, and the
captured one, are held out of training.

Output: one safetensors file with, for each captured layer i,
  layers.<i>.q  bf16 [tokens, q_heads, head_dim]
  layers.<i>.k  bf16 [tokens, kv_heads, head_dim]
  layers.<i>.v  bf16 [tokens, kv_heads, head_dim]
and a __metadata__ that says how to use them.

Example (the shipped file):
  python3 train_and_capture.py build/data-text --minutes 5.8 --out llama-tiny-capture.safetensors
"""

import argparse
import dataclasses
import hashlib
import itertools
import json
import lzma
import math
import pathlib
import random
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn

from kv_statistics import choose_layers, layer_statistics, print_statistics

BOS, EOS = 0, 1
TOKENIZER_SAMPLE_CHARS = 40_000_000  # text the tokenizer is trained on, at most
HELD_OUT_ONE_IN = 100


# ---------------------------------------------------------------- text

def read_documents(folder):
    """All (name, text) documents of the folder's .txt and .txt.xz files, in sorted file order."""
    documents = []
    for path in sorted(folder.glob("*.txt*")):
        opener = lzma.open if path.suffix == ".xz" else open
        with opener(path, "rt", encoding="utf-8") as file:
            for document in file.read().split("\f")[1:]:
                name, _, text = document.partition("\n")
                documents.append((f"{path.name.split('.txt')[0]}:{name}", text))
    if not documents:
        sys.exit(f"{folder}: no documents; run prepare_text.sh first")
    return documents


def is_held_out(name, captured_name):
    digest = hashlib.sha256(name.encode()).digest()
    return name == captured_name or int.from_bytes(digest[:4], "little") % HELD_OUT_ONE_IN == 0


def train_tokenizer(texts, vocab_size):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sample, size = [], 0
    for text in texts:
        if size >= TOKENIZER_SAMPLE_CHARS:
            break
        sample.append(text)
        size += len(text)
    tokenizer.train_from_iterator(sample, trainer)
    return tokenizer


def encode_stream(tokenizer, texts):
    """The texts as one token stream, each followed by <eos>. uint16 [tokens]."""
    parts = []
    for start in range(0, len(texts), 1000):
        for encoding in tokenizer.encode_batch(texts[start : start + 1000]):
            parts.append(np.array(encoding.ids + [EOS], dtype=np.uint16))
    return np.concatenate(parts)


def prepare_tokens(args):
    """Tokenises the folder, or reads the result of an earlier call from --cache.

    Returns a dict of uint16 arrays: train and held_out (streams), captured (one document).
    """
    key_fields = (args.vocab_size, args.seed, args.document)
    key = hashlib.sha256(json.dumps(key_fields).encode()).hexdigest()[:12]
    cached = args.cache / f"tokens-{key}.npz" if args.cache else None
    if cached and cached.exists():
        return dict(np.load(cached))

    documents = read_documents(args.text)
    if args.document not in {name for name, _ in documents}:
        sys.exit(f"--document {args.document}: not in {args.text}; names look like {documents[0][0]}")
    random.Random(args.seed).shuffle(documents)
    train = [text for name, text in documents if not is_held_out(name, args.document)]
    held_out = [text for name, text in documents if is_held_out(name, args.document)]
    captured = next(text for name, text in documents if name == args.document)
    tokenizer = train_tokenizer(train, args.vocab_size)
    tokens = {
        "train": encode_stream(tokenizer, train),
        "held_out": encode_stream(tokenizer, held_out),
        "captured": encode_stream(tokenizer, [captured]),
    }
    chars = sum(len(text) for text in train)
    print(
        f"text: {len(train)} training documents, {chars / 1e6:.1f} M characters, {len(tokens['train']) / 1e6:.2f} M tokens;"
        f" held out {len(held_out)} documents, {len(tokens['held_out']) / 1e3:.0f} k tokens"
    )
    if cached:
        cached.parent.mkdir(parents=True, exist_ok=True)
        np.savez(cached, **tokens)
        tokenizer.save(str(args.cache / f"tokenizer-{key}.json"))
    return tokens


def with_bos(stream, starts, seq_len):
    """Inputs <bos> s[0..n-2] and targets s[0..n-1] for each start. Two int64 [batch, seq_len]."""
    offsets = starts[:, None] + torch.arange(seq_len, device=starts.device)
    targets = stream[offsets]
    bos = torch.full_like(targets[:, :1], BOS)
    return torch.cat([bos, targets[:, :-1]], dim=1), targets


def training_batches(stream, batch, seq_len, generator):
    """Endless shuffled passes over the stream, each with another phase of the sequence cuts."""
    while True:
        phase = int(torch.randint(seq_len, (1,), generator=generator))
        count = (len(stream) - phase) // seq_len
        order = torch.randperm(count, generator=generator) * seq_len + phase
        for i in range(0, count - batch + 1, batch):
            yield with_bos(stream, order[i : i + batch].to(stream.device), seq_len)


# ---------------------------------------------------------------- model

@dataclasses.dataclass(frozen=True)
class ModelConfig:
    vocab_size: int = 16384
    hidden: int = 1024
    layers: int = 10
    q_heads: int = 8
    kv_heads: int = 2
    head_dim: int = 128
    ffn: int = 2816
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5


def rope_table(config, seq_len, device):
    """cos and sin of position * theta^(-2i/head_dim). Two fp32 [seq_len, head_dim / 2]."""
    exponent = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float64) / config.head_dim
    angle = torch.arange(seq_len, device=device, dtype=torch.float64)[:, None] * config.rope_theta**-exponent
    return angle.cos().float(), angle.sin().float()


def apply_rope(x, cos, sin):
    """Rotates channel pairs (i, i + head_dim/2). x [batch, heads, seq, head_dim], any float type."""
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.q_heads, self.kv_heads, self.head_dim = config.q_heads, config.kv_heads, config.head_dim
        self.q_proj = nn.Linear(config.hidden, config.q_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden, config.kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden, config.kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.q_heads * config.head_dim, config.hidden, bias=False)

    def forward(self, x, cos, sin, captured):
        batch, seq, _ = x.shape
        q = self.q_proj(x).view(batch, seq, self.q_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, seq, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, seq, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        if captured is not None:
            captured.append((q, k, v))
        # Repeated K and V let every fused SDPA kernel take the call; they cost little here.
        k, v = (x.repeat_interleave(self.q_heads // self.kv_heads, dim=1) for x in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, seq, -1))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.gate_proj = nn.Linear(config.hidden, config.ffn, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.ffn, bias=False)
        self.down_proj = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(self, x, cos, sin, captured):
        x = x + self.attention(self.attention_norm(x), cos, sin, captured)
        y = self.ffn_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class Decoder(nn.Module):
    def __init__(self, config, seq_len, device):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.output = nn.Linear(config.hidden, config.vocab_size, bias=False)
        self.cos, self.sin = rope_table(config, seq_len, device)
        self.to(device)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * config.layers) if into_residual else 1.0))

    def features(self, ids, blocks=None, captured=None):
        """The residual stream after the last block; `blocks` may be compiled ones. [batch, seq, hidden]"""
        seq = ids.shape[1]
        x, cos, sin = self.embedding(ids), self.cos[:seq], self.sin[:seq]
        for block in blocks or self.blocks:
            x = block(x, cos, sin, captured)
        return x


def next_token_loss(norm, output, x, targets):
    logits = output(norm(x)).float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def autocast(device):
    return torch.autocast(device.type, dtype=torch.bfloat16)


@torch.no_grad()
def mean_loss(model, stream, seq_len, device, sequences=64, batch=16):
    """Mean next-token loss in nats over the first sequences of the stream, uncompiled."""
    count = min(sequences, (len(stream) - 1) // seq_len)
    losses = []
    for starts in torch.arange(count, device=device).mul(seq_len).split(batch):
        ids, targets = with_bos(stream, starts, seq_len)
        with autocast(device):
            losses += [next_token_loss(model.norm, model.output, model.features(ids), targets)] * len(starts)
    return float(torch.stack(losses).mean())


# ---------------------------------------------------------------- training

def learning_rate(step, total, args):
    """Warm-up, constant, then linear decay to a tenth over the last 30% of the steps."""
    warm = min(1.0, (step + 1) / args.warmup)
    decay = 1.0 if not total else min(1.0, max(0.1, (total - step) / (0.3 * total)))
    return args.lr * warm * decay


def make_optimizer(model, args, device):
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=device.type == "cuda")


def train(model, tokens, args, device, checkpoint):
    """Trains for --steps, or for as many steps as fit --minutes. Returns a dict of figures."""
    stream = torch.from_numpy(tokens["train"].astype(np.int32)).to(device).long()
    held_out = torch.from_numpy(tokens["held_out"].astype(np.int32)).to(device).long()
    batches = training_batches(stream, args.batch, args.seq_len, torch.Generator().manual_seed(args.seed))
    optimizer = make_optimizer(model, args, device)
    # Block by block, so that the equal blocks are compiled once; evaluation stays uncompiled.
    compiled = torch.compile if args.compile else lambda function: function
    blocks, loss_function = [compiled(block) for block in model.blocks], compiled(next_token_loss)

    total, begun, clock_step, recent = args.steps, time.time(), 20, []
    clock = begun
    for step in itertools.count():
        rate = learning_rate(step, total, args)
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids, targets = next(batches)
        with autocast(device):
            loss = loss_function(model.norm, model.output, model.features(ids, blocks), targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent = (recent + [loss.detach()])[-100:]

        done = step + 1
        if done == clock_step:
            loss.item()  # waits for the device
            clock = time.time()
        if done == 2 * clock_step and not total:
            loss.item()
            per_step = (time.time() - clock) / clock_step
            # 3% is kept for the evaluations on the way.
            total = done + int(0.97 * (args.minutes * 60 - (time.time() - begun)) / per_step)
            print(f"{per_step * 1e3:.1f} ms a step: {total} steps fit {args.minutes} minutes")
        if done % 100 == 0 or done == total:
            train_loss = float(torch.stack(recent).mean())
            speed = args.batch * args.seq_len * done / (time.time() - begun)
            print(f"step {done:5d}  loss {train_loss:.3f}  grad {float(norm):.2f}  lr {rate:.2e}  {speed / 1e3:.0f} k tokens/s", flush=True)
            if not math.isfinite(train_loss):
                sys.exit("the loss is not finite; lower --lr")
        late = not args.steps and time.time() - begun > args.minutes * 60 + 20
        if late:
            print(f"out of time after {done} of {total} steps")
        if done == total or late:
            break
        if done % args.checkpoint_every == 0:
            checkpoint(train_loss, mean_loss(model, held_out, args.seq_len, device, 16), done)

    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.time() - begun
    return {
        "steps": done,
        "seconds": seconds,
        "tokens": done * args.batch * args.seq_len,
        "epochs": done * args.batch * args.seq_len / len(stream),
        "train_loss": float(torch.stack(recent).mean()),
        "held_out_loss": mean_loss(model, held_out, args.seq_len, device),
    }


# ---------------------------------------------------------------- capture

@torch.no_grad()
def capture(model, document, seq_len, device):
    """q, k, v of every layer over <bos> and the document's first tokens, and the document's loss.

    Returns ([(q, k, v)] with bf16 [tokens, heads, head_dim] each, loss in nats).
    """
    stream = torch.from_numpy(document.astype(np.int32)).to(device).long()
    if len(stream) < seq_len:
        sys.exit(f"--document: {len(stream)} tokens, fewer than --seq-len {seq_len}; name a longer one")
    ids, targets = with_bos(stream, torch.zeros(1, dtype=torch.long, device=device), seq_len)
    layers = []
    with autocast(device):
        loss = next_token_loss(model.norm, model.output, model.features(ids, captured=layers), targets)
    as_stored = [tuple(x[0].transpose(0, 1).to(torch.bfloat16).contiguous() for x in layer) for layer in layers]
    return as_stored, float(loss)


def save_capture(path, layers, chosen, metadata):
    tensors = {}
    for i in chosen:
        for name, tensor in zip("qkv", layers[i]):
            if not torch.isfinite(tensor).all():
                sys.exit(f"layers.{i}.{name} has values that are not finite; nothing was written")
            tensors[f"layers.{i}.{name}"] = tensor.cpu()
    partial = path.with_name(path.name + ".partial")
    save_file(tensors, partial, metadata=metadata)
    partial.replace(path)
    print(f"wrote {path}: layers {chosen}, {path.stat().st_size / 1e6:.2f} MB", flush=True)


def metadata_for(model, args, figures, chosen):
    config = model.config
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "format": "pt",
        "model": (
            f"llama-tiny: {config.layers} layers, hidden {config.hidden}, {config.q_heads} query heads, {config.kv_heads} KV heads,"
            f" head_dim {config.head_dim}, SwiGLU {config.ffn}, vocabulary {config.vocab_size}, {parameters / 1e6:.1f} M parameters"
        ),
        "layers": ",".join(map(str, chosen)),
        "rope_theta": str(config.rope_theta),
        "rope_pairing": f"half: channel i with i + {config.head_dim // 2}; q and k are stored after RoPE, positions from 0",
        "tokens": str(args.seq_len),
        "first_token": "<bos>",
        "mask": "causal",
        "softmax_scale": repr(config.head_dim**-0.5),
        "source_text": args.source,
        "license": args.license,
        "held_out_loss": f"{figures['held_out_loss']:.4f}",
        "train_loss": f"{figures['train_loss']:.4f}",
        "captured_text_loss": f"{figures['captured_text_loss']:.4f}",
        "training": f"{figures['steps']} steps of {args.batch} x {args.seq_len} tokens, seed {args.seed}",
    }


def capture_and_save(model, tokens, args, device, figures):
    layers, loss = capture(model, tokens["captured"], args.seq_len, device)
    statistics = [layer_statistics(*layer) for layer in layers]
    chosen = choose_layers(statistics) if args.capture_layers == "auto" else [int(i) for i in args.capture_layers.split(",")]
    figures = figures | {"captured_text_loss": loss}
    save_capture(args.out, layers, chosen, metadata_for(model, args, figures, chosen))
    args.out.with_suffix(".json").write_text(json.dumps({"figures": figures, "layers": statistics}, indent=1) + "\n")
    print_statistics(dict(enumerate(statistics)))
    return figures


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=pathlib.Path, help="folder of .txt or .txt.xz files from prepare_text.sh")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="safetensors file to write; statistics go beside it as .json")
    parser.add_argument("--cache", type=pathlib.Path, help="folder that keeps the tokenised text between calls")
    parser.add_argument("--document", default="sqlite3-doc:sqlite3/atomiccommit.html", help="document to capture, file:name")
    parser.add_argument("--capture-layers", default="auto", help="layers to capture, as 1,8; auto: one of each half, by outliers and sinks")
    parser.add_argument("--steps", type=int, default=0, help="training steps; 0: as many as fit --minutes")
    parser.add_argument("--minutes", type=float, default=5.8, help="training time when --steps is 0")
    parser.add_argument("--batch", type=int, default=48, help="sequences a step")
    parser.add_argument("--seq-len", type=int, default=1024, help="tokens a sequence, and tokens captured")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=200, help="steps of learning-rate warm-up")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--checkpoint-every", type=int, default=1000, help="steps between captures on the way")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="use torch.compile")
    parser.add_argument("--save-model", type=pathlib.Path, help="write the trained weights here")
    parser.add_argument("--load-model", type=pathlib.Path, help="skip the training: capture from weights of --save-model")
    parser.add_argument("--source", default="SQLite documentation, atomiccommit.html, from Debian 12's sqlite3-doc", help="metadata: captured text")
    parser.add_argument("--license", default="captured text: public domain; training text: permissive licences, see data/README.md", help="metadata: licence")
    defaults = ModelConfig()
    for field in dataclasses.fields(ModelConfig):
        option = "--" + field.name.replace("_", "-")
        parser.add_argument(option, type=field.type, default=getattr(defaults, field.name))
    args = parser.parse_args()
    if args.vocab_size > 1 << 16:
        parser.error(f"--vocab-size {args.vocab_size}: above 65536, the most that uint16 tokens hold")
    if args.q_heads % args.kv_heads:
        parser.error(f"--q-heads {args.q_heads} is no multiple of --kv-heads {args.kv_heads}")
    return args


def main():
    args = parse_arguments()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = ModelConfig(**{field.name: getattr(args, field.name) for field in dataclasses.fields(ModelConfig)})
    began = time.time()
    tokens = prepare_tokens(args)
    print(f"tokens ready after {time.time() - began:.0f} s; {len(tokens['train']) / 1e6:.2f} M for training", flush=True)
    model = Decoder(config, args.seq_len, device)

    if args.load_model:
        state = torch.load(args.load_model, map_location=device, weights_only=True)
        model.load_state_dict(state["weights"])
        capture_and_save(model, tokens, args, device, state["figures"])
        return

    def checkpoint(train_loss, held_out_loss, steps):
        print(f"step {steps}: train loss {train_loss:.4f}, held-out loss {held_out_loss:.4f}")
        figures = {"steps": steps, "train_loss": train_loss, "held_out_loss": held_out_loss}
        capture_and_save(model, tokens, args, device, figures)

    figures = train(model, tokens, args, device, checkpoint)
    figures = capture_and_save(model, tokens, args, device, figures)
    if args.save_model:
        torch.save({"weights": model.state_dict(), "figures": figures}, args.save_model)
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
