"""trl's SFTTrainer: train, save every other step, resume from a checkpoint in a second trainer."""

import json
import os
import tempfile

import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer
from words import WORDS, make_model, make_tokenizer

output_dir = tempfile.mkdtemp()
dataset = Dataset.from_dict({"text": [" ".join(WORDS[k : k + 6]) for k in range(24)]})
config = SFTConfig(
    output_dir=output_dir,
    per_device_train_batch_size=4,
    max_steps=6,
    learning_rate=1e-3,
    logging_steps=1,
    save_steps=3,
    max_length=16,
    bf16=False,
    use_cpu=not torch.cuda.is_available(),
    report_to="none",
    disable_tqdm=True,
)


def train(checkpoint=None):
    trainer = SFTTrainer(
        model=make_model(), args=config, train_dataset=dataset, processing_class=make_tokenizer()
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return trainer.model, losses


model, losses = train()
resumed_model, resumed = train(os.path.join(output_dir, "checkpoint-3"))
norm = sum(p.detach().float().norm().item() for p in resumed_model.parameters())
where = str(next(resumed_model.parameters()).device)
print(json.dumps({"losses": losses, "resumed": resumed, "norm": norm, "where": where}))
