"""trl's DPOTrainer with a reference model: train, save, resume from a checkpoint in a second trainer."""

import json
import os
import tempfile

import torch
from datasets import Dataset
from trl import DPOConfig, DPOTrainer
from words import WORDS, make_model, make_tokenizer

output_dir = tempfile.mkdtemp()
pairs = {
    "prompt": [" ".join(WORDS[k : k + 2]) for k in range(16)],
    "chosen": [" " + " ".join(WORDS[k + 3 : k + 5]) for k in range(16)],
    "rejected": [" " + WORDS[k + 5] for k in range(16)],
}
config = DPOConfig(
    output_dir=output_dir,
    per_device_train_batch_size=4,
    max_steps=4,
    learning_rate=1e-3,
    logging_steps=1,
    save_steps=2,
    bf16=False,
    gradient_checkpointing=False,
    use_cpu=not torch.cuda.is_available(),
    report_to="none",
    disable_tqdm=True,
)


def train(checkpoint=None):
    trainer = DPOTrainer(
        model=make_model(),
        ref_model=make_model(),
        args=config,
        train_dataset=Dataset.from_dict(pairs),
        processing_class=make_tokenizer(),
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return trainer.model, [[entry["loss"], entry["rewards/margins"]] for entry in logged]


model, logged = train()
resumed_model, resumed = train(os.path.join(output_dir, "checkpoint-2"))
norm = sum(p.detach().float().norm().item() for p in resumed_model.parameters())
where = str(next(resumed_model.parameters()).device)
print(json.dumps({"logged": logged, "resumed": resumed, "norm": norm, "where": where}))
