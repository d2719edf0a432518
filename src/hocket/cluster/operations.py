"""The one table of operations: what each layer computes, moves and holds, and from when to when.

FLOPs, parameters, times, bytes, the share of I and W, recomputation and sharding are all read from
the rows that this module yields. A new kind of layer is one entry in LAYERS.

Theory. A layer is three kinds of entry. A *row* is work of one phase: F (forward), I (gradient of
the input) or W (gradient of the weights). It is a matrix product (m, n, k, how many), bytes moved
over the GPU's memory, or a collective. A *tensor* is memory: made in F or I, released when I or W
has ended. A *weight* is a parameter matrix. All sizes are those of one rank. A linear layer with
input x and output y always yields the same entries, and everything else follows from them:

    F: y = x w        holds x until W
    I: dx = dy w      holds dy until W
    W: dw = dy x

Source: Korthikanti et al., arXiv 2205.05198, section 4 (what is held); Qi et al., arXiv 2401.10241
(what I and W release); Narayanan et al., arXiv 2104.04473 (tensor parallelism).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from typing import NamedTuple

from hocket import Kind
from hocket.cluster.model import Model, padded_vocab

F, I, W = Kind.F, Kind.I, Kind.W  # noqa: E741 (the field's letters)


class Work(Enum):
    """What kind of work a row is, which decides how its time is found."""

    PRODUCT = "a matrix product"
    EXPERTS = "the same product for each of a rank's experts"
    HEAD = "a matrix product in 16 bit, whatever the precision of the others"
    ATTENTION = "a fused attention core"
    TRAFFIC = "bytes read and written"
    COLLECTIVE = "a message to other ranks"


class Hides(Enum):
    """Under what a collective can run."""

    NOTHING = "exposed, as far as the stack does not hide it"
    WEIGHTS = "the product of the weight gradient of the same operation"
    INPUTS = "the product of the input gradient of the same operation"
    ATTENTION = "the attention core of the same phase"
    LAYER = "all of the layer's work in the same phase"


class Row(NamedTuple):
    """Work of one phase. `m`, `n`, `k`, `count`: products; `amount`: bytes moved or sent.

    Where tokens go to experts, `k` is how many each of them goes to.
    """

    op: str
    parts: tuple[str, ...]
    phase: Kind
    work: Work
    m: float = 0.0
    n: float = 0.0
    k: float = 0.0
    count: float = 1.0
    amount: float = 0.0
    group: str = ""
    rounds: int = 1
    hides: Hides = Hides.NOTHING

    @property
    def flops(self) -> float:
        """Operations of the products, an addition and a multiplication counted as two."""
        return 2.0 * self.m * self.n * self.k * self.count


class Tensor(NamedTuple):
    """Bytes that are held from the phase that makes them to the end of another."""

    op: str
    parts: tuple[str, ...]
    amount: float
    made: Kind
    until: Kind


class Weight(NamedTuple):
    """Parameters of one operation on one rank: `count` matrices of `rows` x `columns`.

    product: its gradient is a matrix product (W).
    """

    op: str
    rows: float
    columns: float
    count: float = 1.0
    expert: bool = False
    product: bool = False

    @property
    def parameters(self) -> float:
        """How many numbers it has."""
        return self.rows * self.columns * self.count


Entry = Row | Tensor | Weight


@dataclass(frozen=True)
class Shape:
    """What of a run decides the rows of its layers; all else only decides how many there are.

    saved: bytes per number of a product's input that is kept for W; logits: bytes per logit.
    expert_outputs: the combination keeps them for its gradient. gathered: how many ranks share
    the weights (sharding 3), 1 where each keeps its own.
    """

    seq: int
    micro_batch: int
    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    sp: bool = False
    flash: bool = True
    causal: bool = True
    saved: int = 2
    logits: float = 4.0
    expert_outputs: bool = False
    gathered: int = 1

    @property
    def tokens(self) -> float:
        """Tokens of a microbatch on one rank of the context parallel group."""
        return self.seq * self.micro_batch / self.cp

    @property
    def own(self) -> float:
        """Tokens outside the tensor parallel regions: a share of them with sequence parallelism."""
        return self.tokens / (self.tp if self.sp else 1)


# --- the entries of one operation ----------------------------------------------------------


def linear(
    op: str, m: float, n: float, k: float, *, keeps: float, gradient: float,
    made_by: tuple[str, ...] = (), parts: tuple[str, ...] = (), work: Work = Work.PRODUCT,
    count: float = 1.0, expert: bool = False,
) -> Iterator[Entry]:  # fmt: skip
    """A product of m tokens, from k to n numbers: its three phases, what it holds, its weight.

    keeps: bytes of its input held until W (0 where another operation holds the same input);
    gradient: bytes of its output's gradient held from I to W. made_by: parts whose recomputation
    makes the input again; parts: those that the product itself belongs to.
    """
    yield Row(op, parts, F, work, m, n, k, count)
    yield Row(op, parts, I, work, m, k, n, count)
    yield Row(op, parts, W, work, n, k, m, count)
    yield Tensor(op + " input", made_by, keeps, F, W)
    yield Tensor(op + " output gradient", (), gradient, I, W)
    yield Weight(op, n, k, count, expert, product=True)


def traffic(op: str, parts: tuple[str, ...], forward: float, backward: float) -> Iterator[Entry]:
    """An element-wise operation: bytes that it moves in F and in I."""
    yield Row(op, parts, F, Work.TRAFFIC, amount=forward)
    yield Row(op, parts, I, Work.TRAFFIC, amount=backward)


def norm(op: str, x: Shape, model: Model, width: float, tokens: float) -> Iterator[Entry]:
    """A normalisation: it holds its input until I; its output is the next product's input."""
    yield from traffic(op, ("norm",), 4 * width * tokens, 6 * width * tokens)
    yield Tensor(op + " input", (), 2 * width * tokens, F, I)
    yield Weight(op, 2 if model.layer_norm else 1, width)


