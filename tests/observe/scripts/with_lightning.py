"""A Lightning job that knows nothing of Paceline."""

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2)
        )

    def training_step(self, batch, _):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


torch.manual_seed(0)
x = torch.randn(640, 32)
loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), 16)
trainer = lightning.Trainer(
    max_epochs=1,
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(Classifier(), loader)
