"""Libraries that train: they own the loop, and some ask by themselves which device there is."""

from __future__ import annotations

import os
import tempfile

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from cases import HALF, case
from small import VOCABULARY, WORDS, classified, classifier, llama, tokenizer


class Sentences(Dataset):  # type: ignore[type-arg]
    def __init__(self, length: int) -> None:
        drawn = torch.Generator().manual_seed(length)
        self.tokens = torch.randint(3, VOCABULARY, (length, 16), generator=drawn)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def batches() -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(TensorDataset(*classified()), batch_size=8)


@case("transformers", "Trainer: train, evaluate, save, resume from a checkpoint")
def trainer(device: str) -> dict[str, object]:
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=4,
            num_train_epochs=1,
            learning_rate=1e-3,
            logging_steps=2,
            save_steps=5,
            eval_strategy="steps",
            eval_steps=5,
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=llama(), args=arguments, train_dataset=Sentences(40), eval_dataset=Sentences(8)
        )
        loss = trainer.train().training_loss
        again = Trainer(model=llama(), args=arguments, train_dataset=Sentences(40), eval_dataset=Sentences(8))
        again.train(resume_from_checkpoint=os.path.join(folder, "checkpoint-5"))
        logged = [entry["loss"] for entry in again.state.log_history if "loss" in entry]
        return {
            "loss": loss,
            "resumed": logged,
            "evaluated": again.evaluate()["eval_loss"],
            "weight": again.model.lm_head.weight,
        }


@case("transformers", "Trainer with bf16=True and gradient checkpointing", tolerance=HALF)
def trainer_in_bf16(device: str) -> dict[str, object]:
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=4,
            max_steps=4,
            bf16=True,
            use_cpu=device == "cpu",
            gradient_checkpointing=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(model=llama(), args=arguments, train_dataset=Sentences(40))
        return {"loss": trainer.train().training_loss, "weight": trainer.model.lm_head.weight}


@case("transformers", "Trainer whose forward and backward pass are a dr.program")
def trainer_as_program(device: str) -> dict[str, object]:
    from transformers import Trainer, TrainingArguments

    import distruntime as dr

    def passes(model: nn.Module, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=input_ids, labels=labels).loss
        loss.backward()
        return loss.detach()  # type: ignore[no-any-return]

    program = dr.program(passes) if device != "cpu" else None

    # What a Trainer counts at each step is not in reach of the program.
    class Programmed(Trainer):
        def training_step(
            self, model: nn.Module, inputs: dict[str, torch.Tensor], num_items_in_batch: object = None
        ) -> torch.Tensor:
            model.train()
            return (program or passes)(model, **self._prepare_inputs(inputs))

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=4,
            max_steps=8,
            learning_rate=1e-3,
            logging_steps=4,
            use_cpu=device == "cpu",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Programmed(model=llama(), args=arguments, train_dataset=Sentences(40))
        loss = trainer.train().training_loss
    if program is not None and program.replays < 5:
        raise AssertionError(f"{program!r}: {program.why}")
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"loss": loss, "logged": logged, "weight": trainer.model.lm_head.weight}


@case("accelerate", "prepare, accumulate, clip, save_state and load_state")
def accelerate_loop(device: str) -> dict[str, object]:
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, batches(), scheduler)
    losses = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            for x, y in loader:
                with accelerator.accumulate(model):
                    loss = nn.functional.cross_entropy(model(x), y)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                losses.append(loss.detach())
            accelerator.save_state(folder)
        accelerator.load_state(folder)
        accelerator.save_model(model, os.path.join(folder, "model"))
    return {"losses": torch.stack(losses), "weight": accelerator.unwrap_model(model)[0].weight}


@case("accelerate", 'mixed_precision="bf16"', tolerance=HALF)
def accelerate_in_bf16(device: str) -> dict[str, object]:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16")
    model = classifier()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), batches())
    losses = []
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().float())
    return {"losses": torch.stack(losses)}