def enter(op: str, x: Shape, width: float) -> Iterator[Entry]:
    """The border into a tensor parallel region: `op` is the product behind it."""
    size = 2 * width * x.tokens
    if x.tp > 1 and x.sp:
        yield Row(op, (), F, Work.COLLECTIVE, amount=size, group="tp")
        yield Row(op, (), I, Work.COLLECTIVE, amount=size, group="tp", hides=Hides.WEIGHTS)
        yield Row(op, (), W, Work.COLLECTIVE, amount=size, group="tp", hides=Hides.INPUTS)
    elif x.tp > 1:
        yield Row(
            op, (), I, Work.COLLECTIVE, amount=size, group="tp", rounds=2, hides=Hides.WEIGHTS
        )


def leave(op: str, x: Shape, width: float) -> Iterator[Entry]:
    """The border out of a tensor parallel region: `op` is the product before it."""
    size = 2 * width * x.tokens
    if x.tp > 1 and x.sp:
        yield Row(op, (), F, Work.COLLECTIVE, amount=size, group="tp")
        yield Row(op, (), I, Work.COLLECTIVE, amount=size, group="tp")
    elif x.tp > 1:
        yield Row(op, (), F, Work.COLLECTIVE, amount=size, group="tp", rounds=2)


def residual(op: str, x: Shape, model: Model) -> Iterator[Entry]:
    """Dropout and the sum with the residual stream, fused."""
    size = model.hidden * x.own
    masks = size if model.dropout else 0.0
    yield from traffic(op, (), 6 * size + masks, 4 * size + masks)
    yield Tensor(op + " dropout mask", (), masks, F, I)


# --- attention -----------------------------------------------------------------------------


