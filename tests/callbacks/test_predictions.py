"""Rows of all ranks are gathered in slices, in order, whatever each rank holds."""

import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from cnnstrategies import ConfigurationError
from cnnstrategies.callbacks import PredictionWriter, predictions


class Strategy:
    root_device = torch.device("cpu")

    def all_gather(self, values):
        gathered = [torch.empty_like(values) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, values)
        return torch.stack(gathered)


class Run:
    strategy = Strategy()
    world_size = 3


def gather(rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=3)
    predictions.GATHER_ROWS = 4
    counts = [9, 0, 5]
    first = sum(counts[:rank])
    indices = torch.arange(first, first + counts[rank])
    all_indices, rows = predictions.gather_rows(Run, indices, indices[:, None] * torch.ones(1, 2))
    assert all_indices.tolist() == list(range(14))
    assert torch.equal(rows, torch.arange(14.0)[:, None].expand(14, 2))
    dist.destroy_process_group()


def test_ranks_with_different_numbers_of_rows_give_all_rows():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    mp.start_processes(gather, args=(port,), nprocs=3, start_method="fork")


def test_what_cannot_be_written_is_refused():
    with pytest.raises(ConfigurationError, match=r"predict_step returned Tensor: .* 'index'"):
        PredictionWriter().on_predict_batch_end(None, None, torch.zeros(2), None, 0)
