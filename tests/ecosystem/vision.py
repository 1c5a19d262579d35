"""Libraries of images."""

from __future__ import annotations

import tempfile

import torch
from torch import nn

import torchvision_operators
from cases import NotRun, case
from small import images


@case("timm", "train with Mixup, ModelEmaV3, create_optimizer_v2 and a soft loss", tolerance=2e-3)
def timm_training(device: str) -> dict[str, object]:
    import timm
    from timm.data import Mixup
    from timm.loss import SoftTargetCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.utils import ModelEmaV3

    model = timm.create_model("resnet18", num_classes=10).to(device)
    average = ModelEmaV3(model, decay=0.9)
    optimizer = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05)
    mixup, criterion = Mixup(mixup_alpha=0.2, num_classes=10), SoftTargetCrossEntropy()
    x, y = images(device), torch.tensor([1, 2, 3, 4]).to(device)
    losses = []
    for _ in range(3):
        mixed, target = mixup(x.clone(), y)
        loss = criterion(model(mixed), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update(model)
        losses.append(loss.detach())
    with torch.no_grad():
        return {"losses": torch.stack(losses), "averaged": average.module.eval()(x)}


@case("timm", "ViT, ConvNeXt, EfficientNet: forward and backward", tolerance=1e-3)
def timm_models(device: str) -> dict[str, object]:
    import timm

    found: dict[str, object] = {}
    for name, sizes in {
        "vit_tiny_patch16_224": {"img_size": 32},
        "convnext_atto": {},
        "efficientnet_b0": {},
    }.items():
        model = timm.create_model(name, num_classes=4, **sizes).to(device).eval()
        out = model(images(device, 1))
        out.sum().backward()
        found[name] = [out, next(model.parameters()).grad]
    return found


@case("torchvision", "nms and roi_align")
def torchvision_operators_of_its_own(device: str) -> dict[str, object]:
    import torchvision

    if not torchvision_operators.loaded():
        raise NotRun("the installed wheel is for CUDA, and its operators do not load here")
    boxes = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1.1], [2, 2, 3, 3]]).to(device)
    kept = torchvision.ops.nms(boxes, torch.tensor([0.1, 0.9, 0.5]).to(device), 0.5)
    return {"kept": kept, "aligned": torchvision.ops.roi_align(images(device, 1), [boxes * 8], 4)}


@case("torchvision", "ResNet and MobileNet: a training step; v2 transforms, MixUp", tolerance=1e-3)
def torchvision_models(device: str) -> dict[str, object]:
    from torchvision import models
    from torchvision.transforms import v2

    x, y = images(device), torch.arange(4).to(device)
    augment = v2.Compose(
        [v2.RandomHorizontalFlip(1.0), v2.CenterCrop(28), v2.Normalize([0.5] * 3, [0.5] * 3)]
    )
    found: dict[str, object] = {"augmented": augment(x), "mixed": v2.MixUp(num_classes=4)(x, y)[0].shape}
    for make in (models.resnet18, models.mobilenet_v3_small):
        model = make(num_classes=4).to(device).eval()
        loss = nn.functional.cross_entropy(model(augment(x)), y)
        loss.backward()
        found[make.__name__] = loss
    return found


@case("torchvision", "tv_tensors: an image and its boxes through v2 transforms", tolerance=1e-3)
def tv_tensors(device: str) -> dict[str, object]:
    from torchvision import tv_tensors
    from torchvision.transforms import v2

    image = tv_tensors.Image(images(device)[0])
    boxes = tv_tensors.BoundingBoxes(
        torch.tensor([[1, 1, 5, 5]]).to(device), format="XYXY", canvas_size=(32, 32)
    )
    out = v2.Compose([v2.RandomHorizontalFlip(1.0), v2.Resize(16)])(image, boxes)
    return {"image": out[0], "boxes": out[1], "kinds": [type(part).__name__ for part in out]}


def unet(device: str) -> nn.Module:
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).to(device)


