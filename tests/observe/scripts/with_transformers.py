"""A job on the Hugging Face Trainer that knows nothing of Paceline."""

import sys

import torch
from transformers import Trainer, TrainingArguments


class Classifier(torch.nn.Module):
    """Two layers, which return what the Trainer expects."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2)
        )

    def forward(self, x=None, labels=None):
        scores = self.net(x)
        return {"loss": torch.nn.functional.cross_entropy(scores, labels), "logits": scores}


torch.manual_seed(0)
inputs = torch.randn(640, 32)
classes = (inputs[:, 0] > 0).long()
samples = [{"x": inputs[i], "labels": classes[i]} for i in range(640)]
arguments = TrainingArguments(
    sys.argv[1],
    per_device_train_batch_size=16,
    num_train_epochs=1,
    use_cpu=True,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
)
Trainer(Classifier(), arguments, train_dataset=samples).train()