@case("accelerate", "load_checkpoint_and_dispatch, infer_auto_device_map, cpu_offload")
def accelerate_dispatch(device: str) -> dict[str, object]:
    from accelerate import (
        cpu_offload,
        infer_auto_device_map,
        init_empty_weights,
        load_checkpoint_and_dispatch,
    )
    from safetensors.torch import save_file

    def net() -> nn.Sequential:
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))

    x, model = torch.ones(2, 8), net()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.safetensors")
        save_file(model.state_dict(), path)
        with init_empty_weights():
            empty = net()
        chosen = infer_auto_device_map(empty)
        loaded = load_checkpoint_and_dispatch(empty, path, device_map=chosen)
    cpu_offload(model, execution_device=torch.device(device))
    return {"loaded": loaded(x.to(device)), "offloaded": model(x)}


@case("trl", "SFTTrainer")
def sft(device: str) -> dict[str, object]:
    from datasets import Dataset as Table
    from trl import SFTConfig, SFTTrainer

    texts = [" ".join(WORDS[k : k + 5]) for k in range(24)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder,
            per_device_train_batch_size=4,
            max_steps=4,
            save_steps=2,
            max_length=16,
            bf16=False,
            use_cpu=device == "cpu",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = SFTTrainer(
            model=llama(),
            args=arguments,
            train_dataset=Table.from_dict({"text": texts}),
            processing_class=tokenizer(),
        )
        return {"loss": trainer.train().training_loss, "weight": trainer.model.lm_head.weight}


@case("trl", "DPOTrainer")
def dpo(device: str) -> dict[str, object]:
    from datasets import Dataset as Table
    from trl import DPOConfig, DPOTrainer

    pairs = {
        "prompt": [" ".join(WORDS[k : k + 2]) for k in range(16)],
        "chosen": [" " + " ".join(WORDS[k + 3 : k + 5]) for k in range(16)],
        "rejected": [" " + WORDS[k + 5] for k in range(16)],
    }
    with tempfile.TemporaryDirectory() as folder:
        arguments = DPOConfig(
            output_dir=folder,
            per_device_train_batch_size=4,
            max_steps=3,
            bf16=False,
            use_cpu=device == "cpu",
            gradient_checkpointing=False,
            report_to="none",
            disable_tqdm=True,
        )
        trainer = DPOTrainer(
            model=llama(),
            ref_model=llama(),
            args=arguments,
            train_dataset=Table.from_dict(pairs),
            processing_class=tokenizer(),
        )
        return {"loss": trainer.train().training_loss, "weight": trainer.model.lm_head.weight}


@case("peft", "LoRA: train, merge, save_pretrained, from_pretrained")
def lora(device: str) -> dict[str, object]:
    from peft import LoraConfig, PeftModel, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(llama(), config).to(device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    tokens = Sentences(8).tokens.to(device)
    losses = []
    for _ in range(5):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model.save_pretrained(folder)
        loaded = PeftModel.from_pretrained(llama().to(device), folder)
        return {
            "losses": torch.stack(losses),
            "loaded": loaded(tokens).logits,
            "merged": model.merge_and_unload()(tokens).logits,
        }


def lightning_module() -> nn.Module:
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = classifier()
            self.losses: list[torch.Tensor] = []

        def training_step(self, batch: tuple[torch.Tensor, ...], index: int) -> torch.Tensor:
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("train_loss", loss)
            self.losses.append(loss.detach())
            return loss

        def validation_step(self, batch: tuple[torch.Tensor, ...], index: int) -> None:
            self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    return Module()


@case("lightning", "Trainer(): fit, validation, checkpoint, clipping, accumulation")
def lightning_trainer(device: str) -> dict[str, object]:
    import lightning as L

    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            max_epochs=2,
            gradient_clip_val=0.5,
            accumulate_grad_batches=2,
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = lightning_module()
        trainer.fit(module, batches(), batches())
        trainer.validate(module, batches(), ckpt_path="best", verbose=False)
        return {"losses": torch.stack(module.losses), "val_loss": trainer.callback_metrics["val_loss"]}


@case("lightning", 'Trainer(precision="bf16-mixed")', tolerance=HALF)
def lightning_in_bf16(device: str) -> dict[str, object]:
    import lightning as L

    trainer = L.Trainer(
        max_epochs=1,
        precision="bf16-mixed",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = lightning_module()
    trainer.fit(module, batches())
    return {"losses": torch.stack(module.losses).float()}


@case("lightning", "Fabric(): setup, backward, clip_gradients, save and load")
def fabric(device: str) -> dict[str, object]:
    import lightning as L

    fabric = L.Fabric()
    fabric.launch()
    model = classifier()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), 1e-2))
    losses = []
    for x, y in fabric.setup_dataloaders(batches()):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        losses.append(loss.detach())
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "state.ckpt")
        fabric.save(path, {"model": model, "optimizer": optimizer})
        fabric.load(path, {"model": model, "optimizer": optimizer})
    return {"losses": torch.stack(losses), "weight": next(model.parameters())}