@case("diffusers", "DDPM training with EMAModel, save_pretrained, from_pretrained", tolerance=1e-3)
def diffusion_training(device: str) -> dict[str, object]:
    from diffusers import DDPMScheduler, UNet2DModel
    from diffusers.training_utils import EMAModel

    model, scheduler = unet(device), DDPMScheduler(num_train_timesteps=100)
    optimizer, average = torch.optim.AdamW(model.parameters(), 1e-3), EMAModel(model.parameters())
    torch.manual_seed(0)
    losses = []
    for _ in range(3):
        clean = torch.randn(2, 1, 8, 8, device=device)
        noise = torch.randn_like(clean)
        steps = torch.randint(0, 100, (2,), device=device)
        loss = nn.functional.mse_loss(model(scheduler.add_noise(clean, noise, steps), steps).sample, noise)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        average.step(model.parameters())
        losses.append(loss.detach())
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model.save_pretrained(folder)
        loaded = UNet2DModel.from_pretrained(folder).to(device)
        return {"losses": torch.stack(losses), "loaded": loaded(clean, steps).sample}


@case("diffusers", "DDPMPipeline with generator=torch.Generator(device)", tolerance=1e-3)
def diffusion_pipeline(device: str) -> dict[str, object]:
    from diffusers import DDPMPipeline, DDPMScheduler

    pipeline = DDPMPipeline(unet(device).eval(), DDPMScheduler(num_train_timesteps=50)).to(device)
    pipeline.set_progress_bar_config(disable=True)
    drawn = torch.Generator(device=device).manual_seed(0)
    found = pipeline(batch_size=1, num_inference_steps=3, generator=drawn, output_type="np").images
    return {"images": found, "weight": next(pipeline.unet.parameters())}


@case("kornia", "augmentations, filters, rotation", tolerance=1e-3)
def kornia(device: str) -> dict[str, object]:
    import kornia as K

    x = images(device)
    augment = K.augmentation.AugmentationSequential(
        K.augmentation.RandomHorizontalFlip(p=1.0), K.augmentation.RandomErasing(p=1.0), data_keys=["input"]
    )
    return {
        "augmented": augment(x).shape,
        "blurred": K.filters.gaussian_blur2d(x, (3, 3), (1.0, 1.0)),
        "edges": K.filters.sobel(x),
        "rotated": K.geometry.rotate(x, torch.full((4,), 10.0).to(device)),
    }


@case("monai", "UNet, DiceLoss, sliding_window_inference", tolerance=1e-3)
def monai(device: str) -> dict[str, object]:
    from monai.inferers import sliding_window_inference
    from monai.losses import DiceLoss
    from monai.networks.nets import UNet

    model = UNet(2, 1, 2, channels=(4, 8), strides=(2,)).to(device)
    x = torch.rand(1, 1, 32, 32).to(device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    losses = []
    for _ in range(3):
        loss = DiceLoss(to_onehot_y=True, softmax=True)(model(x), (x > 0.5).float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    with torch.no_grad():
        return {
            "losses": torch.stack(losses),
            "inferred": sliding_window_inference(x, (16, 16), 2, model.eval()),
        }


@case("open_clip_torch", "CLIP: the contrastive loss and its gradients", tolerance=1e-3)
def open_clip(device: str) -> dict[str, object]:
    import open_clip

    model = open_clip.model.CLIP(
        embed_dim=16,
        vision_cfg={"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 8},
        text_cfg={"context_length": 8, "vocab_size": 50, "width": 16, "heads": 2, "layers": 1},
    ).to(device)
    pictures = model.encode_image(images(device), normalize=True)
    texts = model.encode_text(torch.arange(32).view(4, 8).to(device), normalize=True)
    loss = open_clip.ClipLoss()(pictures, texts, model.logit_scale.exp())
    loss.backward()
    return {"loss": loss, "gradient": model.text_projection.grad}


@case("segmentation-models-pytorch", "Unet, DiceLoss, the IoU", tolerance=1e-3)
def segmentation(device: str) -> dict[str, object]:
    import segmentation_models_pytorch as smp

    model = smp.Unet("resnet18", encoder_weights=None, classes=1).to(device).eval()
    x = images(device)
    y = (x[:, :1] > 0.5).float()
    out = model(x)
    loss = smp.losses.DiceLoss("binary")(out, y)
    loss.backward()
    counts = smp.metrics.get_stats((out.sigmoid() > 0.5).long(), y.long(), mode="binary")
    return {"loss": loss, "iou": smp.metrics.iou_score(*counts, reduction="micro")}
