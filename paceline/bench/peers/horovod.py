"""Peer `horovod`: Horovod's all-reduce under PyTorch, over gloo, started by `horovodrun`.

It refuses a channels-last model and takes channels-last pictures, so that is what it gets.
"""

import os

import horovod
import horovod.torch as hvd
import torch

from paceline.bench.peers import ddp, job
from paceline.bench.peers.horovodrun import become_rank
from paceline.launch import share_cores


def main() -> None:
    become_rank()
    with job.member(horovod=horovod.__version__) as member:
        cores = share_cores(member.identity.workers)[member.identity.rank]
        if cores:
            os.sched_setaffinity(0, cores)
        torch.set_num_threads(member.job.threads)
        hvd.init()
        model = ddp.build(member).to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        optimizer = hvd.DistributedOptimizer(
            ddp.sgd(member, model), named_parameters=model.named_parameters()
        )
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        ddp.train(member, model, optimizer)
        hvd.shutdown()


if __name__ == "__main__":
    job.run(main)