def core(
    x: Shape, model: Model, heads: float, query: float, value: float, moved: float
) -> Iterator[Entry]:
    """Scores, softmax and their product with the values; fused, only a sum per row is kept.

    query, value: numbers per head; moved: numbers of keys and values per token, all heads.
    """
    full, windowed = model.mean_context(x.seq, causal=x.causal)
    share = model.window_layers / model.layers
    context = full * (1 - share) + windowed * share
    if x.cp > 1:
        size = 2 * moved * x.tokens * x.cp
        for phase, rounds in ((F, 1), (I, 2)):
            yield Row("attention core", (), phase, Work.COLLECTIVE, amount=size, group="cp",
                      rounds=rounds, hides=Hides.ATTENTION)  # fmt: skip
    if x.flash:
        row = Row("attention core", ("core",), F, Work.ATTENTION, x.tokens, context, query + value,
                  heads)  # fmt: skip
        yield row
        yield row._replace(phase=I, count=2.5 * heads)
        yield Tensor("row sums", (), 4 * heads * x.tokens, F, I)
        return
    batch, rows = x.micro_batch * heads, x.seq / x.cp
    for op, n, k in (("scores", x.seq, query), ("context", value, x.seq)):
        yield Row(op, ("core",), F, Work.HEAD, rows, n, k, batch)
        yield Row(op, ("core",), I, Work.HEAD, rows, n, k, 2 * batch)
    scores = rows * x.seq * batch
    dropout = 3 * scores if model.dropout else 0.0
    yield from traffic("softmax", ("core",), 6 * scores + dropout, 8 * scores + dropout)
    yield Tensor("softmax output", ("core",), 2 * scores, F, I)
    yield Tensor("softmax dropout and mask", ("core",), dropout, F, I)


def grouped_query(x: Shape, model: Model) -> Iterator[Entry]:
    """Attention with as many or fewer key-value heads than query heads."""
    h, d, heads = model.hidden, model.head_dim, model.heads / x.tp
    kv = max(1.0, model.kv_heads / x.tp)
    qkv = (heads + 2 * kv) * d
    yield from enter("qkv", x, h)
    yield from linear("qkv", x.tokens, qkv, h, keeps=x.saved * h * x.own, made_by=("norm",),
                      gradient=2 * qkv * x.tokens)  # fmt: skip
    if not model.positions:
        yield from traffic(
            "rotation", (), 4 * (heads + kv) * d * x.tokens, 4 * (heads + kv) * d * x.tokens
        )
    yield Tensor("query, key, value", (), 2 * qkv * x.tokens, F, I)
    yield from core(x, model, heads, d, d, 2 * kv * d)
    yield from linear("projection", x.tokens, h, heads * d, keeps=2 * heads * d * x.tokens,
                      gradient=2 * h * x.own)  # fmt: skip
    yield from leave("projection", x, h)
    if model.qkv_bias or model.biases:
        yield Weight("qkv bias", 1, qkv)
    if model.biases:
        yield Weight("projection bias", 1, h)
    if model.qk_norm:
        yield from traffic("query and key norm", (), 4 * (heads + kv) * d * x.tokens,
                           6 * (heads + kv) * d * x.tokens)  # fmt: skip
        yield Tensor("query and key norm input", (), 2 * (heads + kv) * d * x.tokens, F, I)
        yield Weight("query and key norm", 2, d)


def latent(x: Shape, model: Model) -> Iterator[Entry]:
    """Multi-head latent attention: queries, keys and values from a compressed form."""
    mla = model.mla
    assert mla is not None
    h, heads, tokens = model.hidden, model.heads / x.tp, x.tokens
    query, key_value = heads * (mla.nope + mla.rope), heads * (mla.nope + mla.value)
    compressed = mla.q_rank + mla.kv_rank + mla.rope
    yield from linear("compress", x.own, compressed, h, made_by=("norm",),
                      keeps=x.saved * h * x.own, gradient=2 * compressed * x.own)  # fmt: skip
    if mla.q_rank:
        yield from norm("query norm", x, model, mla.q_rank, x.own)
    yield from norm("key norm", x, model, mla.kv_rank, x.own)
    q_from = mla.q_rank or h
    yield from enter("query up", x, q_from)
    yield from linear("query up", tokens, query, q_from, keeps=x.saved * mla.q_rank * x.own,
                      made_by=("norm",), parts=("mla_up",),
                      gradient=2 * query * tokens)  # fmt: skip
    yield from linear("key-value up", tokens, key_value, mla.kv_rank,
                      keeps=x.saved * mla.kv_rank * x.own, made_by=("norm",), parts=("mla_up",),
                      gradient=2 * key_value * tokens)  # fmt: skip
    yield from traffic("rotation", ("mla_up",), 8 * query * tokens, 8 * query * tokens)
    yield Tensor(
        "query, key, value", ("mla_up",), 2 * (2 * query + heads * mla.value) * tokens, F, I
    )
    moved = 2 * query + heads * mla.value
    yield from core(x, model, heads, mla.nope + mla.rope, mla.value, moved)
    yield from linear("projection", tokens, h, heads * mla.value,
                      keeps=2 * heads * mla.value * tokens, gradient=2 * h * x.own)  # fmt: skip
    yield from leave("projection", x, h)


