"""Each rule for tensors at places, as a row: a program gives on all ranks what it gives on one device."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.placed.placements import check, place_all
from tests.placed.turns import on_ranks

FIRST, SECOND, PAIR = (0,), (1,), (1, 2)
# Places of two operands.
FOREACH = {
    name: getattr(torch, f"_foreach_{name}") for name in ("mul_", "add_", "addcmul_", "norm", "sqrt", "abs", "copy_")
}
SOME_PAIRS = [(FIRST, PAIR), (PAIR, None)]
PAIRS = [(FIRST, FIRST), (SECOND, None), (None, PAIR), (FIRST, PAIR), (SECOND, FIRST), (PAIR, SECOND)]


def tensors(*shapes, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def two():
    return tensors((3, 4), (3, 4))


def steps(*functions):
    """Return a program that calls functions, and returns their results."""
    return lambda *operands: [function(*operands) for function in functions]


def out_of_place(a, b):
    values, indices = a.max(1)
    return [
        a + b,
        a @ b.T,
        torch.cat([a, b]),
        torch.where(a > b, a, b),
        values,
        indices,
        a.sum(),
        b.view(4, 3),
        a[:, 1:],
    ]


def in_place(a, b):
    a.add_(b)
    a[1] = 7.0
    a[:, 2].mul_(2)
    a[b > 0] = -1.0
    b.copy_(a)
    b.view(-1)[3:5].zero_()
    return [a.clone()]


def into_a_common_tensor(a, b):
    total = torch.zeros((), dtype=a.dtype)
    total += a.sum()
    total += b.mean()
    out = torch.empty(0, dtype=a.dtype)
    torch.mul(a, 2, out=out)
    return [total, out]


def out_of_a_foreign_tensor(a, b):
    torch.add(a, b, out=a)
    smaller = a[:1].clone()
    torch.sort(a, out=(smaller, torch.zeros_like(a, dtype=torch.long)))
    return [smaller.add(1)]


def reads(a, b):
    values = [
        a[0, 0].item(),
        float(b.sum()),
        int(a.argmax()),
        bool(a[0, 0] > b[0, 0]),
        a.tolist(),
        (a > 0).any().item(),
    ]
    values += [f"{a.mean():.3f}", round(float(b[1, 1]), 3), math.sqrt(a[0, 0].square()), a.isnan().any().item()]
    values += [
        torch.equal(a, b),
        torch.equal(a, a),
        torch.equal(a, a.clone()),
        torch.equal(a, b[:2]),
        torch.allclose(a, b),
    ]
    values += [torch.complex(a[0, 0], b[0, 0]).item(), list(range(int(a.argmax())))]
    return [*values, "positive" if a.sum() > 0 else "negative"]


def reads_of_storages(a, b):
    arrays = [a.numpy().tolist(), np.asarray(b).tolist(), float(np.mean(a[0].numpy())), np.array(b.detach()).tolist()]
    made = [torch.tensor([a[0, 0], b[0, 0]]), torch.as_tensor([a[0, 0], 1.0]), a.new_tensor([b[0, 0], 2.0])]
    return arrays + [from_dlpack.tolist() for from_dlpack in [np.from_dlpack(a)]] + made


def indices(a, b):
    index = b.argmax(1)
    return [
        a[torch.arange(3), index],
        a[index.max() % 3],
        a.gather(1, index[:, None]),
        F.one_hot(index, 4),
        a[:, index],
    ]


def shapes_from_values(a, b):
    return [
        a[a > 0],
        torch.nonzero(b > 0),
        torch.unique(a > 0),
        a.masked_select(b > 0),
        *torch.where(a > b),
        F.one_hot(b.argmax(1)),
        *a.tensor_split(b.argmax(1).sort().values),
    ]


def random_numbers(a, b):
    results = [F.dropout(a), torch.rand_like(b), torch.bernoulli(b.sigmoid()), torch.normal(a, 1.0), torch.randn(3)]
    results += [a.uniform_().clone(), b.exponential_().clone(), torch.multinomial(a.abs(), 2), torch.randperm(5)]
    return [*results, torch.randint_like(a, 5), a.normal_(), torch.rand(2)]


def random_numbers_by_value(a, b):
    poisson = torch.poisson(a.exp() * 3)
    gamma = torch.distributions.Gamma(a.exp(), b.exp()).sample()
    beta = torch.distributions.Beta(a.exp(), b.exp()).sample()
    return [poisson, gamma, beta, torch.binomial(poisson, torch.full_like(poisson, 0.3)), torch.rand(2)]


def initialisation(a, b):
    for function in (
        nn.init.normal_,
        nn.init.kaiming_uniform_,
        nn.init.orthogonal_,
        nn.init.trunc_normal_,
        nn.init.xavier_normal_,
    ):
        function(a), function(b)
    return [torch.rand(2)]


def shapes_in_place(a, b):
    a.t_()
    b.unsqueeze_(0).transpose_(1, 2)
    a.resize_(2, 6)
    b.squeeze_()
    return [a * 2, b.sum(0)]


def storages(a, b):
    alias = a.view(-1)
    a.mul_(2)
    kept = a.detach()
    kept.add_(1)
    b.data = b.data * 2
    b.data.add_(1)
    return [alias, kept, copy.copy(a), a.untyped_storage is not None]


def data_of_another_place(a, b):
    a.data = b.clone()
    a.data.mul_(2)
    return [a.clone()]


def data_of_all_ranks(a, b):
    kept = torch.arange(12.0).view(3, 4).to(a)
    a.data = kept
    a.data.mul_(2)
    kept[0] += 1
    return [a.clone(), kept + 1, kept.sum().item()]


def set_to_another_place(a, b):
    with torch.no_grad():
        a.set_(b.clone())
    return [a * 2]


def swapped(a, b):
    first, second = a.clone(), b.clone()
    torch.utils.swap_tensors(first, second)
    return [first * 2, second + first]


def copies(a, b):
    parameter = nn.Parameter(a)
    parameter.grad = a.clone()
    both = copy.deepcopy({"a": parameter, "same": parameter, "b": b})
    assert both["a"] is both["same"]
    both["a"].data.add_(1)
    return [both["a"], both["b"], copy.deepcopy(parameter).grad, parameter, nn.Parameter(b, requires_grad=False)]


def lists(a, b):
    many = [a, b, a[0], b[0].clone()]
    FOREACH["mul_"](many, 2.0)
    FOREACH["add_"](many, [b[0, 0].clone(), a[0, 0].clone(), torch.ones(4, dtype=a.dtype), b[1].clone()])
    FOREACH["mul_"](many, a[0, 0].clone())
    FOREACH["addcmul_"](many, many, many, [1.0, 2.0, 3.0, 4.0])
    norms = FOREACH["norm"](many)
    return [*norms, torch.stack(norms).norm(), *FOREACH["sqrt"](FOREACH["abs"](many))]


def lists_into_common_tensors(a, b):
    common = [torch.zeros_like(a[0].detach().new_zeros(4)), torch.zeros(4, dtype=a.dtype)]
    FOREACH["copy_"](common, [a[0], b[0]])
    return common


def clipped(a, b):
    first, second = nn.Parameter(a), nn.Parameter(b)
    first.grad, second.grad = a * 10, b * 10
    total = nn.utils.clip_grad_norm_([first, second], 1.0)
    return [total, first.grad, second.grad, total.item()]


def finite(a, b):
    a[0, 0] = float("inf")
    flag, scale = torch.zeros(1), torch.full((1,), 0.5)
    torch.ops.aten._amp_foreach_non_finite_check_and_unscale_([b], flag, scale)
    only_b = flag.clone()
    torch.ops.aten._amp_foreach_non_finite_check_and_unscale_([a, b], flag, scale)
    return [only_b.item(), flag.item(), b.clone()]


def gradients(a, b):
    a.requires_grad_(), b.requires_grad_()
    loss = (a @ b.T).logsumexp(0).mean() + a.square().sum() * 0.1 + F.mse_loss(a, b)
    loss.backward()
    (again,) = torch.autograd.grad((a * b).sum().exp() * 1e-3, a)
    return [loss, a.grad, b.grad, again]


def hooks(a, b):
    calls = []
    a.requires_grad_(), b.requires_grad_()
    a.register_hook(lambda gradient: calls.append("a") or gradient * 2)
    product = a * b
    product.register_hook(lambda gradient: calls.append("product"))
    b.register_post_accumulate_grad_hook(lambda parameter: calls.append("b"))
    product.sum().backward()
    return [a.grad, b.grad, sorted(calls)]


def second_derivatives(a, b):
    a.requires_grad_()
    (gradient,) = torch.autograd.grad((a**3 * b).sum(), a, create_graph=True)
    gradient.square().sum().backward()
    return [a.grad]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a * 2

    @staticmethod
    def backward(ctx, gradient):
        (a,) = ctx.saved_tensors
        return gradient * 2 + 0 * a


def own_function(a, b):
    a.requires_grad_(), b.requires_grad_()
    (Doubled.apply(a) * Doubled.apply(b)).sum().backward()
    return [a.grad, b.grad]


def losses(a, b):
    targets = b.argmax(1)
    a.requires_grad_()
    loss = (
        F.cross_entropy(a, targets, label_smoothing=0.1)
        + F.kl_div(a.log_softmax(1), b.softmax(1))
        + F.triplet_margin_loss(a, b, a.roll(1, 0))
    )
    loss = (
        loss
        + F.cosine_similarity(a, b).sum()
        + torch.cdist(a, b).min()
        + F.binary_cross_entropy_with_logits(a, (b > 0).double())
    )
    loss.backward()
    return [loss.item(), a.grad, (a.argmax(1) == targets).double().mean().item(), a.topk(2).indices]


def layers(a, b):
    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 2)).double()
    loss = F.mse_loss(network(a), network(b))
    loss.backward()
    evaluated = F.mse_loss(network.eval()(a), network(b))
    evaluated.backward()
    return [loss, evaluated, *[parameter.grad for parameter in network.parameters()], *network.buffers()]


def optimizers(a, b):
    results = []
    for make in (
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, 0.1, foreach=True),
        lambda p: torch.optim.Adam(p, 0.1, amsgrad=True),
        lambda p: torch.optim.RMSprop(p, 0.1),
        lambda p: torch.optim.Adam(p, 0.1, fused=True),
    ):
        parameters = [nn.Parameter(a.clone()), nn.Parameter(b.clone()), nn.Parameter(torch.ones(4, dtype=a.dtype))]
        optimizer = make(parameters)
        for _ in range(2):
            optimizer.zero_grad()
            ((parameters[0] * parameters[1]).sum().sin() + (parameters[0] * parameters[2]).sum()).backward()
            optimizer.step()
        results += parameters
        results += [leaf for state in optimizer.state_dict()["state"].values() for leaf in state.values()]
    return results


def inference(a, b):
    with torch.inference_mode():
        linear = F.linear(a, b)
        return [
            linear,
            a.reshape(-1),
            linear.contiguous(),
            torch.ones(1, 4, dtype=a.dtype).expand_as(a) + 1,
            a.to(torch.float32),
        ]


def packed_sequences(a, b):
    a.requires_grad_()
    sequences = torch.stack([a, b, a * b], 1)
    lengths = b.argmax(1).clamp(1, 3).sort(descending=True).values
    packed = nn.utils.rnn.pack_padded_sequence(sequences, lengths, batch_first=True)
    padded, sizes = nn.utils.rnn.pad_packed_sequence(packed, batch_first=True, total_length=3)
    (padded * padded).sum().backward()
    return [a.grad, sizes.tolist(), packed.batch_sizes.tolist()]


def sparse_gradients(a, b):
    results = []
    for layer in (nn.Embedding, nn.EmbeddingBag):
        for index in (torch.tensor([[0, 1], [2, 1], [1, 1]]), b.topk(2).indices % 3):
            table = layer(3, 4, sparse=True, dtype=a.dtype, _weight=nn.Parameter(a.detach().clone()))
            optimizers = [torch.optim.SparseAdam(table.parameters(), 0.1), torch.optim.Adagrad(table.parameters(), 0.1)]
            for optimizer in optimizers:
                optimizer.zero_grad()
                (table(index).sum() * b.detach().sum() + table(index).square().sum()).backward()
                results += [table.weight.grad.is_sparse, table.weight.grad.coalesce().values().sum().item()]
                optimizer.step()
            results.append(table.weight)
    return results


def vectorised(a, b):
    return [
        torch.vmap(torch.dot)(a, b),
        torch.func.grad(lambda x: (x * b).sin().sum())(a),
        torch.func.jvp(torch.sin, (a,), (b,))[1],
    ]


def metadata(a, b):
    return [
        a.shape,
        a.stride(),
        a.device,
        a.is_contiguous(),
        b.T.is_contiguous(),
        len(a),
        a.numel(),
        a.is_floating_point(),
        a.element_size(),
        str(a.dtype),
    ]


def new_tensors(a, b):
    return [
        torch.zeros_like(a),
        a.new_zeros(2),
        torch.ones_like(b, dtype=torch.int64),
        a.new_full((2,), 3.0),
        torch.empty_like(a).fill_(1),
        torch.full((2,), a[0, 0].item()),
    ]


def averaged_weights(a, b):
    layer = nn.Linear(4, 3, dtype=a.dtype)
    layer.weight = nn.Parameter(a)
    average = torch.optim.swa_utils.AveragedModel(layer)
    average.update_parameters(layer)
    with torch.no_grad():
        layer.weight.add_(b)
    average.update_parameters(layer)
    layer.load_state_dict({name: value + 1 for name, value in average.module.state_dict().items()})
    return [average.module.weight, layer.weight, layer(b), *average.buffers()]


def scaled_loss(a, b):
    first, second = nn.Parameter(a), nn.Parameter(b)
    optimizer = torch.optim.SGD([first, second], 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for factor in (1.0, float("inf")):
        optimizer.zero_grad()
        scaler.scale((first * second).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    return [first, second, scaler.get_scale()]


def python_on_tensors(a, b):
    values = [a.sum(), b.sum(), a.max()]
    steps = 0
    while a.abs().sum() > 1 and steps < 5:
        a.div_(2)
        steps += 1
    results = [
        sum(values),
        max(values),
        sorted(values)[0],
        steps,
        a.numel() in [12],
        values[0] in b,
        float(min(a.flatten())),
    ]
    results += [list(a[0])[1], [row.sum().item() for row in b], dict(enumerate(a.tolist()))]
    return [
        *results,
        a.max() if a.max() > b.max() else b.max(),
        a[b.argmax() // 4, 0],
        *torch.split(b, 2),
        b.unbind(1)[0],
    ]


def recomputed(a, b):
    a.requires_grad_()
    layer = nn.Dropout(0.5)
    result = checkpoint(lambda x: layer(x * b).sin(), a, use_reentrant=False)
    result.sum().backward()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        noise = torch.randn_like(b)
    return [a.grad, noise, torch.rand(2)]


def vectors(a, b):
    parameters = [nn.Parameter(a), nn.Parameter(b)]
    parameters[0].grad, parameters[1].grad = a * 3, b * 3
    vector = nn.utils.parameters_to_vector(parameters)
    nn.utils.vector_to_parameters(vector.detach() * 2, parameters)
    nn.utils.clip_grad_value_(parameters, 1.0)
    return [vector.norm(), *parameters]


PROGRAMS = [
    averaged_weights,
    scaled_loss,
    python_on_tensors,
    recomputed,
    vectors,
    out_of_place,
    in_place,
    into_a_common_tensor,
    out_of_a_foreign_tensor,
    reads,
    reads_of_storages,
    indices,
    shapes_from_values,
    random_numbers,
    random_numbers_by_value,
    initialisation,
    shapes_in_place,
    storages,
    data_of_another_place,
    data_of_all_ranks,
    set_to_another_place,
    swapped,
    copies,
    lists,
    lists_into_common_tensors,
    clipped,
    finite,
    gradients,
    hooks,
    second_derivatives,
    own_function,
    losses,
    layers,
    optimizers,
    inference,
    packed_sequences,
    sparse_gradients,
    vectorised,
    metadata,
    new_tensors,
]


SLOW = (optimizers, losses, layers, vectorised, sparse_gradients)
ASKS_FOR_CUDA = (
    optimizers,
    recomputed,
    sparse_gradients,
)  # torch then asks how many GPUs there are. Such tests need their own process.


@pytest.mark.light
def test_gradients_are_brought_to_their_parameters():
    def program(places):
        first, second = place_all(places, [torch.ones(3), torch.ones(3) * 2], [FIRST, SECOND])
        common = torch.ones(3, requires_grad=True)
        first.requires_grad_(), second.requires_grad_()
        (first * second * common).sum().backward()
        assert places.place_of(first.grad) == SECOND, "the gradient is where the other factor is"
        tensors = [first, second, common]
        places.settle_gradients(tensors)
        assert [places.place_of(tensor.grad) for tensor in tensors] == [FIRST, SECOND, None]
        return [tensor.grad.tolist() for tensor in tensors]

    assert on_ranks(2, program) == [[[2.0] * 3, [1.0] * 3, [2.0] * 3]] * 2


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(program, id=program.__name__, marks=() if program in ASKS_FOR_CUDA else pytest.mark.light)
        for program in PROGRAMS
    ],
)
def test_a_program_gives_at_all_places_what_it_gives_on_one_device(program):
    failures = []
    for at in SOME_PAIRS if program in SLOW else PAIRS:
        try:
            check(program, two(), at)
        except Exception as error:
            failures.append(f"{at}: {type(error).__name__} {error}")
    assert not failures, "\n".join(failures)
