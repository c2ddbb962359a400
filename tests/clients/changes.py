"""Five public scripts: how they are called, and the lines that Paceline asks for.

`changes` is what a user would do by hand, at most five lines; `fixed` is done to the plain script
too, where a test needs fewer samples or no chance that two ways of running cannot share.
"""

from dataclasses import dataclass, field

START = "import paceline; paceline.init()"


@dataclass(frozen=True)
class Client:
    """A public script and what is done to it."""

    name: str
    script: str
    arguments: tuple[str, ...]
    changes: dict[str, str]
    """Text of the script -> what stands there instead."""

    result: str
    """The file it leaves behind, or a regular expression for the numbers it prints."""

    fixed: dict[str, str] = field(default_factory=dict)
    follows: bool = True
    """Nothing in it depends on how a batch is divided: synchronous modes equal the single run."""

    refused: dict[str, str] = field(default_factory=dict)
    """Architecture -> words of the sentence."""


MNIST = Client(
    name="mnist",
    script="main.py",
    arguments=("--epochs", "2", "--no-accel", "--save-model"),
    changes={
        "import argparse\n": f"import argparse; {START}\n",
        "    scheduler = StepLR(": (
            "    model, optimizer = paceline.distribute(model, optimizer)\n"
            "    train_loader = paceline.shard(train_loader, batch='global')\n"
            "    scheduler = StepLR("
        ),
        "if args.save_model:": "if args.save_model and paceline.is_main():",
    },
    result="mnist_cnn.pt",
    fixed={"nn.Dropout(0.25)": "nn.Dropout(0.0)", "nn.Dropout(0.5)": "nn.Dropout(0.0)"},
)

DCGAN = Client(
    name="dcgan",
    script="main.py",
    arguments=(
        *("--dataset", "mnist", "--dataroot", ".", "--workers", "0", "--batchSize", "16"),
        *("--ngf", "4", "--ndf", "4", "--nz", "8", "--niter", "1", "--manualSeed", "1"),
    ),
    changes={
        "import argparse\n": f"import argparse; {START}\n",
        "if opt.dry_run:\n    opt.niter": (
            "netD, optimizerD = paceline.distribute(netD, optimizerD)\n"
            "netG, optimizerG = paceline.distribute(netG, optimizerG)\n"
            "dataloader = paceline.shard(dataloader, batch='global')\n"
            "if opt.dry_run:\n    opt.niter"
        ),
        "'%s/netG_epoch_%d.pth' % (opt.outf, epoch)": (
            "'%s/netG_epoch_%d.%d.pth' % (opt.outf, epoch, paceline.rank())"
        ),
    },
    result="netG_epoch_0*.pth",
    follows=False,  # batch norm, and noise drawn by each worker
)

WORDS = Client(
    name="word_language_model",
    script="main.py",
    arguments=(
        *("--data", "text", "--emsize", "8", "--nhid", "8", "--epochs", "2", "--batch_size", "4"),
        *("--bptt", "12", "--dropout", "0", "--lr", "0.01", "--use-optimizer"),
    ),
    changes={
        "import argparse\n": f"import argparse; {START}\n",
        "train_data = batchify(corpus.train, args.batch_size)\n": (
            "train_data = batchify(corpus.train, args.batch_size)[:, paceline.rank() :: "
            "paceline.workers()]\n"
            "args.batch_size, args.save = train_data.size(1), f'model.{paceline.rank()}.pt'\n"
        ),
        "    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)\n": (
            "    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)\n"
            "    model, optimizer = paceline.distribute(model, optimizer)\n"
        ),
    },
    result="model*.pt",
)

SEQUENCE = Client(
    name="time_sequence_prediction",
    script="train.py",
    arguments=("--steps", "2"),
    changes={
        "import argparse\n": f"import argparse; {START}\n",
        "input = torch.from_numpy(data[3:, :-1])": (
            "input = torch.from_numpy(data[3 + paceline.rank() :: paceline.workers(), :-1])"
        ),
        "    target = torch.from_numpy(data[3:, 1:])": (
            "    target = torch.from_numpy(data[3 + paceline.rank() :: paceline.workers(), 1:])"
        ),
        "    #begin to train\n": "    seq, optimizer = paceline.distribute(seq, optimizer)\n",
    },
    fixed={"future = 1000": "future = 10"},
    result=r"test loss: ([\d.e+-]+)",
    refused={"server:mode=async": "LBFGS cannot"},
)

NANOGPT = Client(
    name="nanoGPT",
    script="train.py",
    arguments=(
        *("--device=cpu", "--dtype=float32", "--compile=False", "--dataset=text"),
        *("--n_layer=2", "--n_head=2", "--n_embd=16", "--block_size=16", "--batch_size=4"),
        *("--gradient_accumulation_steps=2", "--max_iters=6", "--eval_interval=3"),
        *("--eval_iters=2", "--lr_decay_iters=6", "--warmup_iters=2"),
    ),
    changes={
        "import os\nimport time": f"import os; {START}\nimport time",
        "ddp = int(os.environ.get('RANK', -1)) != -1": "ddp = False",
        "    ix = torch.randint(len(data) - block_size, (batch_size,))\n": (
            "    ix = torch.randint(len(data) - block_size, (batch_size,))"
            "[paceline.rank() :: paceline.workers()]\n"
        ),
        "checkpoint = None # free up memory\n": (
            "model, optimizer = paceline.distribute(model, optimizer)\n"
        ),
        "                torch.save(checkpoint,": (
            "                if paceline.is_main(): torch.save(checkpoint,"
        ),
    },
    result="out/ckpt.pt",
)

CLIENTS = (MNIST, DCGAN, WORDS, SEQUENCE, NANOGPT)