# --- networks ------------------------------------------------------------------------------


def network(
    op: str, x: Shape, model: Model, width: float, *, tokens: float, keeps: float,
    gradient: float, parts: tuple[str, ...] = (), work: Work = Work.PRODUCT, count: float = 1.0,
) -> Iterator[Entry]:  # fmt: skip
    """Two or three matrices of a width with an activation function between them.

    tokens: of each of `count` equal networks; keeps, gradient: bytes of the input and of the
    output's gradient that it holds itself.
    """
    h, n = model.hidden, (2 if model.gated else 1) * width
    expert = work is Work.EXPERTS
    yield from linear(op + " in", tokens, n, h, keeps=keeps, work=work, count=count, parts=parts,
                      made_by=parts or ("norm",), gradient=2 * n * tokens * count,
                      expert=expert)  # fmt: skip
    yield Tensor(op + " activation input", parts, 2 * n * tokens * count, F, I)
    moved = 2 * (n + width) * tokens * count
    yield from traffic(
        op + " activation", ("activation", *parts), moved, moved + 2 * n * tokens * count
    )
    yield from linear(op + " out", tokens, h, width, work=work, count=count, parts=parts,
                      made_by=("activation", *parts), keeps=x.saved * width * tokens * count,
                      gradient=gradient, expert=expert)  # fmt: skip
    if model.biases and not expert:
        yield Weight(op + " biases", 1, n + h)


def dense(x: Shape, model: Model) -> Iterator[Entry]:
    """The network of a layer without experts."""
    yield from enter("network in", x, model.hidden)
    yield from network("network", x, model, model.ffn / x.tp, tokens=x.tokens,
                       keeps=x.saved * model.hidden * x.own,
                       gradient=2 * model.hidden * x.own)  # fmt: skip
    yield from leave("network out", x, model.hidden)


def experts(x: Shape, model: Model) -> Iterator[Entry]:
    """Router, dispatch, experts and combination; the shared experts beside them."""
    moe = model.moe
    assert moe is not None
    h, parts = model.hidden, ("experts",)
    own = x.tokens / x.tp  # each rank of the tensor parallel group routes its share of the tokens
    routed = own * moe.top_k * x.etp
    yield from linear("router", own, moe.experts, h, keeps=x.saved * h * x.own, gradient=0,
                      made_by=("norm",), work=Work.HEAD)  # fmt: skip
    yield Tensor("routing", (), 10 * moe.experts * own, F, I)
    for phase in (F, I):
        for op in ("dispatch", "combine"):
            yield Row(op, parts, phase, Work.COLLECTIVE, k=moe.top_k,
                      amount=2 * moe.top_k * h * own, group="ep")  # fmt: skip
            if x.etp > 1:
                yield Row(op, parts, phase, Work.COLLECTIVE, amount=2 * h * routed, group="etp")
        yield Row("permutation", parts, phase, Work.TRAFFIC, amount=8 * h * routed)
    local = moe.experts / x.ep
    yield from network("experts", x, model, moe.ffn / x.etp, tokens=routed / local, parts=parts,
                       work=Work.EXPERTS, count=local, keeps=x.saved * h * routed,
                       gradient=2 * h * routed)  # fmt: skip
    if x.expert_outputs:
        yield Tensor("expert outputs", parts, 2 * h * routed, F, I)
    if moe.shared_ffn:
        yield from enter("shared experts in", x, h)
        yield from network("shared experts", x, model, moe.shared_ffn / x.tp, tokens=x.tokens,
                           keeps=0, gradient=2 * h * x.own)  # fmt: skip
        yield from leave("shared experts out", x, h)


