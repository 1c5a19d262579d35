"""transformers' Trainer as its users call it: train, evaluate, save, resume, and generate with the result."""

import argparse
import json
import os
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--bf16", action="store_true")
options = parser.parse_args()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
print(f"training on {device}, {torch.cuda.device_count()} GPUs")


class Tokens(Dataset):
    def __init__(self, length):
        drawn = torch.Generator().manual_seed(length)
        self.ids = torch.randint(3, 99, (length, 16), generator=drawn)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index].clone()}


def make_model():
    set_seed(0)
    config = LlamaConfig(
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config)


output_dir = tempfile.mkdtemp()
arguments = TrainingArguments(
    output_dir=output_dir,
    per_device_train_batch_size=4,
    per_device_eval_batch_size=4,
    gradient_accumulation_steps=2,
    num_train_epochs=1,
    learning_rate=1e-3,
    warmup_steps=1,
    logging_steps=1,
    save_steps=2,
    eval_strategy="steps",
    eval_steps=2,
    bf16=options.bf16,
    use_cpu=not torch.cuda.is_available(),
    gradient_checkpointing=options.bf16,
    report_to="none",
    disable_tqdm=True,
)
trainer = Trainer(model=make_model(), args=arguments, train_dataset=Tokens(40), eval_dataset=Tokens(8))
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

again = Trainer(model=make_model(), args=arguments, train_dataset=Tokens(40), eval_dataset=Tokens(8))
again.train(resume_from_checkpoint=os.path.join(output_dir, "checkpoint-2"))
resumed = [entry["loss"] for entry in again.state.log_history if "loss" in entry]
evaluated = again.evaluate()["eval_loss"]
again.save_model(os.path.join(output_dir, "final"))

model = AutoModelForCausalLM.from_pretrained(os.path.join(output_dir, "final"), device_map=device)
inputs = torch.tensor([[1, 5, 8, 13]]).to(model.device)
generated = model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=8, do_sample=False)
if torch.cuda.is_available():
    torch.cuda.empty_cache()
    print(f"{torch.cuda.memory_allocated() / 1e6:.1f} MB allocated")
where = str(next(again.model.parameters()).device)
numbers = {"losses": losses, "resumed": resumed, "evaluated": evaluated, "generated": generated[0].tolist()}
print(json.dumps({**numbers, "where": where}))