@case("pytorch-ignite", "supervised trainer and evaluator, metrics, ModelCheckpoint")
def ignite(device: str) -> dict[str, object]:
    from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
    from ignite.handlers import ModelCheckpoint
    from ignite.metrics import Accuracy, Loss

    model = classifier().to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer = create_supervised_trainer(model, optimizer, nn.functional.cross_entropy, device=device)
    metrics = {"accuracy": Accuracy(device=device), "loss": Loss(nn.functional.cross_entropy, device=device)}
    evaluator = create_supervised_evaluator(model, metrics, device=device)
    losses: list[float] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output))
    with tempfile.TemporaryDirectory() as folder:
        saver = ModelCheckpoint(folder, "net", require_empty=False)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, saver, {"model": model, "optimizer": optimizer})
        trainer.run(batches(), 2)
    evaluator.run(batches())
    return {"losses": losses, "metrics": dict(evaluator.state.metrics), "weight": next(model.parameters())}


@case("skorch", "NeuralNetClassifier in GridSearchCV, with Checkpoint")
def skorch(device: str) -> dict[str, object]:
    from sklearn.model_selection import GridSearchCV
    from skorch import NeuralNetClassifier
    from skorch.callbacks import Checkpoint

    x, y = (part.numpy() for part in classified())
    with tempfile.TemporaryDirectory() as folder:
        net = NeuralNetClassifier(
            classifier,
            criterion=nn.CrossEntropyLoss,
            max_epochs=3,
            lr=0.1,
            device=device,
            verbose=0,
            iterator_train__shuffle=False,
            callbacks=[Checkpoint(dirname=folder)],
        )
        search = GridSearchCV(net, {"lr": [0.1, 0.2]}, cv=2)
        search.fit(x, y)
        best = search.best_estimator_
        best.load_params(checkpoint=Checkpoint(dirname=folder))
    return {
        "scores": search.cv_results_["mean_test_score"],
        "losses": [epoch["train_loss"] for epoch in best.history],
        "probabilities": best.predict_proba(x),
        "weight": best.module_[0].weight,
    }


@case("fastai", "Learner without device=: fit_one_cycle with a metric, save, load, get_preds")
def fastai(device: str) -> dict[str, object]:
    from fastai.callback.schedule import fit_one_cycle  # noqa: F401  # a method of Learner by being imported
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader as Loader
    from fastai.learner import Learner
    from fastai.metrics import accuracy
    from fastai.torch_core import default_device

    rows = list(zip(*classified()))
    # fastai looks for a device by itself.
    loaders = DataLoaders(Loader(rows, bs=8), Loader(rows, bs=8), device=default_device())
    with tempfile.TemporaryDirectory() as folder:
        learner = Learner(
            loaders, classifier(), loss_func=nn.CrossEntropyLoss(), metrics=accuracy, path=folder
        )
        with learner.no_bar(), learner.no_logging():
            learner.fit_one_cycle(2, 1e-2)
            learner.save("net")
            learner.load("net")
            predicted, _ = learner.get_preds()
        return {
            "recorded": np.array(learner.recorder.values, dtype=float),
            "predicted": predicted,
            "weight": learner.model[0].weight,
        }