# --- layers --------------------------------------------------------------------------------


def _block(
    x: Shape, model: Model, body: Callable[[Shape, Model], Iterator[Entry]]
) -> Iterator[Entry]:
    attention = latent if model.mla else grouped_query
    for part, op in ((attention, "attention"), (body, "network")):
        yield from norm(op + " norm", x, model, model.hidden, x.own)
        yield from part(x, model)
        yield from residual(op + " residual", x, model)
        if model.norms == 4:
            yield from norm(op + " output norm", x, model, model.hidden, x.own)
    if x.gathered > 1:
        yield from _gathers(x, model, body)


def _gathers(
    x: Shape, model: Model, body: Callable[[Shape, Model], Iterator[Entry]]
) -> Iterator[Entry]:
    """Weights that are shared by the data parallel ranks: gathered in F and I, reduced after W."""
    size = 2.0 * sum(w.parameters for w in _weights(x, model, body))
    for phase in (F, I, W):
        yield Row("weights", (), phase, Work.COLLECTIVE, amount=size, group="dp", hides=Hides.LAYER)


def _weights(
    x: Shape, model: Model, body: Callable[[Shape, Model], Iterator[Entry]]
) -> list[Weight]:
    attention = latent if model.mla else grouped_query
    return [e for part in (attention, body) for e in part(x, model) if isinstance(e, Weight)]


def dense_layer(x: Shape, model: Model) -> Iterator[Entry]:
    """A layer with one network."""
    yield from _block(x, model, dense)


def expert_layer(x: Shape, model: Model) -> Iterator[Entry]:
    """A layer with experts."""
    yield from _block(x, model, experts)


def embedding(x: Shape, model: Model) -> Iterator[Entry]:
    """The embedding of tokens and positions, with its gradient."""
    h = model.hidden
    yield Row("embedding", (), F, Work.TRAFFIC, amount=4 * h * x.tokens)
    yield Row("embedding", (), W, Work.TRAFFIC, amount=10 * h * x.tokens)
    yield from leave("embedding", x, h)
    if model.dropout:
        yield Tensor("embedding dropout mask", (), h * x.own, F, W)
    yield Weight("embedding", padded_vocab(model, x.tp) / x.tp, h)
    if model.positions:
        yield Weight("positions", model.positions, h)


def _logits(op: str, x: Shape, model: Model) -> Iterator[Entry]:
    vocab = padded_vocab(model, x.tp) / x.tp
    yield from enter(op, x, model.hidden)
    for entry in linear(op, x.tokens, vocab, model.hidden, keeps=2 * model.hidden * x.own,
                        gradient=2 * vocab * x.tokens, work=Work.HEAD):  # fmt: skip
        if not isinstance(entry, Weight):
            yield entry
    yield from traffic(op + " loss", (), 12 * vocab * x.tokens, 8 * vocab * x.tokens)
    yield Tensor(op + " logits", (), x.logits * vocab * x.tokens, F, I)


def head(x: Shape, model: Model) -> Iterator[Entry]:
    """The last normalisation, the product with the vocabulary, and the loss."""
    yield from norm("head norm", x, model, model.hidden, x.own)
    yield from _logits("head", x, model)
    yield Weight("head", padded_vocab(model, x.tp) / x.tp, model.hidden, product=True)


def further_token(x: Shape, model: Model) -> Iterator[Entry]:
    """A layer that predicts one token further, from the sum of two inputs, with the head again.

    Source: DeepSeek-V3, arXiv 2412.19437, section 2.2.
    """
    h = model.hidden
    for op in ("token norm", "state norm", "last norm"):
        yield from norm(op, x, model, h, x.own)
    yield from linear("join", x.own, h, 2 * h, keeps=4 * h * x.own, gradient=2 * h * x.own)
    yield from (expert_layer if model.moe else dense_layer)(x, model)
    yield from _logits("further head", x, model)


LAYERS: dict[str, Callable[[Shape, Model], Iterator[Entry]]] = {
    "dense": dense_layer,
    "experts": expert_layer,
    "embedding": embedding,
    "head": head,
    "further token": further_token,
}


class Layer:
    """The entries of one layer: rows, tensors and weights, and what is read from them."""

    def __init__(self, entries: list[Entry]) -> None:
        self.rows = tuple(e for e in entries if isinstance(e, Row))
        self.tensors = tuple(e for e in entries if isinstance(e, Tensor) and e.amount)
        self.weights = tuple(e for e in entries if isinstance(e, Weight))

    @cached_property
    def flops(self) -> float:
        """Operations of the forward products on one rank."""
        return sum(row.flops for row in self.rows if row.phase is F)

    @cached_property
    def parameters(self) -> tuple[float, float]:
        """Parameters on one rank: those outside the experts, those of the experts."""
        kinds = (False, True)
        shared, expert = (sum(w.parameters for w in self.weights if w.expert is k) for k in kinds)
        return shared, expert


@lru_cache(maxsize=65536)
def layer(kind: str, shape: Shape, model: Model) -> Layer:
    """The entries of a layer of a kind (a key of LAYERS) in a shape."""
    return Layer(list(LAYERS[kind](shape, model)))


def kinds_of(model: Model) -> list[str]:
    """The kind of each layer of the model, the embedding, the head and further tokens included."""
    body = ["experts" if model.has_experts(i) else "dense" for i in range(model.layers)]
    return ["embedding", *body, *["further token"] * model.mtp, "head"]


def parameters(model: Model, *, mtp: bool = True) -> float:
    """How many parameters the model has, vocabulary not padded; without the layers of `mtp`."""
    shape = Shape(1, 1)
    kinds = [k for k in kinds_of(model) if mtp or k != "further token"]
    total = sum(sum(layer(k, shape, model).parameters) for k in kinds)
    padding = (padded_vocab(model, 1) - model.vocab) * model.hidden
    vocabularies = 1 if model.tied else 2
    tied = padded_vocab(model, 1) * model.hidden if model.tied else 0
    return total - tied - vocabularies * padding


def active_parameters(model: Model) -> float:
    """How many parameters a token passes through, without the layers of `mtp`."""
    moe = model.moe
    if moe is None:
        return parameters(model)
    per_expert = (3 if model.gated else 2) * model.hidden * moe.ffn
    layers = sum(model.has_experts(i) for i in range(model.layers))
    return parameters(model, mtp=False) - layers * (moe.experts - moe.top_k) * per_expert


def layer_flops(model: Model, seq: int) -> list[float]:
    """Operations of the forward of a sequence: in the embedding, in each layer, in the head."""
    kinds = (kind for kind in kinds_of(model) if kind != "further token")
    return [layer(kind, Shape(seq, 1), model).flops for kind in kinds]


CONVENTIONS = {
    "causal": "three times the forward, attention over the tokens before, router left out",
    "full": "the same, attention over the full square",
    "6N": "6 parameters and 12 layers x hidden x sequence, the embedding counted",
}


def flops_per_token(model: Model, seq: int, convention: str = "causal") -> float:
    """Model FLOPs of forward and backward per token, under a convention of CONVENTIONS.

    Source: Megatron-LM's num_floating_point_operations, old ("full") and new ("causal"); PaLM,
    arXiv 2204.02311, appendix B ("6N").
    """
    if convention == "6N":
        return 6 * parameters(model) + 12 * model.layers * model.hidden * seq
    shape = Shape(seq, 1, causal=convention == "causal")
    vocab = model.vocab / padded_vocab(model, 1)
    total = 0.0
    for kind in kinds_of(model):
        for row in layer(kind, shape, model).rows:
            if row.phase is F and row.op != "router":
                total += row.flops * (vocab if row.op in ("head", "further head") else 1.0)
    return 3 * total / seq
